"""Sandboxes in Linux namespaces, for machines without a container daemon."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from forge_env.errors import SandboxError, SandboxUnavailableError, UsageError
from forge_env.machine import needs_linux, usable_cpus
from forge_env.sandbox import Images, Inventory, RunningSandbox, SandboxSpec
from forge_env.sandbox.spec import PROXY_PORT
from sandboxes.box import Box
from sandboxes.images import BUNDLED, cache, packages, rootfs
from sandboxes.local import cgroups
from sandboxes.pool import MAX_USES, SCRATCH_MB, PooledEngine
from sandboxes.runner.config import RunnerConfig

START_TIMEOUT_S = 30.0
STARTS_PER_CPU = 4
"""Concurrent starts per CPU; of hundreds at once, none would be ready in time."""
PROBE_TIMEOUT_S = 20.0
GRACE_S = 3.0
"""Seconds that a runner may take to exit after its channel is closed."""
FIRST_UID = 0x60000000
"""As root, a sandbox's user id is FIRST_UID plus a random number, which no account has."""
_IN_CONTAINER = "inside a container, start that container with"
_LAUNCHER = Path(__file__).with_name("launch.py")


class LocalEngine(PooledEngine, Images, Inventory):
    """Sandboxes in user, mount, pid, network, ipc, uts and cgroup namespaces.

    Args:
        concurrency: most sandboxes alive at once; by default four per CPU.
        warm: sandboxes to start ahead; by default one per CPU.
        max_uses: leases after which a sandbox is replaced by a new one.
        cpus: CPUs one sandbox may use, if control groups can be created (otherwise it only runs at lower priority).
    """

    name = "local"

    def __init__(
        self,
        *,
        concurrency: int | None = None,
        warm: int | None = None,
        max_uses: int = MAX_USES,
        cpus: float = 1.0,
    ) -> None:
        super().__init__(concurrency=concurrency, warm=warm, max_uses=max_uses)
        self.cpus = cpus
        self._starts = asyncio.Semaphore(STARTS_PER_CPU * usable_cpus())
        self._rootfs: Path | None = None
        self._runner: Path | None = None

    @classmethod
    def unavailable_reason(cls) -> str | None:  # noqa: D102
        if reason := needs_linux("it"):
            return reason
        try:
            return _try(cache.ensure_rootfs(), cache.ensure_runner())
        except (OSError, SandboxUnavailableError) as error:
            return f"no root filesystem can be made: {error}"

    @classmethod
    def reap_abandoned(cls) -> int:  # noqa: D102
        return cgroups.reap()  # processes never outlive their owners, but groups may

    @classmethod
    def prune(cls) -> list[str]:  # noqa: D102
        return cache.prune()

    @classmethod
    def storage(cls) -> str:  # noqa: D102
        contents, size_mb = cache.contents()
        return f"{size_mb:,} MiB in {cache.cache_folder()} ({contents})"

    @classmethod
    def running(cls) -> list[RunningSandbox]:  # noqa: D102
        return [  # none is abandoned: launchers never outlive their owners
            RunningSandbox(options["pid"], BUNDLED, int(options["owner_pid"]), False, options["started"])
            for options in _running_options()
        ]

    async def build(self, image: str | SandboxSpec | None = None) -> str:  # noqa: D102
        name = image.image if isinstance(image, SandboxSpec) else image
        if name not in (None, BUNDLED):
            raise UsageError(f"the local engine has no image {name!r}", fix="use the docker engine")
        await self._prepare()
        if isinstance(image, SandboxSpec) and image.packages:
            await asyncio.to_thread(_layer, image)
        return str(self._rootfs)

    async def _prepare(self) -> None:
        try:
            self._rootfs = await asyncio.to_thread(cache.ensure_rootfs)
            self._runner = await asyncio.to_thread(cache.ensure_runner)
        except OSError as error:
            raise SandboxUnavailableError(
                f"no root filesystem can be made: {error}", fix="set XDG_CACHE_HOME"
            ) from error

    def check(self, spec: SandboxSpec) -> None:  # noqa: D102
        if spec.image != BUNDLED:
            raise UsageError(f"the local engine has no image {spec.image!r}", fix="use the docker engine")
        if spec.network:  # this would be the host's network, with every service that listens on its loopback
            raise UsageError(
                "the local engine has no network access", fix="list hosts in 'allow', or use the docker engine"
            )
        super().check(spec)

    async def _make_box(self, spec: SandboxSpec) -> Box:
        if deep := [path for path in spec.writable if not self._can_hold(path)]:
            fix = "name one at the top, such as /app, or use the docker engine"
            raise UsageError(f"the local engine can't create {deep[0]}: its parent is read-only", fix=fix)
        layer = await asyncio.to_thread(_layer, spec) if spec.packages else None
        async with self._starts:
            return await self._launch(spec, layer)

    async def _launch(self, spec: SandboxSpec, layer: Path | None) -> Box:
        assert self._rootfs is not None
        assert self._runner is not None
        launched = launch(self._rootfs, self._runner, spec, self.cpus, layer)
        with launched.log:
            box = Box(f"pid {launched.process.pid}", spec, functools.partial(_end, launched, _process_end(launched)))
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await box.join(launched.channel)
            except (SandboxError, TimeoutError):
                await box.destroy()
                output = launched.said() or "no reason given"
                raise SandboxError(f"an embedded sandbox did not start: {output}") from None
            except BaseException:  # also when cancelled: no sandbox may be left behind
                await box.destroy()
                raise
        return box

    def _can_hold(self, path: str) -> bool:
        """Whether `path` can be a mount point: it exists in the root filesystem, or its top-level folder does not."""
        assert self._rootfs is not None
        mount_point = self._rootfs / path.lstrip("/")
        return mount_point.is_dir() or not (self._rootfs / path.split("/")[1]).exists()


