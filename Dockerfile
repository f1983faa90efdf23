# The platform in an image: environments, evaluation, command line; with a build argument the training stack too.
#   docker build -t forge-env .
#   docker build -t forge-env:cpu --build-arg STACK=cpu .
#   docker build -t forge-env --build-arg BASE_IMAGE=my-registry/python:3.11 .
# The base needs Python 3.11 with venv (python:3.11-slim, or Debian with python3-venv).
ARG BASE_IMAGE=python:3.11-slim
FROM ${BASE_IMAGE}

# platform, cpu or gpu
ARG STACK=platform
# Where packages come from, for networks with a mirror.
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS

ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /opt/forge-env
COPY pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY scripts scripts
COPY forge_env forge_env
COPY environments environments
COPY sandboxes sandboxes
COPY trainers trainers
COPY apps apps

# Compiled here, since the user of the image may not write what Python compiles.
RUN UV_COMPILE_BYTECODE=1 VENV=/opt/venv STACK="$STACK" scripts/setup.sh

# Not root: code of a model runs in sandboxes only, and those need no more than this user has.
RUN echo forge-env:x:10001:10001::/work:/bin/sh >>/etc/passwd && mkdir -p /work && chown 10001:10001 /work
USER 10001:10001
ENV HOME=/work
WORKDIR /work
ENTRYPOINT ["forge-env"]
CMD ["--help"]
