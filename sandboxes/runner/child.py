"""The start of a child between fork and request: descriptors, privileges and filters, then limits and the program."""

from __future__ import annotations

import array
import fcntl
import marshal
import os
import resource
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import signal as _signal
else:
    import _signal  # avoids importing enum

from . import kernel, landlock, programs
from .isolation import Isolation
from .wire import PREFIX, Header

NICENESS = 5
"""Niceness of children, so that the supervisor gets the CPU before the code it watches."""
RUNNER = "/opt/forge_env"
"""Folder of the runner package."""
_HIGHEST_FD = 1 << 16
_JOB_FD = 3
_WORK_MODE = 0o700
_CHUNK = 1 << 16
_PASSED_SIZE = socket.CMSG_SPACE(4 * 4)
_SIGNALS = 1024
"""Queued signals and timers of a sandbox, which all sandboxes of an ordinary user take from one limit."""
_NEVER = (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE)
_LIMITED = (
    resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_AS,
)  # fmt: skip
_ceilings: dict[int, int] = {}
"""The zygote's hard limits, by resource."""
PERSISTENT = ("shell", "session", "process")


@dataclass
class Request:
    """A request as the child receives it."""

    header: Header
    code: str
    files: dict[str, bytes]
    channel: int = -1
    """Descriptor of the value or command channel; -1 for requests without one."""
    verdict: int = -1
    """Descriptor that the verdict of tests is written to; -1 for other requests."""


def prepare(isolation: Isolation) -> None:
    """Set up everything in the zygote that children can inherit; repeated in a child, it would cost copied pages."""
    _prepare_streams()
    sys.argv = ["main.py"]
    os.umask(0o022)
    _signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)
    environment = base_environment(isolation.folder(isolation.slots[0]), isolation.config.proxy_port)
    environment = {**environment, **image_environment(os.environ)}
    os.environ.clear()
    os.environ.update(environment)
    for name in filter(_settable, _NEVER):
        resource.setrlimit(name, (0, 0))
    if _settable(resource.RLIMIT_SIGPENDING):
        most = min(_SIGNALS, resource.getrlimit(resource.RLIMIT_SIGPENDING)[1] % (1 << 64))
        resource.setrlimit(resource.RLIMIT_SIGPENDING, (most, most))
    _ceilings.update((name, resource.getrlimit(name)[1]) for name in _LIMITED if _settable(name))


def enter(isolation: Isolation, slot: int, fds: list[int], null: int, landlock_rules: int) -> NoReturn:
    """Become the child of slot `slot` and serve one request. `fds`: request socket, stdout, stderr."""
    os.setsid()
    os.nice(NICENESS)
    _be_killed_first()
    if landlock_rules >= 0:
        landlock.restrict(landlock_rules)
    for target, source in enumerate((null, fds[1], fds[2])):
        os.dup2(source, target)
    os.dup2(fds[0], _JOB_FD)
    os.closerange(_JOB_FD + 1, _HIGHEST_FD)
    _signal.set_wakeup_fd(-1)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    isolation.confine(slot)
    work = isolation.folder(slot)
    if slot:
        os.umask(0o077)
        os.environ["HOME"] = os.environ["TMPDIR"] = work  # the solution can write to /tmp
    request, stdin = _receive(_JOB_FD)
    if request is None:
        os._exit(0)
    kernel.set_dumpable(True)  # not earlier: an idle child must not be readable or writable by other processes
    if stdin >= 0:
        os.dup2(stdin, 0)
        os.close(stdin)
    _apply_limits(request.header["limits"], isolation.processes)
    if variables := request.header.get("env"):
        os.environ.update(variables)
    if request.header["kind"] in PERSISTENT:
        kernel.become_subreaper()  # keeps its orphans separate from those of other requests
    _enter_folder(work, request.header.get("cwd"))
    programs.run(request, work)


def _enter_folder(work: str, cwd: str | None) -> None:
    try:
        if os.stat(work).st_mode & 0o7777 != _WORK_MODE:
            os.chmod(work, _WORK_MODE)  # an earlier program may have removed the permissions
        os.chdir(os.path.join(work, cwd) if cwd else work)
    except OSError as error:
        os.write(2, f"{error.strerror}: {cwd}\n".encode())
        os._exit(126)


_OWN = {
    "BASHOPTS", "BASH_ENV", "ENV", "GCONV_PATH", "GLIBC_TUNABLES", "HOME", "HOSTNAME", "IFS", "LANG", "LANGUAGE",
    "LOCPATH", "LOGNAME", "OLDPWD", "PS4", "PWD", "SHELLOPTS", "SHLVL", "TEMP", "TMP", "TMPDIR", "USER",
}  # fmt: skip
"""Variables that the sandbox sets itself, or that make programs load code without being asked to."""
_OWN_PREFIXES = ("BASH_FUNC_", "KUBERNETES_", "LC_", "LD_", "MALLOC_", "PYTHON")


