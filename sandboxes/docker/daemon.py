"""Connects to a Docker daemon and detects its features, or gives a one-line reason why it can't be reached.

A daemon runs on this machine (`unix://`) or on another one: either `tcp://` with TLS, configured by the docker SDK's
usual variables (DOCKER_TLS_VERIFY, DOCKER_CERT_PATH), or `ssh://`, where a single `ssh` forwards the daemon's socket.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import docker
from docker.errors import DockerException
from requests import RequestException

from forge_env.errors import SandboxUnavailableError, UsageError
from sandboxes import owner

T = TypeVar("T")
DAEMON_ERRORS = (DockerException, RequestException)
"""Exceptions that the client raises when the daemon refuses or can't be reached."""
FIX = "start Docker, or set DOCKER_HOST"
TLS_FIX = "set DOCKER_TLS_VERIFY=1 and DOCKER_CERT_PATH (a folder with ca.pem, cert.pem, key.pem), or use ssh://"
SSH_FIX = "check that ssh connects without a prompt, as a user in the group docker"
NO_PERMISSION = "add yourself to the group docker, or run as root"
FOLDER_PREFIX = "forge-env-"
"""Name prefix of temporary socket folders and of containers."""
SCHEMES = ("unix", "tcp", "ssh")
_SHORT_TIMEOUT_S = 5
_SSH_TIMEOUT_S = 15
_DEFAULT_SOCKET = "/var/run/docker.sock"


@dataclass(frozen=True)
class Daemon:
    """A connected daemon: its client and its features."""

    client: Any
    seccomp: bool
    remapped: bool
    """User ids of containers are mapped to a small range of the host's (userns-remap, rootless)."""
    podman: bool
    """Podman's Docker-compatible socket, which reads the system-call profile from a file."""
    architecture: str
    memory_mb: int
    tunnel: Tunnel | None
    """The tunnel to the daemon's machine, for `ssh://`."""
    apart: bool = False
    """The daemon turned out not to see our files, for example because we run in a container that has its socket."""

    @classmethod
    def of(cls, client: Any, tunnel: Tunnel | None) -> Daemon:
        """Create from the answers of `docker info` and `docker version`."""
        info, version = client.info(), client.version()
        options = info.get("SecurityOptions") or []
        remapped = any(option.startswith(("name=userns", "name=rootless")) for option in options)
        podman = any("Podman" in part.get("Name", "") for part in version.get("Components") or [])
        seccomp = any(option.startswith("name=seccomp") for option in options)
        memory_mb = int(info.get("MemTotal") or 0) >> 20
        return cls(client, seccomp, remapped, podman, info.get("Architecture", ""), memory_mb, tunnel)

    @property
    def remote(self) -> bool:
        """Whether the daemon may run on another machine, without access to this one's files and sockets."""
        elsewhere = str(self.client.api.base_url).startswith(("http://", "https://"))
        return self.apart or self.tunnel is not None or elsewhere or sys.platform != "linux"  # there, in a machine

    def close(self) -> None:
        """Close the client and the tunnel."""
        self.client.close()
        if self.tunnel is not None:
            self.tunnel.close()


class Tunnel:
    """An `ssh` process that forwards a daemon's socket to a local socket until closed or until this process ends.

    It serves all connections. `docker system dial-stdio`, which the Docker client uses, would log in for each of them.

    Args:
        host: `ssh://[USER@]HOST[:PORT][/PATH/OF/SOCKET]`, as the Docker client reads it.
    """

    def __init__(self, host: str) -> None:
        parts = urlsplit(host)
        if not parts.hostname:
            raise SandboxUnavailableError(
                f"docker_host={host} does not name a host", fix="write ssh://[USER@]HOST[:PORT]"
            )
        self.folder = tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{owner.this_process()}-", dir="/tmp")
        self.socket = f"{self.folder}/docker.sock"
        remote_socket = parts.path.rstrip("/") or _DEFAULT_SOCKET
        command = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ExitOnForwardFailure=yes"]
        command += ["-o", f"ConnectTimeout={_SSH_TIMEOUT_S}", "-o", "ServerAliveInterval=15"]
        command += ["-L", f"{self.socket}:{remote_socket}", *(["-p", str(parts.port)] if parts.port else [])]
        command += [*(["-l", parts.username] if parts.username else []), "--", parts.hostname]
        # The command prints `ready` if the socket exists, and ends when its input, this process's pipe, is closed.
        command.append(f"test -S {shlex.quote(remote_socket)} && echo ready && exec cat")
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
            assert self._process.stdout
            if self._process.stdout.readline() != b"ready\n":
                _, stderr = self._process.communicate(timeout=_SSH_TIMEOUT_S)
                last = stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or [
                    f"there is no socket {remote_socket}"
                ]
                raise SandboxUnavailableError(f"Docker can't be reached at {host}: {last[0]}", fix=SSH_FIX)
        except BaseException:  # on any error, the process and the folder are removed
            self.close()
            raise

    def close(self) -> None:
        """Kill the process and remove the socket."""
        if (process := getattr(self, "_process", None)) is not None:
            process.kill()
            process.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)


