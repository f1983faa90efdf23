"""The zygote: preloads modules, forks children, waits for them, clears up after them. It never sees a request.

It speaks with the supervisor over a SEQPACKET socket in fixed-size messages (`COMMAND`, `EVENT`) and is
single-threaded, so that a fork is always safe.
"""

from __future__ import annotations

import array
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
from dataclasses import dataclass
from typing import Any

from . import child, kernel, landlock, seccomp
from .config import RunnerConfig
from .isolation import REPORT, Isolation, NamespaceIsolation, UserIsolation

COMMAND = struct.Struct("=cii")
"""Operation, slot, ticket. `S`pawn (with descriptors), `K`ill, `I`nterrupt, `W`ipe and check."""
EVENT = struct.Struct("=ciiqqq")
"""Operation, ticket, wait status, CPU microseconds, peak KiB, leftovers. `R`eady, e`X`it, `W`iped (JSON follows)."""
SLOTS = 2
MAX_MESSAGE = 1 << 16


@dataclass
class Child:
    """A live child. `ticket` is the supervisor's number for it."""

    ticket: int
    slot: int
    pidfd: int
    report: int


class Zygote:
    """State of the zygote process."""

    def __init__(self, config: RunnerConfig, supervisor: socket.socket) -> None:
        self.config = config
        self.supervisor = supervisor
        kind = {"uid": UserIsolation, "ns": NamespaceIsolation}[config.isolation]
        self.isolation: Isolation = kind(config)
        self.children: dict[int, Child] = {}
        self.by_pidfd: dict[int, int] = {}
        self.poll = select.poll()
        self.null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self.seccomp = seccomp.program()
        if self.seccomp is None:
            raise SystemExit(f"no system-call table for {os.uname().machine}")

    def run(self) -> None:
        """Serve until the supervisor is gone."""
        kernel.become_subreaper()
        kernel.die_with_parent()
        kernel.set_dumpable(False)
        for name in self.config.preload:
            importlib.import_module(name)
        child.prepare_streams()
        self.poll.register(self.supervisor.fileno(), select.POLLIN)
        self.isolation.wipe(SLOTS)  # also gives the work folders their mode
        self.landlock = landlock.ruleset([*self.isolation.folders(SLOTS), "/dev"])
        self.baseline = self._fingerprint()
        gc.collect()
        gc.freeze()
        gc.disable()  # children enable it again: a collection here would unshare pages before each fork
        self._tell(b"R", 0)
        while True:
            for fd, _ in self.poll.poll():
                if fd == self.supervisor.fileno():
                    self._command()
                else:
                    self._exited(self.by_pidfd[fd])

    def _tell(self, operation: bytes, ticket: int, *numbers: int, extra: bytes = b"") -> None:
        padded = (*numbers, 0, 0, 0, 0)[:4]
        self.supervisor.send(EVENT.pack(operation, ticket, *padded) + extra)

    def _command(self) -> None:
        message, ancillary, _, _ = self.supervisor.recvmsg(COMMAND.size, socket.CMSG_SPACE(4 * 4))
        if not message:
            os._exit(0)
        passed = array.array("i")
        for _, _, data in ancillary:
            passed.frombytes(data)
        operation, slot, ticket = COMMAND.unpack(message)
        if operation == b"S":
            self._spawn(slot, ticket, list(passed))
        elif operation == b"K":
            self._kill(ticket)
        elif operation == b"I":
            self._interrupt(ticket)
        elif operation == b"W":
            self._wipe()

    def _spawn(self, slot: int, ticket: int, fds: list[int]) -> None:
        pid, report = self.isolation.fork(slot)
        if pid == 0:
            status = 1
            try:
                gc.enable()
                child.enter(self.isolation, slot, fds, self.null, self.seccomp, self.landlock)
            except BaseException as error:  # noqa: BLE001  last stop of a forked process
                os.write(2, f"runner: {type(error).__name__}: {error}\n".encode("utf-8", "replace"))
            finally:
                os._exit(status)
        for fd in fds:
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        self.poll.register(pidfd, select.POLLIN)
        self.by_pidfd[pidfd] = pid
        self.children[pid] = Child(ticket, slot, pidfd, report)

    def _alone(self, pid: int, slot: int) -> bool:
        """Whether nothing else of the slot is meant to live on."""
        return all(other == pid or entry.slot != slot for other, entry in self.children.items())

    def _kill(self, ticket: int) -> None:
        for pid, entry in self.children.items():
            if entry.ticket == ticket:
                self.isolation.kill(pid, entry.slot, self._alone(pid, entry.slot))
                return

    def _interrupt(self, ticket: int) -> None:
        for pid, entry in self.children.items():
            if entry.ticket == ticket:
                self.isolation.interrupt(pid, entry.slot)
                return

    def _exited(self, pid: int) -> None:
        entry = self.children[pid]
        _, status, usage = os.wait4(pid, 0)
        cpu_us, peak_kb = int((usage.ru_utime + usage.ru_stime) * 1e6), usage.ru_maxrss
        if entry.report >= 0:
            report = os.read(entry.report, REPORT.size)
            os.close(entry.report)
            if len(report) == REPORT.size:
                status, cpu_us, peak_kb = REPORT.unpack(report)
        alone = self._alone(pid, entry.slot)
        self.poll.unregister(entry.pidfd)
        os.close(entry.pidfd)
        del self.children[pid], self.by_pidfd[entry.pidfd]
        strays = self.isolation.reap(entry.slot, self.children, alone)
        self._tell(b"X", entry.ticket, status, cpu_us, peak_kb, strays)

    def _wipe(self) -> None:
        left = self.isolation.wipe(SLOTS)
        now = self._fingerprint()
        changed = [name for name, value in now.items() if value != self.baseline[name]] + left[:16]
        self._tell(b"W", 0, extra=json.dumps(changed).encode())

    def _fingerprint(self) -> dict[str, Any]:
        """What a sandbox must look like before it is handed out again."""
        folders = self.isolation.folders(SLOTS)
        space = [os.statvfs(folder) for folder in folders]
        with open("/proc/self/mountinfo") as file:
            mounts = file.read().replace("//deleted", "")  # the engine removes the socket's folder once connected
        return {
            "processes": sorted(set(self._processes()) - set(self.children)) if self.config.isolation == "uid" else [],
            "modes": [os.stat(folder).st_mode for folder in folders],
            "space": [(entry.f_bfree, entry.f_ffree) for entry in space],
            "mounts": mounts,
            "environment": dict(os.environ),
            "limits": [resource.getrlimit(number) for number in range(resource.RLIMIT_NICE)],
            "host name": os.uname().nodename,
            "signals": [signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGTERM)],
            "module path": list(sys.path),
        }

    def _processes(self) -> list[int]:
        """Every process in sight; in a container that is the whole sandbox."""
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def start(config: RunnerConfig, close: list[int] | None = None) -> tuple[socket.socket, int]:
    """Fork the zygote and wait until it is ready. Returns the supervisor's end and the pid."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            ours.close()
            for fd in close or []:
                os.close(fd)
            Zygote(config, theirs).run()
        except BaseException as error:  # noqa: BLE001  last stop of a forked process
            os.write(2, f"zygote: {type(error).__name__}: {error}\n".encode("utf-8", "replace"))
        finally:
            os._exit(status)
    theirs.close()
    if not ours.recv(MAX_MESSAGE):
        raise SystemExit("the zygote did not start")
    return ours, pid
