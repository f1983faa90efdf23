"""How a child is separated from the runner and from every other child.

`UserIsolation` (inside Docker): a user id that nobody else on the host has. `NamespaceIsolation` (embedded
engine): pid, mount and ipc namespaces of its own, whose end takes everything in them along.
"""

from __future__ import annotations

import os
import signal
import struct
from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import NoReturn

from . import kernel
from .config import RunnerConfig
from .wipe import wipe

_KILLER = 15
"""Offset of a user id that no child has, see `UserIsolation._signal_as_user`."""
REPORT = struct.Struct("=iqq")
"""What a namespace's init tells the zygote: wait status, CPU microseconds, peak KiB."""


class Isolation(ABC):
    """The part of the zygote that differs between the two ways."""

    def __init__(self, config: RunnerConfig) -> None:
        self.config = config

    processes = 0
    """Processes of the runner that count against the child's own limit."""

    @abstractmethod
    def fork(self, slot: int) -> tuple[int, int]:
        """Fork a child of `slot`: `(pid, report descriptor or -1)` in the zygote, `(0, -1)` in the child."""

    @abstractmethod
    def confine(self, slot: int) -> None:
        """In the child: give up all privileges for good."""

    @abstractmethod
    def kill(self, pid: int, slot: int, alone: bool) -> None:
        """Kill a child and all it started; `alone`: nothing else of the slot has to survive."""

    @abstractmethod
    def interrupt(self, pid: int, slot: int) -> None:
        """Interrupt a session: SIGINT for itself, SIGKILL for what it has running."""

    @abstractmethod
    def reap(self, slot: int, known: Collection[int], alone: bool) -> int:
        """After a child's end: kill and wait for what it left running. Returns how many there were."""

    @abstractmethod
    def wipe(self, slots: int) -> list[str]:
        """Empty every writable folder. Returns what could not be removed."""

    def folder(self, slot: int) -> str:
        """Work folder of a slot: 0 runs the agent's code, 1 judges it."""
        return self.config.work if slot == 0 else f"{self.config.work}-judge"

    def folders(self, slots: int) -> list[str]:
        """Everything writable."""
        writable = [self.folder(slot) for slot in range(slots)] + self.config.scratch
        return [folder for folder in writable if os.path.isdir(folder)]


class UserIsolation(Isolation):
    """One user id per slot. The zygote holds CAP_SETUID and CAP_SETGID, nothing else."""

    def fork(self, slot: int) -> tuple[int, int]:  # noqa: D102
        return os.fork(), -1

    def confine(self, slot: int) -> None:  # noqa: D102
        user = self.config.uid + slot
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)

    def kill(self, pid: int, slot: int, alone: bool) -> None:  # noqa: D102
        self._signal_as_user(slot, None if alone else _tree([pid]))

    def interrupt(self, pid: int, slot: int) -> None:  # noqa: D102
        self._signal_as_user(slot, _tree(_all_children(pid)), interrupt=pid)

    def reap(self, slot: int, known: Collection[int], alone: bool) -> int:  # noqa: D102
        strays = self._strays(slot, known)
        found = len(strays)
        rounds = 0
        while strays:
            # A process that forks faster than it is counted can outrun a list of pids, never kill(-1).
            self._signal_as_user(slot, None if alone or rounds > 20 else _tree(strays))
            for pid in strays:
                _wait(pid)
            strays = self._strays(slot, known)
            rounds += 1
        return found

    def wipe(self, slots: int) -> list[str]:  # noqa: D102
        left: list[str] = []
        for slot in range(slots):
            os.setegid(self.config.uid + slot)
            os.seteuid(self.config.uid + slot)
            try:
                own = self.folder(slot)
                if os.path.isdir(own):
                    os.chmod(own, 0o700)
                for folder in self.config.scratch:
                    wipe(folder)
                wipe(own)
                left += _entries([own, *self.config.scratch] if slot == slots - 1 else [own])
            finally:
                os.seteuid(0)
                os.setegid(0)
        for folder in self.config.scratch:
            wipe(folder)  # as its owner, who may reset its times
        return left

    def _strays(self, slot: int, known: Collection[int]) -> list[int]:
        """Orphans that this subreaper adopted from a slot."""
        return [pid for pid in _children(os.getpid()) if pid not in known and _owner(pid) == self.config.uid + slot]

    def _signal_as_user(self, slot: int, pids: list[int] | None, interrupt: int = 0) -> None:
        """SIGKILL `pids`, or with None everything of the slot's user: atomic, so nothing can fork away."""
        helper = os.fork()
        if helper == 0:
            try:
                user = self.config.uid + slot
                # Real and saved ids of its own: it may signal the user's processes, they may not stop it first.
                os.setresuid(self.config.uid + _KILLER, user, self.config.uid + _KILLER)
                for pid in pids if pids is not None else [-1]:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
                if interrupt:
                    os.kill(interrupt, signal.SIGINT)
            finally:
                os._exit(0)
        _wait(helper)


