"""The zygote: forks children, waits for them, and cleans up after them. It never sees a request.

It exchanges fixed-size messages (`COMMAND`, `EVENT`) with the supervisor over a SEQPACKET socket. It is
single-threaded, so that a fork is always safe.
"""

from __future__ import annotations

import array
import contextlib
import functools
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import child, kernel, landlock, rehearsal, seccomp, testing
from .config import PRELOAD, RunnerConfig
from .isolation import Isolation, NamespaceIsolation, UserIsolation

COMMAND = struct.Struct("=cii")
"""Operation, slot, ticket. `S`pawn (with descriptors), `K`ill, `I`nterrupt, `W`ipe and check."""
EVENT = struct.Struct("=ciiqq")
"""Operation, ticket, wait status, CPU microseconds, peak KiB.

`R`eady, e`X`it, `W`iped (JSON follows), `P`reloaded modules or pytest.
"""
MAX_MESSAGE = 1 << 16
_PASSED_SIZE = socket.CMSG_SPACE(4 * 4)


class Deaths:
    """Watches children and names those that may have ended, through a `poll` object.

    It uses a pidfd for each, or SIGCHLD on kernels without pidfds (gVisor).
    """

    def __init__(self, poll: select.poll) -> None:
        self._poll = poll
        self._pids: dict[int, int] = {}  # keyed by descriptor
        self._unnamed: set[int] = set()
        self._wake = -1
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError:
            self._wake, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            signal.signal(signal.SIGCHLD, lambda *_: None)
            signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
            poll.register(self._wake, select.POLLIN)

    def watch(self, pid: int) -> None:
        """Watch a newly forked child."""
        if self._wake >= 0:
            self._unnamed.add(pid)
            return
        fd = os.pidfd_open(pid)
        self._poll.register(fd, select.POLLIN)
        self._pids[fd] = pid

    def suspects(self, fd: int) -> list[int]:
        """The children that may have ended, given that `fd` is ready."""
        if fd == self._wake:
            os.read(fd, 4096)
            return list(self._unnamed)
        return [self._pids[fd]]

    def forget(self, fd: int, pid: int) -> None:
        """Stop watching a child that was reaped after `fd` became ready."""
        self._unnamed.discard(pid)
        if fd != self._wake:
            self._poll.unregister(fd)
            os.close(fd)
            del self._pids[fd]


class State:
    """A snapshot of the process state that every child inherits, for later comparison."""

    def __init__(self) -> None:
        self._mounts = open("/proc/self/mountinfo")  # noqa: SIM115  stays open: the kernel signals changes through it
        self._mount_events = select.poll()
        self._mount_events.register(self._mounts.fileno(), select.POLLPRI)
        self._mount_events.poll(0)
        self._baseline_mounts = self._read_mounts()
        self._baseline = self._look()

    def accept_imports(self) -> None:
        """Make the changes caused by importing modules part of the state to compare with."""
        now = self._look()
        self._baseline |= {name: now[name] for name in ("environment", "module path")}

    def changes(self) -> list[str]:
        """Names of the state's changed parts."""
        now = self._look()
        changed = [name for name, value in now.items() if value != self._baseline[name]]
        if self._mount_events.poll(0) and self._read_mounts() != self._baseline_mounts:
            changed.append("mounts")
        return changed

    def _read_mounts(self) -> str:
        self._mounts.seek(0)
        return self._mounts.read().replace("//deleted", "")  # the engine removes the socket's folder once connected

    def _look(self) -> dict[str, Any]:
        return {
            "environment": os.environ.copy(),
            "limits": [resource.getrlimit(number) for number in range(resource.RLIMIT_NICE)],
            "host name": os.uname().nodename,
            "signals": [signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGTERM)],
            "module path": sys.path.copy(),
        }


@dataclass
class Child:
    """A live child. `ticket` is the supervisor's number for it."""

    ticket: int
    slot: int


