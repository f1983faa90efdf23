"""Separation of a child from the runner and from other children.

A *realm* is the set of one or two slots whose programs share a zygote. `UserIsolation` (inside Docker) has one realm
for both slots, each with a user id that is unique on the host. `NamespaceIsolation` (embedded engine) has a realm for
each slot: pid, mount and ipc namespaces whose init is the zygote. That init can't be signalled from inside, and all
processes of the namespace end with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator

from . import archives, kernel
from .config import SCRATCH, WORK, RunnerConfig
from .folders import Folder, Seeded
from .processes import OwnChildren, all_children, owner, tree, visible, wait

_KILLER = 15
"""Offset of a user id that no child has, see `UserIsolation._signal`."""
_PATIENCE = 20
"""Rounds of killing processes one by one before all of the user's are killed at once."""


class Isolation(ABC):
    """The part of a zygote that depends on the kind of isolation. `slots` are those of this realm."""

    processes = 0
    """Number of the runner's processes that count against the child's own limit."""

    def __init__(self, config: RunnerConfig, slots: Collection[int]) -> None:
        self.config = config
        self.slots = tuple(slots)
        self.scratch = [path for path in SCRATCH if os.path.isdir(path)]
        self.adopts = True
        """Whether orphans become the zygote's children."""

    @classmethod
    @abstractmethod
    def realms(cls) -> tuple[tuple[int, ...], ...]:
        """The slots of each zygote."""

    @classmethod
    @abstractmethod
    def fork_zygote(cls, run: Callable[[], None]) -> int:
        """Fork a process that calls `run`, the zygote. Returns its pid."""

    def settle(self) -> None:
        """Prepare the realm and record its clean state. Called once in the zygote, before it forks."""
        self.own_children = OwnChildren()
        self.folders = self._folders()

    @abstractmethod
    def confine(self, slot: int) -> None:
        """Drop all privileges for good. Called in the child."""

    @abstractmethod
    def _strays(self, slot: int, known: Collection[int]) -> list[int]:
        """Orphans of a slot, adopted by its zygote."""

    @abstractmethod
    def _signal(self, slot: int, pids: list[int] | None, interrupt: int = 0) -> None:
        """Send SIGKILL to `pids` (None: to all of the slot's at once, so that none escapes), SIGINT to `interrupt`."""

    @abstractmethod
    def strangers(self, known: Collection[int]) -> list[int]:
        """Processes that should not exist while only the `known` children run."""

    @contextlib.contextmanager
    def _as_user(self, slot: int) -> Iterator[None]:
        """Perform the block's file operations with the rights of the slot's user."""
        yield

    def kill(self, pid: int, slot: int, alone: bool) -> None:
        """Kill a child and all its descendants. `alone`: the slot has nothing else that must survive."""
        self._signal(slot, None if alone else tree([pid]))

    def interrupt(self, pid: int, slot: int) -> None:
        """Interrupt a session: SIGINT for itself, SIGKILL for the processes it runs."""
        self._signal(slot, tree(all_children(pid)), interrupt=pid)

    def reap(self, slot: int, known: Collection[int], alone: bool) -> None:
        """Kill and reap the processes that an ended child left running."""
        rounds = 0
        while strays := self._strays(slot, known):
            # A process may fork faster than the list of pids is read, but can't escape kill(-1).
            self._signal(slot, None if alone or rounds > _PATIENCE else tree(strays))
            for pid in strays:
                wait(pid)
            rounds += 1

    def wipe(self) -> list[str]:
        """Empty and refill all touched writable folders. Returns the remaining differences from their clean state."""
        touched = [folder for folder in self.folders if not folder.untouched()]
        if touched:
            for slot in self.slots:
                with self._as_user(slot):
                    for folder in touched:
                        folder.empty()
            with self._as_user(self.slots[0]):
                for folder in touched:
                    folder.fill()
        return [trace for folder in touched for trace in folder.restore()]

    def _folders(self) -> list[Folder]:
        folders = []
        for slot in self.slots:
            # Without the right to override file modes, since a work folder belongs to its user.
            with self._as_user(slot):
                folders.append(Folder(self.folder(slot)))
        if 0 in self.slots:
            with self._as_user(0):
                folders += [_writable(path, number) for number, path in enumerate(self.config.writable)]
        return folders + [Folder(path) for path in self.scratch]

    def folder(self, slot: int) -> str:
        """Work folder of a slot: 0 runs the agent's code, 1 judges it."""
        return WORK if slot == 0 else f"{WORK}-judge"


def _writable(path: str, number: int) -> Folder:
    seed = f"{archives.SEEDS}/{number}"
    return Seeded(path, seed) if os.path.exists(seed) else Folder(path)


