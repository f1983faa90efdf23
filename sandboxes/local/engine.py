"""Sandboxes on the kernel's own namespaces, for machines without a container daemon."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forge_env.errors import SandboxError, SandboxUnavailableError, UsageError
from forge_env.sandbox import RunningSandbox, SandboxSpec
from sandboxes.box import Box
from sandboxes.connection import Connection
from sandboxes.engine import PooledEngine
from sandboxes.images import rootfs
from sandboxes.images.build import BUNDLED
from sandboxes.images.runner.config import RunnerConfig

START_TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 20.0
SCRATCH_MB = 32
SCRATCH = ["/tmp", "/dev/shm"]
FIRST_UID = 0x60000000
"""As root, a sandbox runs as FIRST_UID plus a random number: an id that no account has."""
_LAUNCHER = Path(__file__).with_name("launch.py")


class LocalBox(Box):
    """One launcher process with everything below it."""

    def __init__(self, process: subprocess.Popen[bytes], spec: SandboxSpec, connection: Connection) -> None:
        super().__init__(f"pid {process.pid}", spec, connection)
        self._process = process
        self._ended = _process_end(process)

    async def destroy(self) -> None:  # noqa: D102
        self.connection.close()
        if self._process.returncode is None:
            self._process.kill()  # its init dies with it, and with the init everything in the pid namespace
        await asyncio.shield(self._ended)


class LocalEngine(PooledEngine):
    """Sandboxes in user, mount, pid, network, ipc, uts and cgroup namespaces. See `PooledEngine` for options."""

    name = "local"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._rootfs: Path | None = None
        self._runner: Path | None = None

    @classmethod
    def unavailable_reason(cls) -> str | None:  # noqa: D102
        if sys.platform != "linux":
            return "namespaces exist on Linux only"
        try:
            root, runner = rootfs.ensure_rootfs(), rootfs.ensure_runner()
        except (OSError, SandboxUnavailableError) as error:
            return f"no root filesystem can be made: {error}"
        process, _, log = _launch(root, runner, SandboxSpec(), probe=True)
        with log:
            try:
                status = process.wait(PROBE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                return "the kernel did not answer"
            return None if status == 0 else f"the kernel forbids namespaces: {_read(log)}; {_advice()}"

    @classmethod
    def running(cls) -> list[RunningSandbox]:  # noqa: D102
        return list(_launchers())

    async def build(self, image: str | None = None) -> str:  # noqa: D102
        if image not in (None, BUNDLED):
            raise UsageError(f"the local engine has no image {image!r}", fix="use the docker engine")
        await self._prepare()
        return str(self._rootfs)

    async def _prepare(self) -> None:
        try:
            self._rootfs = await asyncio.to_thread(rootfs.ensure_rootfs)
            self._runner = await asyncio.to_thread(rootfs.ensure_runner)
        except OSError as error:
            raise SandboxUnavailableError(
                f"no root filesystem can be made: {error}", fix="set XDG_CACHE_HOME"
            ) from error

    async def _make_box(self, spec: SandboxSpec) -> Box:
        assert self._rootfs is not None
        assert self._runner is not None
        if spec.image != BUNDLED:
            raise UsageError(f"the local engine has no image {spec.image!r}", fix="use the docker engine")
        if spec.network:  # it would be the host's own, with everything that listens on its loopback
            raise UsageError("the local engine gives no network", fix="use the docker engine")
        process, ours, log = _launch(self._rootfs, self._runner, spec)
        with log:
            connection = Connection()
            box = LocalBox(process, spec, connection)
            try:
                await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=ours)
                async with asyncio.timeout(START_TIMEOUT_S):
                    await connection.ready
            except (SandboxError, TimeoutError):
                await box.destroy()
                raise SandboxError(f"an embedded sandbox did not start: {_read(log) or 'no reason given'}") from None
            except BaseException:
                await box.destroy()
                raise
        return box


def _launch(
    root: Path, runner: Path, spec: SandboxSpec, *, probe: bool = False
) -> tuple[subprocess.Popen[bytes], socket.socket, Any]:
    """Start the launcher. Returns it, our end of the channel, and the file that its errors go to."""
    ours, theirs = socket.socketpair()
    log = os.fdopen(os.memfd_create("launcher"), "w+b")
    config = RunnerConfig("ns", control_fd=theirs.fileno(), scratch=SCRATCH, memory_mb=spec.memory_mb)
    options = {
        "rootfs": root.name,
        "runner": runner.name,
        "config": config.dumps(),
        "control_fd": theirs.fileno(),
        "owner_pid": os.getpid(),
        "uid": FIRST_UID + int.from_bytes(os.urandom(3), "big") if os.geteuid() == 0 else 0,
        "disk_mb": spec.disk_mb,
        "scratch_mb": SCRATCH_MB,
        "probe": probe,
    }
    with theirs:
        process = subprocess.Popen(
            [str(rootfs.interpreter()), "-I", "-S", str(_LAUNCHER), json.dumps(options)],
            cwd=root.parent,
            env={},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    if probe:
        ours.close()
    else:
        ours.setblocking(False)
    return process, ours, log


def _process_end(process: subprocess.Popen[bytes]) -> asyncio.Future[None]:
    """A future that is done once `process` has ended and is reaped."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    pidfd = os.pidfd_open(process.pid)

    def reap() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        process.wait()
        if not ended.done():
            ended.set_result(None)

    loop.add_reader(pidfd, reap)
    return ended


def _launchers() -> Iterator[RunningSandbox]:
    """The launchers of this machine, by their command lines. They never outlive their owners."""
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0") if folder.name.isdigit() else []
            if len(words) > 4 and words[3].endswith(b"sandboxes/local/launch.py"):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                options = json.loads(words[4])
                if parent == options["owner_pid"]:  # the launcher itself, not the processes it forks
                    started = folder.stat().st_mtime
                    yield RunningSandbox(folder.name, BUNDLED, options["owner_pid"], False, started)
        except (OSError, ValueError, KeyError):
            continue


def _read(log: Any) -> str:
    log.seek(0)
    return str(log.read(2000).decode("utf-8", "replace")).strip()


def _advice() -> str:
    """What would allow it, from the settings that usually forbid it."""
    for path, bad, fix in (
        ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"),
        ("/proc/sys/user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=10000"),
        (
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1",
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    ):  # fmt: skip
        try:
            if Path(path).read_text().strip() == bad:
                return f"allow them with: {fix}"
        except OSError:
            continue
    return "inside a container, start that container with --security-opt seccomp=unconfined, or use its Docker daemon"
