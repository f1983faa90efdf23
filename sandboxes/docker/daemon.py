"""Reaching the Docker daemon: what it can do, or in one line why it can't be reached."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from forge_env.errors import SandboxUnavailableError

FIX = "start Docker, or set DOCKER_HOST"
NO_PERMISSION = "add yourself to the group docker, or run as root"
_SHORT_TIMEOUT_S = 5


@dataclass(frozen=True)
class Daemon:
    """What the daemon can do."""

    seccomp: bool
    remapped: bool
    """User ids of containers are mapped to others of the host, and few (userns-remap, rootless)."""
    podman: bool = False
    """Podman's compatible socket: it reads the system-call profile from a file."""

    @classmethod
    def of(cls, info: dict[str, Any], version: dict[str, Any]) -> Daemon:
        """From `docker info` and `docker version`."""
        options = info.get("SecurityOptions") or []
        remapped = any(option.startswith(("name=userns", "name=rootless")) for option in options)
        podman = any("Podman" in part.get("Name", "") for part in version.get("Components") or [])
        return cls(any(option.startswith("name=seccomp") for option in options), remapped, podman)


def connect(**options: Any) -> tuple[Any, Daemon]:
    """A client and what its daemon can do. Raises `SandboxUnavailableError`."""
    import docker
    import docker.errors
    import requests

    try:
        client = docker.from_env(**options)
        try:
            return client, Daemon.of(client.info(), client.version())
        except BaseException:  # whatever it was, its connections are closed
            client.close()
            raise
    except (docker.errors.DockerException, requests.RequestException, OSError) as error:
        why = why_unreachable(error)
        fix = NO_PERMISSION if "Permission denied" in why else FIX
        raise SandboxUnavailableError(f"Docker can't be reached {why}", fix=fix) from error


def why_unreachable(error: BaseException) -> str:
    """Where it was looked for and the innermost reason, without the libraries' own chains."""
    place = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    reason = str(error).strip().split("\n")[0][:120]
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, TimeoutError):
            reason = "timed out"
        elif isinstance(inner, OSError) and inner.strerror:
            reason = inner.strerror
        inner = inner.__cause__ or inner.__context__
    return f"at {place}: {reason}"


def unavailable_reason() -> str | None:
    """Why no sandbox can run on a daemon, None when one can."""
    try:
        import docker  # noqa: F401
    except ImportError:
        return "the Python package 'docker' is not installed (pip install docker)"
    try:
        with momentary_client(must=True) as client:
            kind = client.info().get("OSType")
    except SandboxUnavailableError as error:
        return str(error)
    return None if kind == "linux" else f"the Docker daemon runs {kind} containers, not Linux ones"


@contextlib.contextmanager
def momentary_client(*, must: bool = False) -> Iterator[Any]:
    """A client for a moment; without a daemon None, or with `must` a `SandboxUnavailableError`."""
    try:
        client, _ = connect(timeout=_SHORT_TIMEOUT_S)
    except SandboxUnavailableError:
        if must:
            raise
        yield None
        return
    try:
        yield client
    finally:
        client.close()