class UserIsolation(Isolation):
    """One user id per slot. The zygote holds only CAP_SETUID and CAP_SETGID."""

    @classmethod
    def realms(cls) -> tuple[tuple[int, ...], ...]:  # noqa: D102
        return ((0, 1),)

    @classmethod
    def fork_zygote(cls, run: Callable[[], None]) -> int:  # noqa: D102
        if pid := os.fork():
            return pid
        run()
        os._exit(1)

    def settle(self) -> None:  # noqa: D102
        if self.config.chown:
            for slot in self.slots:
                os.chown(self.folder(slot), self.config.uid + slot, self.config.uid + slot)
            for folder in self.config.writable:
                os.chown(folder, self.config.uid, self.config.uid)
        kernel.keep_capabilities(kernel.CAP_SETUID, kernel.CAP_SETGID)
        super().settle()
        self._runner = set(visible())
        self._counter = _open_task_counter()

    def confine(self, slot: int) -> None:  # noqa: D102
        user = self.config.uid + slot
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)

    def strangers(self, known: Collection[int]) -> list[int]:  # noqa: D102
        if self._counter >= 0 and int(os.pread(self._counter, 32, 0)) == len(self._runner) + len(known):
            return []
        return sorted(set(visible()) - self._runner - set(known))

    @contextlib.contextmanager
    def _as_user(self, slot: int) -> Iterator[None]:
        os.setegid(self.config.uid + slot)
        os.seteuid(self.config.uid + slot)
        try:
            yield
        finally:
            os.seteuid(0)
            os.setegid(0)

    def _strays(self, slot: int, known: Collection[int]) -> list[int]:
        candidates = self.own_children.pids() if self.adopts else visible()
        orphans = [pid for pid in candidates if pid not in known]
        return [pid for pid in orphans if owner(pid) == self.config.uid + slot]

    def _signal(self, slot: int, pids: list[int] | None, interrupt: int = 0) -> None:
        helper = os.fork()
        if helper == 0:
            try:
                user = self.config.uid + slot
                # With different real and saved ids, it may signal the user's processes, but they can't stop it first.
                os.setresuid(self.config.uid + _KILLER, user, self.config.uid + _KILLER)
                _signal_all(pids, interrupt)
            finally:
                os._exit(0)
        wait(helper)


class NamespaceIsolation(Isolation):
    """Pid, mount and ipc namespaces per slot. The zygote is their init and gives up every capability at once."""

    processes = 4  # launcher, supervisor and two zygotes run as the same user

    @classmethod
    def realms(cls) -> tuple[tuple[int, ...], ...]:  # noqa: D102
        return ((0,), (1,))

    @classmethod
    def fork_zygote(cls, run: Callable[[], None]) -> int:  # noqa: D102
        pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        try:
            kernel.unshare(kernel.CLONE_NEWPID)
            pid = os.fork()
            if pid == 0:
                run()
                os._exit(1)
            kernel.setns(pid_namespace, kernel.CLONE_NEWPID)
            return pid
        finally:
            os.close(pid_namespace)

    def settle(self) -> None:  # noqa: D102
        (slot,) = self.slots
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC)
        kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
        # The user running the engine has keys of its own.
        for path in filter(os.path.exists, ("/proc/keys", "/proc/key-users")):
            kernel.mount("/dev/null", path, None, kernel.MS_BIND)
        kernel.detach(self.folder(1 - slot))  # hides the judge's folders from the solution and vice versa
        if slot:
            for folder in self.config.writable:
                kernel.detach(folder)
            for folder in self.scratch:
                data = "size=16m,nr_inodes=1024,mode=0700"
                kernel.mount("judge", folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, data)
        kernel.drop_capabilities()
        super().settle()

    def confine(self, slot: int) -> None:  # noqa: D102
        return  # nothing is left to drop

    def strangers(self, known: Collection[int]) -> list[int]:  # noqa: D102
        return self._strays(self.slots[0], known)

    def _strays(self, slot: int, known: Collection[int]) -> list[int]:
        return [pid for pid in self.own_children.pids() if pid not in known]  # an init adopts all orphans

    def _signal(self, slot: int, pids: list[int] | None, interrupt: int = 0) -> None:
        _signal_all(pids, interrupt)


def _signal_all(pids: list[int] | None, interrupt: int) -> None:
    for pid in [-1] if pids is None else pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if interrupt:
        os.kill(interrupt, signal.SIGINT)


def _open_task_counter() -> int:
    """Open the kernel's counter of this container's tasks. Returns -1 if it can't be read."""
    for path in ("/sys/fs/cgroup/pids/pids.current", "/sys/fs/cgroup/pids.current"):
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
    return -1
