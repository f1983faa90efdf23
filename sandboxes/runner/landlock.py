"""Landlock rules that let programs write below their own folders only; elsewhere, including /proc, they can't.

This goes beyond a read-only root: a program can't change /proc/self/oom_score_adj, which makes the kernel kill it
first when memory runs out, and can't write to the memory of another program of its user. On kernels without Landlock,
and before Linux 5.19, programs run without these rules.
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
"""First version with LANDLOCK_ACCESS_FS_REFER; version 1 can't allow moving files between folders."""


def ruleset(writable: list[str]) -> int:
    """A new ruleset that allows writing below the folders `writable`: its descriptor, or -1 without Landlock."""
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
    """Apply the ruleset irrevocably to this process and its descendants. Requires "no new privileges"."""
    kernel.syscall("landlock", _RESTRICT_SELF, descriptor, 0)
