"""Reaching the Docker daemon: what it can do, or in one line why it can't be reached."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import docker
from docker.errors import DockerException
from requests import RequestException

from forge_env.errors import SandboxUnavailableError

T = TypeVar("T")
DAEMON_ERRORS = (DockerException, RequestException)
"""What its client raises when the daemon refuses, or is away."""
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
    try:
        client = docker.from_env(**options)
        try:
            return client, Daemon.of(client.info(), client.version())
        except BaseException:  # whatever it was, its connections are closed
            client.close()
            raise
    except (*DAEMON_ERRORS, OSError) as error:
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
        client, _ = connect(timeout=_SHORT_TIMEOUT_S)
    except SandboxUnavailableError as error:
        return str(error)
    with contextlib.closing(client):
        kind = client.info().get("OSType")
    return None if kind == "linux" else f"the Docker daemon runs {kind} containers, not Linux ones"


def ask(question: Callable[[Any], T], otherwise: T) -> T:
    """What `question` finds with a client of its own; `otherwise` without a daemon."""
    try:
        client, _ = connect(timeout=_SHORT_TIMEOUT_S)
    except SandboxUnavailableError:
        return otherwise
    with contextlib.closing(client):
        return question(client)
