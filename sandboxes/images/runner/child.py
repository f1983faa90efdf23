"""A child's way from the fork to the request: descriptors, privileges, filter, then limits and the program."""

from __future__ import annotations

import array
import fcntl
import json
import os
import resource
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

from . import kernel, landlock, programs
from .isolation import Isolation
from .wire import PREFIX, Header

NICENESS = 5
"""The supervisor must win the CPU over the code it watches."""
_HIGHEST_FD = 1 << 16
_JOB_FD = 3
PERSISTENT = ("shell", "session", "process")


@dataclass
class Request:
    """One request as the child sees it."""

    header: Header
    code: str
    files: dict[str, bytes]
    channel: int
    """Descriptor of the value or command channel, -1 when the request has none."""
    verdict: int = -1
    """Descriptor for the verdict of judging tests, -1 for everything else."""


def enter(
    isolation: Isolation, slot: int, fds: list[int], null: int, seccomp_program: Any, landlock_rules: int
) -> NoReturn:
    """Become slot `slot`'s child and serve one request. `fds`: request socket, stdout, stderr."""
    os.setsid()
    os.nice(NICENESS)
    _be_killed_first()
    kernel.forbid_new_privileges()
    if landlock_rules >= 0:
        landlock.restrict(landlock_rules)
    for target, source in enumerate((null, fds[1], fds[2])):
        os.dup2(source, target)
    os.dup2(fds[0], _JOB_FD)
    os.closerange(_JOB_FD + 1, _HIGHEST_FD)
    for name in (signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(name, signal.SIG_DFL)
    isolation.confine(slot)
    if seccomp_program is not None:
        kernel.install_seccomp(seccomp_program)
    os.umask(0o022 if slot == 0 else 0o077)
    request, stdin = _receive(_JOB_FD)
    if request is None:
        os._exit(0)
    kernel.set_dumpable(True)  # only now: while idle, nobody may look in or write here
    if stdin >= 0:
        os.dup2(stdin, 0)
        os.close(stdin)
    work = isolation.folder(slot)
    _apply_limits(request.header["limits"], isolation.processes)
    os.environ.clear()
    os.environ.update(base_environment(work), **(request.header.get("env") or {}))
    if slot:
        os.environ["TMPDIR"] = work  # /tmp is in the solution's reach
    if request.header["kind"] in PERSISTENT:
        kernel.become_subreaper()  # its orphans stay its own, apart from those of other requests
    try:
        os.chmod(work, 0o700)  # an earlier program may have locked itself out
        os.chdir(os.path.join(work, request.header.get("cwd") or ""))
    except OSError as error:
        os.write(2, f"{error.strerror}: {request.header.get('cwd')}\n".encode())
        os._exit(126)
    programs.run(request, work)


def base_environment(work: str) -> dict[str, str]:
    """The whole environment of a program, before the request's own variables."""
    return {
        "HOME": work,
        "LANG": "C.UTF-8",
        "LOGNAME": "sandbox",
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "TMPDIR": "/tmp",
        "USER": "sandbox",
    }


def _be_killed_first() -> None:
    """When memory runs out the kernel takes this process, not the runner."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:  # not allowed to an undumpable process of an ordinary user: try again as a dumpable one
        kernel.set_dumpable(True)
        try:
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
        except OSError:
            pass
        kernel.set_dumpable(False)


def _receive(fd: int) -> tuple[Request | None, int]:
    """Wait for the request: a frame up to end of file, with descriptors for stdin and the value channel."""
    job = socket.socket(fileno=fd)
    chunks: list[bytes] = []
    passed = array.array("i")
    while True:
        chunk, ancillary, _, _ = job.recvmsg(1 << 20, socket.CMSG_SPACE(8))
        for _, _, data in ancillary:
            passed.frombytes(data)
        if not chunk:
            break
        chunks.append(chunk)
    job.close()
    frame = b"".join(chunks)
    if not frame:
        return None, -1
    header_length, _ = PREFIX.unpack_from(frame)
    position = PREFIX.size + header_length
    header = json.loads(frame[PREFIX.size : position])
    moved = [fcntl.fcntl(source, fcntl.F_DUPFD, 64) for source in passed]
    for source in passed:
        os.close(source)
    stdin = moved.pop(0) if header.get("stdin") or header["kind"] == "process" else -1
    fds = [-1, -1]
    for index, source in enumerate(moved):
        fds[index] = _JOB_FD + index
        os.dup2(source, fds[index], inheritable=False)
        os.close(source)
    code = frame[position : position + header.get("code", 0)].decode("utf-8", "surrogatepass")
    position += header.get("code", 0) + header.get("stdin", 0)
    files = {}
    for name, size in header.get("files", ()):
        files[name] = frame[position : position + size]
        position += size
    return Request(header, code, files, *fds), stdin


def _apply_limits(limits: dict[str, Any], overhead: int) -> None:
    cpu = max(1, int(-(-limits["cpu_s"] // 1)))
    for name, soft, hard in (
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_FSIZE, limits["file_size_mb"] << 20, limits["file_size_mb"] << 20),
        (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
        (resource.RLIMIT_NPROC, limits["processes"] + overhead, limits["processes"] + overhead),
        (resource.RLIMIT_AS, limits["memory_mb"] << 20, limits["memory_mb"] << 20),
    ):
        _, ceiling = resource.getrlimit(name)
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(name, (soft, hard))


def prepare_streams() -> None:
    """In the zygote: text streams over descriptors 0 to 2, ready for every child."""
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
