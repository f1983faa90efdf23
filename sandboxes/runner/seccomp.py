"""The system-call filter of the zygotes and all their children, as a raw BPF program.

Refused: what looks into or steers other processes, mounts and namespaces, kernel keyrings, bpf, perf,
userfaultfd, io_uring, System V and POSIX queues and shared memory (they would outlive the child), clocks,
modules, handles that bypass paths, priorities, and every socket family but unix and internet. Files in memory
(memfd), which no size and no count of mapped memory bounds, and system calls newer than this list answer ENOSYS.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from dataclasses import dataclass

from . import kernel

_RET_ALLOW = 0x7FFF0000
_RET_KILL = 0x80000000
_RET_ERRNO = 0x00050000
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENT_0 = 0, 4, 16
_NEW_NAMESPACES = (
    kernel.CLONE_NEWNS | kernel.CLONE_NEWCGROUP | kernel.CLONE_NEWUTS | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUSER | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET
)  # fmt: skip
_FIRST_UNKNOWN = 463
_SOCKET_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6


@dataclass(frozen=True)
class _Architecture:
    audit: int
    socket: int
    clone: int
    clone3: int
    memfd_create: int
    column: int


_ARCHITECTURES: dict[str, _Architecture] = {
    "x86_64": _Architecture(0xC000003E, 41, 56, 435, 319, 0),
    "aarch64": _Architecture(0xC00000B7, 198, 220, 435, 279, 1),
}

# name: (number on x86_64, number on aarch64); -1 where the architecture lacks it
DENIED: dict[str, tuple[int, int]] = {
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "process_madvise": (440, 440), "pidfd_getfd": (438, 438), "perf_event_open": (298, 241),
    # mounts and namespaces
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "fanotify_init": (300, 262),
    # kernel surfaces with a record of escapes
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "memfd_secret": (447, 447), "modify_ldt": (154, -1), "personality": (135, 92),
    "vserver": (236, -1), "nfsservctl": (180, 42), "lookup_dcookie": (212, 18), "uselib": (134, -1),
    # what would outlive the child
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "shmdt": (67, 197), "semget": (64, 190),
    "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189),
    "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181),
    "mq_timedsend": (242, 182), "mq_timedreceive": (243, 183), "mq_notify": (244, 184), "mq_getsetattr": (245, 185),
    # the machine
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "acct": (163, 89), "sethostname": (170, 161), "setdomainname": (171, 162), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171), "iopl": (172, -1),
    "ioperm": (173, -1), "syslog": (103, 116), "vhangup": (153, 58), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    # its share of the machine
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274), "ioprio_set": (251, 30), "mbind": (237, 235), "set_mempolicy": (238, 237),
    "migrate_pages": (256, 238), "move_pages": (279, 239), "set_mempolicy_home_node": (450, 450),
}  # fmt: skip

# Allowed when the named arguments are 0, which stands for the caller itself: others of the same user are the runner.
ONLY_ITSELF: dict[str, tuple[tuple[int, int], tuple[int, ...]]] = {
    "setpriority": ((141, 140), (0, 1)), "prlimit64": ((302, 261), (0,)), "sched_setaffinity": ((203, 122), (0,)),
}  # fmt: skip

Instruction = tuple[int, int, int, int]


def instructions(machine: str) -> list[Instruction]:
    """The BPF program for `machine` (x86_64 or aarch64)."""
    arch = _ARCHITECTURES[machine]
    refuse, missing = _RET_ERRNO | errno.EPERM, _RET_ERRNO | errno.ENOSYS
    no_family = _RET_ERRNO | errno.EAFNOSUPPORT
    code: list[Instruction] = [
        (_LOAD, 0, 0, _OFFSET_ARCH),
        (_JUMP_EQUAL, 1, 0, arch.audit),
        (_RETURN, 0, 0, _RET_KILL),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
        (_JUMP_GREATER_EQUAL, 0, 1, _FIRST_UNKNOWN),  # also the x32 numbers of x86_64
        (_RETURN, 0, 0, missing),
        (_JUMP_EQUAL, 0, 1, arch.clone3),  # its flags lie in memory, out of the filter's sight: libc falls back
        (_RETURN, 0, 0, missing),
        (_JUMP_EQUAL, 0, 1, arch.memfd_create),
        (_RETURN, 0, 0, missing),
        (_JUMP_EQUAL, 0, 4, arch.clone),
        (_LOAD, 0, 0, _OFFSET_ARGUMENT_0),
        (_JUMP_SET, 0, 1, _NEW_NAMESPACES),
        (_RETURN, 0, 0, refuse),
        (_RETURN, 0, 0, _RET_ALLOW),
        (_JUMP_EQUAL, 0, 3 + len(_SOCKET_FAMILIES), arch.socket),
        (_LOAD, 0, 0, _OFFSET_ARGUMENT_0),
    ]
    for index, family in enumerate(_SOCKET_FAMILIES):
        code.append((_JUMP_EQUAL, len(_SOCKET_FAMILIES) - index, 0, family))
    code.append((_RETURN, 0, 0, no_family))
    code.append((_RETURN, 0, 0, _RET_ALLOW))
    for numbers, arguments in ONLY_ITSELF.values():
        code.append((_JUMP_EQUAL, 0, 3 * len(arguments) + 1, numbers[arch.column]))
        for argument in arguments:
            code += [
                (_LOAD, 0, 0, _OFFSET_ARGUMENT_0 + 8 * argument),
                (_JUMP_EQUAL, 1, 0, 0),
                (_RETURN, 0, 0, refuse),
            ]
        code.append((_RETURN, 0, 0, _RET_ALLOW))
    for numbers in DENIED.values():
        number = numbers[arch.column]
        if number >= 0:
            code.append((_JUMP_EQUAL, 0, 1, number))
            code.append((_RETURN, 0, 0, refuse))
    code.append((_RETURN, 0, 0, _RET_ALLOW))
    return code


class Program(ctypes.Structure):
    """`struct sock_fprog`, keeping its instructions alive."""

    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
    _code: ctypes.Array[ctypes.c_char]


def program(machine: str | None = None) -> Program | None:
    """The filter for this machine, or None for an architecture without a table."""
    machine = machine or os.uname().machine
    if machine not in _ARCHITECTURES:
        return None
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions(machine))
    buffer = ctypes.create_string_buffer(packed, len(packed))
    result = Program(len(packed) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    result._code = buffer
    return result