class Zygote:
    """State of a zygote process, which serves one realm of slots."""

    def __init__(self, isolation: Isolation, supervisor: socket.socket) -> None:
        self.isolation = isolation
        self.supervisor = supervisor
        self.children: dict[int, Child] = {}
        self.poll = select.poll()
        self.deaths = Deaths(self.poll)
        self.null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)

    def run(self) -> None:
        """Serve until the supervisor is gone."""
        self.isolation.adopts = kernel.become_subreaper()
        kernel.die_with_parent()
        kernel.set_dumpable(False)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # an init process only gets signals that it handles
        self.isolation.settle()
        child.prepare(self.isolation)
        self.landlock = landlock.ruleset([*(folder.path for folder in self.isolation.folders), "/dev"])
        self.state = State()
        program = seccomp.program()
        if program is None:
            raise SystemExit(f"no system-call table for {os.uname().machine}")
        # Once for the zygote and all children: installing a filter takes longer than a fork.
        kernel.install_seccomp(program)
        self.poll.register(self.supervisor.fileno(), select.POLLIN)
        gc.disable()  # children enable it again; a collection here would unshare pages before each fork
        _keep_apart()
        self._tell(b"R")
        rehearsals = rehearsal.ROUNDS
        while True:
            events = self.poll.poll(0 if rehearsals else None)
            if not events:
                rehearsal.rehearse()
                rehearsals -= 1
                if not rehearsals:
                    self._load_ahead()
                    _keep_apart()
            for fd, _ in events:
                if fd == self.supervisor.fileno():
                    self._command()
                else:
                    for pid in self.deaths.suspects(fd):
                        self._exited(pid, fd)

    def _load_ahead(self) -> None:
        """Import the modules that programs need. Children forked earlier lack them and will be replaced."""
        config = self.isolation.config
        loaded = False
        if config.pytest:
            with contextlib.suppress(ImportError):
                testing.load_pytest()
                loaded = True
        for name in config.preload if 0 in self.isolation.slots else ():
            try:
                importlib.import_module(name)
                loaded = True
            except BaseException as error:  # noqa: BLE001  also SystemExit; programs that import it get the error again
                os.write(2, f"preload: {name}: {error!r}\n".encode("utf-8", "replace"))
        self.state.accept_imports()  # a failed import may have changed it too
        if loaded:
            self._tell(b"P")

    def _tell(
        self, operation: bytes, ticket: int = 0, status: int = 0, cpu_us: int = 0, peak_kb: int = 0, extra: bytes = b""
    ) -> None:
        self.supervisor.send(EVENT.pack(operation, ticket, status, cpu_us, peak_kb) + extra)

    def _command(self) -> None:
        message, ancillary, _, _ = self.supervisor.recvmsg(COMMAND.size, _PASSED_SIZE)
        if not message:
            os._exit(0)
        passed = array.array("i")
        for _, _, data in ancillary:
            passed.frombytes(data)
        operation, slot, ticket = COMMAND.unpack(message)
        if operation == b"S":
            self._spawn(slot, ticket, list(passed))
        elif operation in (b"K", b"I"):
            self._signal(ticket, interrupt=operation == b"I")
        elif operation == b"W":
            self._wipe()

    def _spawn(self, slot: int, ticket: int, fds: list[int]) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                gc.enable()
                child.enter(self.isolation, slot, fds, self.null, self.landlock)
            except BaseException as error:  # noqa: BLE001  last resort of a forked process
                os.write(2, f"runner: {type(error).__name__}: {error}\n".encode("utf-8", "replace"))
            finally:
                os._exit(1)
        for fd in fds:
            os.close(fd)
        self.deaths.watch(pid)
        self.children[pid] = Child(ticket, slot)

    def _alone(self, pid: int, slot: int) -> bool:
        """Whether the slot has no other child that must survive."""
        return all(other == pid or entry.slot != slot for other, entry in self.children.items())

    def _signal(self, ticket: int, *, interrupt: bool) -> None:
        for pid, entry in self.children.items():
            if entry.ticket == ticket:
                if interrupt:
                    self.isolation.interrupt(pid, entry.slot)
                else:
                    self.isolation.kill(pid, entry.slot, self._alone(pid, entry.slot))

    def _exited(self, pid: int, fd: int) -> None:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if not ended:
            return
        entry = self.children[pid]
        cpu_us, peak_kb = int((usage.ru_utime + usage.ru_stime) * 1e6), usage.ru_maxrss
        alone = self._alone(pid, entry.slot)
        self.deaths.forget(fd, pid)
        del self.children[pid]
        self.isolation.reap(entry.slot, self.children, alone)
        self._tell(b"X", entry.ticket, status, cpu_us, peak_kb)

    def _wipe(self) -> None:
        strangers = self.isolation.strangers(self.children)
        dirty = ["processes"] if strangers else []
        dirty += self.isolation.wipe()[:16] + self.state.changes()
        self._tell(b"W", extra=json.dumps(dirty).encode())


def _keep_apart() -> None:
    """Exclude all existing objects from the children's garbage collection."""
    gc.collect()
    gc.freeze()


def start(config: RunnerConfig, close: Sequence[int]) -> dict[int, socket.socket]:
    """Import common modules, fork the zygotes, which close the descriptors in `close`, and wait until they are ready.

    Returns the supervisor's end of the channel to each slot's zygote; slots of one realm share it.
    """
    kind = {"uid": UserIsolation, "ns": NamespaceIsolation}[config.isolation]
    for name in PRELOAD:
        importlib.import_module(name)
    _keep_apart()
    ends: dict[int, socket.socket] = {}
    for slots in kind.realms():
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        unwanted = [*close, ours.fileno(), *(end.fileno() for end in set(ends.values()))]
        kind.fork_zygote(functools.partial(_run_zygote, kind(config, slots), theirs, unwanted))
        theirs.close()
        ends.update(dict.fromkeys(slots, ours))
    for end in set(ends.values()):
        if not end.recv(MAX_MESSAGE):
            raise SystemExit("a zygote did not start")
    return ends


def _run_zygote(isolation: Isolation, supervisor: socket.socket, close: list[int]) -> None:
    try:
        for fd in close:
            os.close(fd)
        Zygote(isolation, supervisor).run()
    except BaseException as error:  # noqa: BLE001  last resort of a forked process
        os.write(2, f"zygote: {type(error).__name__}: {error}\n".encode("utf-8", "replace"))
    finally:
        os._exit(1)