@dataclass
class Launched:
    """A started launcher, our end of the channel, the file with its stderr, and its control groups, if any."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    log: IO[bytes]
    groups: cgroups.Groups | None

    def said(self) -> str:
        """The start of the launcher's error output."""
        self.log.seek(0)
        return self.log.read(2000).decode("utf-8", "replace").strip()


def _layer(spec: SandboxSpec) -> Path:
    try:
        return packages.ensure_layer(
            spec.packages, packages.this_python(f"/{rootfs.site_folder()}", f"/{rootfs.SCRIPTS}")
        )
    except OSError as error:
        raise SandboxUnavailableError(f"no packages can be installed: {error}", fix="set XDG_CACHE_HOME") from error


def launch(root: Path, runner: Path, spec: SandboxSpec, cpus: float, layer: Path | None = None) -> Launched:
    """Start the launcher of one sandbox; `layer` is the folder with its packages."""
    ours, theirs = socket.socketpair()
    log = os.fdopen(os.memfd_create("launcher"), "w+b")
    groups = cgroups.create(spec.memory_mb, cpus)
    config = RunnerConfig("ns", control_fd=theirs.fileno())
    config.memory_mb = 0 if groups else spec.memory_mb
    config.proxy_port = PROXY_PORT if spec.proxied else 0
    config.pytest, config.preload, config.writable = packages.has_pytest(spec), spec.preload, spec.writable
    options = {
        "rootfs": root.name,
        "runner": runner.name,
        "packages": layer.name if layer else "",
        "site": rootfs.site_folder(),
        "scripts": rootfs.SCRIPTS,
        "config": config.dumps(),
        "control_fd": theirs.fileno(),
        "owner_pid": os.getpid(),
        "uid": FIRST_UID + int.from_bytes(os.urandom(3), "big") if os.geteuid() == 0 else 0,
        "disk_mb": spec.disk_mb,
        "writable": ",".join(spec.writable),
        "scratch_mb": SCRATCH_MB,
        "cgroups": ":".join(map(str, groups.folders)) if groups else "",
        "memory_group": str(groups.memory) if groups else "",
        "unified": int(bool(groups and groups.unified)),
    }
    with theirs:
        process = subprocess.Popen(
            [
                str(rootfs.interpreter()),
                "-I",
                "-S",
                str(_LAUNCHER),
                *(f"{name}={value}" for name, value in options.items()),
            ],
            cwd=root.parent,
            env={},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    return Launched(process, ours, log, groups)


def _process_end(launched: Launched) -> asyncio.Future[None]:
    """A future that is done once the launcher has ended and was reaped, and its groups were removed."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    pidfd = os.pidfd_open(launched.process.pid)

    def reap() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        launched.process.wait()
        if launched.groups:
            launched.groups.remove()
        if not ended.done():
            ended.set_result(None)

    loop.add_reader(pidfd, reap)
    return ended


async def _end(launched: Launched, ended: asyncio.Future[None]) -> None:
    """End a launcher, and all processes below it, by signals unless its runner exits in time."""
    await asyncio.wait([ended], timeout=GRACE_S)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not ended.done():
            launched.process.send_signal(number)
            await asyncio.wait([ended], timeout=GRACE_S)


_PROVEN: set[tuple[Path, Path]] = set()
"""Root filesystem and runner pairs that this process has started a sandbox from, so that they are not probed again."""


def _try(root: Path, runner: Path) -> str | None:
    """Start a sandbox up to its first message. Returns why that is impossible here, or None."""
    if (root, runner) in _PROVEN:
        return None
    launched = launch(root, runner, SandboxSpec(), 1.0)
    with launched.log, launched.channel:
        launched.channel.settimeout(PROBE_TIMEOUT_S)
        try:
            answered = bool(launched.channel.recv(1))
        except TimeoutError:
            answered = False
        launched.process.terminate()
        try:
            launched.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:  # it was stopped, for example by a debugger
            launched.process.kill()
            launched.process.wait()
        if launched.groups:
            launched.groups.remove()
        output = launched.said()
    if answered:
        _PROVEN.add((root, runner))
        return None
    return f"the kernel forbids it: {output or 'no answer'}; {_advice(output)}"


def _running_options() -> Iterator[dict[str, Any]]:
    """The options in the command lines of all visible launchers, with `pid` and `started`."""
    for process in psutil.process_iter(["cmdline", "ppid", "create_time"]):
        words = process.info["cmdline"] or []
        if len(words) <= 4 or not words[3].endswith("sandboxes/local/launch.py"):
            continue
        try:
            options: dict[str, Any] = dict(word.split("=", 1) for word in words[4:])
            launcher = options["owner_pid"] == str(process.info["ppid"])  # the launcher itself, not a process it forked
        except (ValueError, KeyError):  # not one of our launchers
            continue
        if launcher:
            yield {**options, "pid": str(process.pid), "started": process.info["create_time"]}


def _advice(said: str) -> str:
    """Advice on how to allow sandboxes, from the launcher's error and common kernel settings."""
    if "/proc:" in said:  # masked paths in a container's /proc forbid mounting a new one
        return f"{_IN_CONTAINER} --security-opt systempaths=unconfined besides seccomp=unconfined"
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
    return f"{_IN_CONTAINER} --security-opt seccomp=unconfined --security-opt systempaths=unconfined"
