"""Landlock: programs may write below their folders and nowhere else, /proc included.

What it adds to a read-only root: a program can't take back that the kernel kills it first when memory runs out
(/proc/self/oom_score_adj), nor write to the memory of another program of its user. Where the kernel has no Landlock,
or one before Linux 5.19, programs run without.
"""

from __future__ import annotations

import ctypes
import os
import struct

from . import kernel

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""The same numbers on every architecture."""
_VERSION, _PATH_BENEATH = 1, 1
_WRITE_FILE, _REFER = 1 << 1, 1 << 13
_FIRST_ABI = 2
"""Version 1 can't allow moving files between folders."""


def ruleset(writable: list[str]) -> int:
    """Descriptor of a ruleset that allows writing below the folders `writable`; -1 where there is no Landlock."""
    try:
        abi = kernel.syscall("landlock", _CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    except OSError:
        return -1
    if abi < _FIRST_ABI:
        return -1
    rights = _WRITE_FILE | _REFER
    descriptor = kernel.syscall("landlock", _CREATE_RULESET, struct.pack("=Q", rights), ctypes.c_size_t(8), 0)
    for folder in writable:
        below = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        kernel.syscall("landlock", _ADD_RULE, descriptor, _PATH_BENEATH, struct.pack("=Qi", rights, below), 0)
        os.close(below)
    return descriptor


def restrict(descriptor: int) -> None:
    """Hold this process and all it starts to the ruleset, for good. It needs "no new privileges"."""
    kernel.syscall("landlock", _RESTRICT_SELF, descriptor, 0)
