"""What is particular to the embedded engine: its groups, its cache, and what it says where it can't work."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forge_env.errors import SandboxFileNotFoundError, UsageError
from forge_env.sandbox import Limits, SandboxSpec, seen_by
from sandboxes import owner
from sandboxes.box import Box
from sandboxes.images import cache
from sandboxes.local import LocalEngine, cgroups
from sandboxes.local.engine import Launched, _advice, launch

from .conftest import require

EATERS = (
    "import os, time\n"
    "for _ in range(6):\n    if os.fork() == 0:\n        held = bytearray(60 << 20); time.sleep(20); os._exit(0)\n"
    "print('killed', os.WTERMSIG(os.wait()[1]), flush=True)\n"
)


TAKERS = """
import ctypes, os, signal
libc = ctypes.CDLL(None)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
signals = 0
while libc.sigqueue(os.getpid(), signal.SIGRTMIN, None) == 0: signals += 1
instances, wait = os.pipe(), os.pipe()
for _ in range(3):
    if os.fork() == 0:
        while libc.inotify_init1(0) >= 0: os.write(instances[1], b'i')
        os.write(instances[1], b'.')
        os.read(wait[0], 1)
        os._exit(0)
taken = b''
while taken.count(b'.') < 3: taken += os.read(instances[0], 100)
print(signals, taken.count(b'i'))
"""
"""Takes all it gets of what the kernel counts by user: queued signals, and inotify instances."""


def groups_of(name: str) -> list[Path]:
    return [folder for parent in set(cgroups._own_folders().values()) for folder in parent.glob(f"*{name}*")]


def test_what_could_be_started_once_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    require("local")
    monkeypatch.delattr("sandboxes.local.engine.launch")
    assert LocalEngine.unavailable_reason() is None
    monkeypatch.setattr("sandboxes.local.engine._PROVEN", set())
    with pytest.raises(NameError, match="launch"):
        LocalEngine.unavailable_reason()


def test_a_trial_that_something_has_stopped_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    require("local")
    launched: list[Launched] = []

    def stopped(*args: Any) -> Launched:
        launched.append(launch(*args))
        launched[0].process.send_signal(signal.SIGSTOP)
        return launched[0]

    monkeypatch.setattr("sandboxes.local.engine._PROVEN", set())
    monkeypatch.setattr("sandboxes.local.engine.launch", stopped)
    for limit in ("PROBE_TIMEOUT_S", "GRACE_S"):
        monkeypatch.setattr(f"sandboxes.local.engine.{limit}", 0.1)
    reason = LocalEngine.unavailable_reason()
    assert reason is not None
    assert "no answer" in reason
    assert launched[0].process.returncode == -signal.SIGKILL


async def test_a_sandbox_leaves_signals_and_inotify_instances_to_others_of_its_user() -> None:
    require("local")
    async with LocalEngine(concurrency=1, warm=0) as engine, engine.session() as sandbox:
        result = await sandbox.run_python(TAKERS, limits=Limits(wall_s=20))
    signals, instances = map(int, result.stdout.split())
    assert 100 <= signals <= 1024
    assert 1 <= instances <= 16


async def test_memory_of_all_processes_together_is_bounded() -> None:
    require("local")
    async with LocalEngine(concurrency=1, warm=0) as engine:
        async with engine.session(SandboxSpec(memory_mb=150)) as sandbox:
            result = await sandbox.run_python(EATERS, limits=Limits(wall_s=8, memory_mb=200))
            assert result.out_of_memory or result.stdout == "killed 9\n"
            assert (await sandbox.run_python("print(1)")).stdout == "1\n"
        assert "lost" not in engine.stats()


async def test_what_is_done_with_sandboxes_is_told_to_whoever_wants_to_know() -> None:
    require("local")
    told: list[tuple[str, float, float]] = []
    async with LocalEngine(concurrency=1, warm=1) as engine:
        with seen_by(lambda *span: told.append(span)):
            async with engine.session() as sandbox:
                await sandbox.run_python("print(1)")
                await sandbox.exec(["true"])
                await sandbox.write_file("a", "b")
                shell = await sandbox.shell()
                await shell.run("true")
                await shell.close()
                await sandbox.run_tests("x = 1", "assert x == 1")
        async with engine.session() as sandbox:
            await sandbox.run_python("print(2)")
    assert [name for name, _, _ in told] == ["wait for one", "python", "command", "files", "session", "tests"]
    assert all(start <= end for _, start, end in told)


async def test_groups_hold_the_limits_and_go_with_the_sandbox() -> None:
    require("local")
    probe = cgroups.create(64, 1.0)
    if probe is None:
        assert os.geteuid() != 0 or not os.access("/sys/fs/cgroup/memory", os.W_OK)
        return
    probe.remove()
    async with LocalEngine(concurrency=1, warm=1, cpus=0.5):
        made = groups_of(owner.this_process())
        assert len(made) == len(probe.folders)
        read = {
            file.name: file.read_text().split()
            for folder in made
            for file in folder.iterdir()
            if file.is_file()
            and file.name in ("pids.max", "memory.limit_in_bytes", "memory.max", "cpu.cfs_quota_us", "cpu.max")
        }
        assert read["pids.max"] == [str(cgroups.PIDS)]
        bound = str((SandboxSpec().memory_mb + cgroups.RUNNER_MB) << 20)
        assert bound in (*read.get("memory.max", ()), *read.get("memory.limit_in_bytes", ()))
        assert "50000" in (*read.get("cpu.max", ()), *read.get("cpu.cfs_quota_us", ()))
    assert groups_of(owner.this_process()) == []


async def test_groups_of_dead_owners_are_reaped() -> None:
    probe = cgroups.create(64, 1.0)
    if probe is None:
        return
    dead = owner.this_process().rpartition(".")[0] + ".1"
    left = [
        folder.rename(folder.with_name(folder.name.replace(owner.this_process(), dead))) for folder in probe.folders
    ]
    assert cgroups.reap() >= 1
    assert not any(folder.exists() for folder in left)


@pytest.mark.slow
async def test_many_that_are_asked_for_at_once_start_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    require("local")
    starting = [0]
    join = Box.join

    async def counted(self: Box, channel: socket.socket) -> None:
        starting.append(starting[-1] + 1)
        await join(self, channel)
        starting.append(starting[-1] - 1)

    monkeypatch.setattr(Box, "join", counted)
    monkeypatch.setattr("sandboxes.local.engine.STARTS_PER_CPU", 1)
    cpus = len(os.sched_getaffinity(0))
    async with LocalEngine(concurrency=3 * cpus, warm=0) as engine:
        boxes = await asyncio.gather(*(engine.acquire() for _ in range(3 * cpus)))
        await asyncio.gather(*map(engine.release, boxes))
    assert (max(starting), len(starting)) == (cpus, 1 + 6 * cpus)


def test_prune_keeps_what_is_current_and_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What another process got from the cache stays until that has ended, also while it runs no sandbox."""
    monkeypatch.setattr(cache, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(cache, "ensure_rootfs", lambda: cache.ensure("rootfs-current", Path.exists))
    monkeypatch.setattr(cache, "ensure_runner", lambda: cache.ensure("runner-current", Path.exists))
    for name in ("rootfs-used", "rootfs-old", "runner-old", "someone-elses"):
        (tmp_path / name / "usr").mkdir(parents=True)
    other = "from sandboxes.images import cache; print(cache.ensure('rootfs-used', None), flush=True); input()"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path.parent)}
    (tmp_path.parent / "forge-env").symlink_to(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", other], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as user:
        assert user.stdout
        assert user.stdout.readline()
        assert cache.prune() == [str(tmp_path / "rootfs-old"), str(tmp_path / "runner-old")]
        user.communicate(b"\n")
    assert cache.prune() == [str(tmp_path / "rootfs-used")]
    left = {"rootfs-current", "runner-current", "someone-elses", "lock"}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_advice_names_what_was_refused() -> None:
    assert "systempaths=unconfined" in _advice("[Errno 1] mount /tmp/proc: Operation not permitted")
    assert _advice("[Errno 1] unshare: Operation not permitted")


async def test_programs_see_no_keys_and_find_packages_under_usr() -> None:
    """Of a user who runs the engine, and whichever Python that user has: Debian's has its packages in /usr/local."""
    code = "import os, sys; print(sys.prefix, os.stat('/proc/keys').st_rdev == os.stat('/dev/null').st_rdev)"
    async with LocalEngine(concurrency=1, warm=0) as engine, engine.session() as sandbox:
        assert (await sandbox.run_python(code)).stdout == "/usr True\n"
        assert (await sandbox.exec(["python3", "-c", code])).stdout == "/usr True\n"


def test_lists_of_mounts_are_read_whatever_paths_are_in_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ",".join(cgroups._CONTROLLERS)
    odd = "31 1 0:28 / /a\u2028b rw - tmpfs tmpfs rw"
    (tmp_path / "mountinfo").write_text(f"{odd}\n32 1 0:29 / /c\\040d rw shared:9 - cgroup cgroup rw,{names}\n")
    (tmp_path / "cgroup").write_text(f"4:{names}:/a:b\u2028c\n")
    monkeypatch.setattr(cgroups, "Path", lambda path: Path(path.replace("/proc/self", str(tmp_path))))
    assert cgroups._own_folders() == dict.fromkeys(cgroups._CONTROLLERS, Path("/c d/a:b\u2028c"))


async def test_what_a_files_error_says() -> None:
    async with LocalEngine(concurrency=1, warm=0) as engine, engine.session() as sandbox:
        with pytest.raises(SandboxFileNotFoundError) as caught:
            await sandbox.read_file("a: b")
    assert str(caught.value) == "No such file or directory: a: b"


async def test_unknown_images_and_networks_are_refused() -> None:
    require("local")
    async with LocalEngine(concurrency=1, warm=0) as engine:
        with pytest.raises(UsageError, match="no image"):
            await engine.acquire(SandboxSpec(image="debian"))
        with pytest.raises(UsageError, match="no network"):
            await engine.acquire(SandboxSpec(network=True))