def image_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """An image's `ENV` without the sandbox's own variables, and with the runner's folder removed from PYTHONPATH."""
    inherited = {
        name: value
        for name, value in variables.items()
        if name not in _OWN and not name.startswith(_OWN_PREFIXES) and not name.lower().endswith("_proxy")
    }
    folders = [folder for folder in variables.get("PYTHONPATH", "").split(":") if folder not in ("", RUNNER)]
    return {**inherited, **({"PYTHONPATH": ":".join(folders)} if folders else {})}


def base_environment(work: str, proxy_port: int) -> dict[str, str]:
    """The complete environment of a program, without the request's variables."""
    environment = {
        "HOME": work,
        "LANG": "C.UTF-8",
        "LANGUAGE": "C",  # avoids searching for translations, which are not installed
        "LOGNAME": "sandbox",
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "TMPDIR": "/tmp",
        "USER": "sandbox",
    }
    if proxy_port:
        names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
        environment.update(dict.fromkeys(names, f"http://127.0.0.1:{proxy_port}"))
    return environment


def _be_killed_first() -> None:
    """Make the kernel kill this process, not the runner, when memory runs out."""
    if not _volunteer():  # an undumpable process of an ordinary user may not: retry as dumpable
        kernel.set_dumpable(True)
        _volunteer()
        kernel.set_dumpable(False)


def _volunteer() -> bool:
    try:
        with open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
            file.write(b"1000")
    except OSError:
        return False
    return True


def _settable(limit: int) -> bool:
    """Whether the limit can be set. gVisor lacks some, and refuses to set them."""
    try:
        resource.setrlimit(limit, resource.getrlimit(limit))
    except ValueError:
        return False
    return True


def _receive(fd: int) -> tuple[Request | None, int]:
    """Wait for the request: one frame, with descriptors for stdin and the channels."""
    job = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=fd)
    frame, passed = bytearray(), array.array("i")
    size = PREFIX.size
    while len(frame) < size:
        chunk, ancillary, _, _ = job.recvmsg(_CHUNK, _PASSED_SIZE)
        for _, _, data in ancillary:
            passed.frombytes(data)
        if not chunk:
            return None, -1
        frame += chunk
        if len(frame) >= PREFIX.size:
            size = PREFIX.size + sum(PREFIX.unpack_from(frame))
    job.close()
    request = parse(bytes(frame))
    if passed:
        return request, _place(request, passed)
    return request, -1


def parse(frame: bytes) -> Request:
    """Parse a frame into a request, without its descriptors."""
    header_length, _ = PREFIX.unpack_from(frame)
    position = PREFIX.size + header_length
    header = marshal.loads(frame[PREFIX.size : position])
    code = frame[position : position + header.get("code", 0)].decode("utf-8", "surrogatepass")
    position += header.get("code", 0) + header.get("stdin", 0)
    files = {}
    for name, size in header.get("files", ()):
        files[name] = frame[position : position + size]
        position += size
    return Request(header, code, files)


def _place(request: Request, passed: array.array[int]) -> int:
    """Move the received descriptors to their final numbers. Returns the one for stdin, or -1."""
    moved = [fcntl.fcntl(source, fcntl.F_DUPFD, 64) for source in passed]
    for source in passed:
        os.close(source)
    stdin = moved.pop(0) if request.header.get("stdin") or request.header["kind"] == "process" else -1
    fds = [-1, -1]
    for index, source in enumerate(moved):
        fds[index] = _JOB_FD + index
        os.dup2(source, fds[index], inheritable=False)
        os.close(source)
    request.channel, request.verdict = fds
    return stdin


def _apply_limits(limits: dict[str, Any], overhead: int) -> None:
    cpu = max(1, int(-(-limits["cpu_s"] // 1)))
    for name, soft, hard in (
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_FSIZE, limits["file_size_mb"] << 20, limits["file_size_mb"] << 20),
        (resource.RLIMIT_NOFILE, limits["open_files"], limits["open_files"]),
        (resource.RLIMIT_NPROC, limits["processes"] + overhead, limits["processes"] + overhead),
        (resource.RLIMIT_AS, limits["memory_mb"] << 20, limits["memory_mb"] << 20),
    ):
        if name not in _ceilings:
            continue
        if (ceiling := _ceilings[name]) != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(name, (soft, hard))


def _prepare_streams() -> None:
    """Open text streams over descriptors 0 to 2, inherited by all children."""
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