class NamespaceIsolation(Isolation):
    """Fresh pid, mount and ipc namespaces per child, behind an init process that reaps."""

    processes = 4  # launcher, supervisor, zygote and init run as the same user

    def __init__(self, config: RunnerConfig) -> None:
        super().__init__(config)
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def fork(self, slot: int) -> tuple[int, int]:  # noqa: D102
        reading, writing = os.pipe2(os.O_CLOEXEC)
        kernel.unshare(kernel.CLONE_NEWPID)
        pid = os.fork()
        if pid:
            kernel.setns(self._own_pids, kernel.CLONE_NEWPID)
            os.close(writing)
            return pid, reading
        try:
            kernel.die_with_parent()
            kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC)
            kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
            self._hide_the_other(slot)
            worker = os.fork()
        except OSError as error:
            os.write(2, f"runner: {error}\n".encode())
            os._exit(1)
        if worker:
            _be_init(worker, writing)
        return 0, -1

    def confine(self, slot: int) -> None:  # noqa: D102
        kernel.drop_capabilities()

    def kill(self, pid: int, slot: int, alone: bool) -> None:  # noqa: D102
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def interrupt(self, pid: int, slot: int) -> None:  # noqa: D102
        workers = _all_children(pid)[:1]
        for target in _tree([child for worker in workers for child in _all_children(worker)]):
            self.kill(target, slot, alone=False)
        for worker in workers:
            try:
                os.kill(worker, signal.SIGINT)
            except ProcessLookupError:
                continue

    def _hide_the_other(self, slot: int) -> None:
        """In a child's own mounts: the judge's folders and the solution's are out of each other's sight."""
        kernel.detach(self.folder(1 - slot))
        if slot:
            for folder in self.config.scratch:
                kernel.mount("judge", folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=16m,mode=0700")

    def reap(self, slot: int, known: Collection[int], alone: bool) -> int:  # noqa: D102
        return 0  # the init was its pid namespace: the kernel has killed and reaped everything in it

    def wipe(self, slots: int) -> list[str]:  # noqa: D102
        for slot in range(slots):
            if os.path.isdir(own := self.folder(slot)):
                os.chmod(own, 0o700)
        for folder in self.config.scratch:
            os.chmod(folder, 0o1777)  # programs own it here, and may have locked it
        for folder in self.folders(slots):
            wipe(folder)
        return _entries(self.folders(slots))


def _be_init(worker: int, report: int) -> NoReturn:
    """Pid 1 of a namespace: adopt and reap orphans until the worker ends, then tell how. Never returns."""
    try:
        os.closerange(0, report)
        os.closerange(report + 1, 4096)
        kernel.drop_capabilities()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one signal with a handler, which the worker could send
        while True:
            pid, status, usage = os.wait4(-1, 0)
            if pid == worker:
                cpu_us = int((usage.ru_utime + usage.ru_stime) * 1e6)
                os.write(report, REPORT.pack(status, cpu_us, usage.ru_maxrss))
                break
    finally:
        os._exit(0)


def _entries(folders: list[str]) -> list[str]:
    return [os.path.join(folder, name) for folder in folders if os.path.isdir(folder) for name in os.listdir(folder)]


def _children(pid: int) -> list[int]:
    """Direct children of a single-threaded process, dead ones included."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _all_children(pid: int) -> list[int]:
    """Direct children of any of a process's threads."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return []
    found: list[int] = []
    for thread in threads:
        try:
            found += [int(child) for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _tree(roots: list[int]) -> list[int]:
    """`roots` and their descendants, parents first."""
    found = list(roots)
    for pid in found:
        found += _all_children(pid)
    return found


def _owner(pid: int) -> int:
    """Real user id of a process, -1 when it is gone. (The owner of /proc/PID is root for undumpable processes.)"""
    try:
        with open(f"/proc/{pid}/status") as file:
            for line in file:
                if line.startswith("Uid:"):
                    return int(line.split()[1])
    except OSError:
        pass
    return -1


def _wait(pid: int) -> None:
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass
