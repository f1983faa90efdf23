"""Linux system calls that the `os` module lacks. Each raises `OSError` on failure."""

from __future__ import annotations

import ctypes
import os
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 0x20
MS_NOATIME = 0x400
MS_NODIRATIME = 0x800
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MS_RELATIME = 1 << 21
MNT_DETACH = 2
_ST_RELATIME = 0x1000

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
SECCOMP_MODE_FILTER = 2

CAP_SETGID, CAP_SETUID = 6, 7

_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _prctl(option: int, first: int = 0, second: int = 0) -> int:
    result: int = _libc.prctl(option, first, second, 0, 0)
    return result if result >= 0 else _check(result, f"prctl({option})")


def syscall(what: str, number: int, *arguments: object) -> int:
    """Make a system call that the C library does not wrap; `what` names it in errors."""
    return _check(_libc.syscall(number, *arguments), what)


def unshare(flags: int) -> None:
    """Move this process (and, for pid namespaces, its next child) into new namespaces."""
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    """Join the namespace that `fd` refers to."""
    _check(_libc.setns(fd, kind), "setns")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """mount(2)."""
    encoded = [text.encode() if text is not None else None for text in (source, target, kind, data)]
    result = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _check(result, f"mount {target}")


def mount_flags(path: str) -> int:
    """The restrictions of the mount that contains `path`, as flags for `mount`."""
    flags = os.statvfs(path).f_flag
    restrictions = flags & (MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME)
    return restrictions | (MS_RELATIME if flags & _ST_RELATIME else 0)


def pivot_root(new_root: str, put_old: str) -> None:
    """pivot_root(2)."""
    syscall("pivot_root", _PIVOT_ROOT[os.uname().machine], new_root.encode(), put_old.encode())


def detach(target: str) -> None:
    """Unmount lazily."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def set_host_name(name: str) -> None:
    """Set the host name of this uts namespace."""
    _check(_libc.sethostname(name.encode(), len(name)), "sethostname")


def set_dumpable(dumpable: bool) -> None:
    """Allow or forbid other processes of this user to inspect this process (/proc/PID/mem, ptrace)."""
    _prctl(PR_SET_DUMPABLE, int(dumpable))


def become_subreaper() -> bool:
    """Adopt orphaned descendants, so that they can be found and killed. False if unsupported (gVisor)."""
    try:
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
    except OSError:
        return False
    return True


def die_with_parent() -> None:
    """Receive SIGKILL when the parent ends."""
    _prctl(PR_SET_PDEATHSIG, 9)


def forbid_new_privileges() -> None:
    """Prevent set-user-id programs and file capabilities from adding privileges to this process."""
    _prctl(PR_SET_NO_NEW_PRIVS, 1)


def install_seccomp(program: ctypes.Structure) -> None:
    """Install a BPF program (see `seccomp.program`). Irreversible."""
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program))


def _capset(effective: int, permitted: int, inheritable: int) -> None:
    def words(shift: int) -> tuple[int, int, int]:
        return tuple((value >> shift) & 0xFFFFFFFF for value in (effective, permitted, inheritable))  # type: ignore[return-value]

    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, struct.pack("6I", *words(0), *words(32))), "capset")


def drop_capabilities() -> None:
    """Drop every capability of this process and of all programs that it will execute."""
    for capability in range(_LAST_CAPABILITY + 1):
        try:
            _prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # unknown capability, or no CAP_SETPCAP: the sets are emptied below anyway
            break
    _capset(0, 0, 0)


def keep_capabilities(*numbers: int) -> None:
    """Drop all capabilities except these."""
    mask = sum(1 << number for number in numbers)
    _capset(mask, mask, 0)


def keep_capabilities_across_exec() -> None:
    """Make all capabilities ambient, so that a program executed by an ordinary user keeps them."""
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last = int(file.read())
    every = (1 << (last + 1)) - 1
    _capset(every, every, every)
    for capability in range(last + 1):
        _prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability)