def connect(host: str | None = None, **options: Any) -> Daemon:
    """Connect to the daemon at `host`; default: DOCKER_HOST, else this machine's. Raises `SandboxUnavailableError`."""
    host = host or os.environ.get("DOCKER_HOST") or ""
    tunnel = None
    environment = {**os.environ, "DOCKER_HOST": host}
    try:
        with contextlib.ExitStack() as opened:
            if host.startswith("ssh://"):
                tunnel = opened.enter_context(contextlib.closing(Tunnel(host)))
                environment = {"DOCKER_HOST": f"unix://{tunnel.socket}"}
            if host.startswith("tcp://"):
                options["version"] = _api_version(environment)
            client = opened.enter_context(contextlib.closing(docker.from_env(environment=environment, **options)))
            client.api.trust_env = False
            daemon = Daemon.of(client, tunnel)
            opened.pop_all()
            return daemon
    except (*DAEMON_ERRORS, OSError) as error:
        why = why_unreachable(error, host)
        fix = NO_PERMISSION if "Permission denied" in why else TLS_FIX if "certificate" in why else FIX
        raise SandboxUnavailableError(f"Docker can't be reached {why}", fix=fix) from error


def check_host(host: str) -> None:
    """Raises `UsageError` unless `host` is empty or the address of a daemon."""
    if host and not host.startswith(tuple(f"{scheme}://" for scheme in SCHEMES)):
        raise UsageError(
            f"docker_host={host} is not the address of a Docker daemon", fix="write tcp://HOST:PORT or ssh://HOST"
        )


def _api_version(environment: dict[str, str]) -> str:
    """API version of the daemon at a TCP address, asked without the environment's web proxies and certificates."""
    client = docker.from_env(environment=environment, version="1.41", timeout=_SHORT_TIMEOUT_S)
    with contextlib.closing(client):
        client.api.trust_env = False
        _check_encrypted(client)
        return str(client.api.version(api_version=False)["ApiVersion"])


def _check_encrypted(client: Any) -> None:
    """Raise unless the connection is verified TLS or loopback.

    An attacker between us and the daemon could forge every verdict, and would be root on the daemon's machine.
    """
    parts = urlsplit(str(client.api.base_url))
    encrypted = parts.scheme == "https" and client.api.verify
    if not encrypted and not _is_loopback(parts.hostname or ""):
        raise SandboxUnavailableError(
            f"the Docker daemon at {parts.netloc} is not reached over verified TLS", fix=TLS_FIX
        )


def _is_loopback(name: str) -> bool:
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def why_unreachable(error: BaseException, host: str = "") -> str:
    """The address that was tried and the innermost reason, without the libraries' exception chains."""
    address = host or os.environ.get("DOCKER_HOST") or f"unix://{_DEFAULT_SOCKET}"
    reason = str(error).strip().split("\n")[0][:120]
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, TimeoutError):
            reason = "timed out"
        elif isinstance(inner, OSError) and inner.strerror:
            reason = inner.strerror
        inner = inner.__cause__ or inner.__context__
    return f"at {address}: {reason}"


def unavailable_reason(host: str | None = None) -> str | None:
    """Why no sandbox can run on a daemon, or None if one can."""
    try:
        with contextlib.closing(connect(host, timeout=_SHORT_TIMEOUT_S)) as daemon:
            kind = daemon.client.info().get("OSType")
    except SandboxUnavailableError as error:
        return str(error)
    if kind != "linux":
        return f"the Docker daemon runs {kind} containers, not Linux ones"
    if daemon.remote and daemon.podman:
        return "Podman reads the system-call profile from a file of its own machine: use Docker there"
    return None


def check_base(daemon: Daemon) -> None:
    """Raises `SandboxUnavailableError` if this machine's own Python can't be the base of the daemon's images."""
    if daemon.remote and daemon.architecture not in ("", platform.machine()):
        raise SandboxUnavailableError(
            f"this machine's Python ({platform.machine()}) can't run on the Docker daemon's ({daemon.architecture})",
            fix="set base_image to a public image, such as python:3.12-slim",
        )


def ask(question: Callable[[Any], T], otherwise: T) -> T:
    """Call `question` with a new client and return its result, or return `otherwise` if there is no daemon."""
    try:
        daemon = connect(timeout=_SHORT_TIMEOUT_S)
    except SandboxUnavailableError:
        return otherwise
    with contextlib.closing(daemon):
        return question(daemon.client)
