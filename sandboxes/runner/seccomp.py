"""The system-call filter of zygotes and their children: the table of `syscalls.py` as a raw BPF program."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence

from .syscalls import ALLOWED, ARCHITECTURES, CONDITIONS, REFUSED, Condition

_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ERRNO = 0x00050000
_REFUSE, _MISSING = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
_LOAD, _AND, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENT_0 = 0, 4, 16
_WORD = 0xFFFFFFFF

Instruction = tuple[int, int, int, int]
"""Operation, instructions to skip if true, instructions to skip if false, operand."""


def instructions(machine: str) -> list[Instruction]:
    """The BPF program for `machine` (x86_64 or aarch64).

    Calls with conditions come first. All others depend on the number only, so the kernel computes their answer once.
    """
    column = list(ARCHITECTURES).index(machine)
    code: list[Instruction] = [
        (_LOAD, 0, 0, _OFFSET_ARCH),
        (_JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
    ]
    for name, conditions in CONDITIONS.items():
        checks = [step for condition in conditions for step in _check(condition)]
        code += [(_JUMP_EQUAL, 0, len(checks) + 1, ALLOWED[name][column]), *checks, (_RETURN, 0, 0, _ALLOW)]
    return code + _search(_ranges(column))


def _check(condition: Condition) -> list[Instruction]:
    """Instructions that return `condition.error` unless the condition holds."""
    count = len(condition.values)
    code: list[Instruction] = [(_LOAD, 0, 0, _OFFSET_ARGUMENT_0 + 8 * condition.argument)]  # the lower half
    if condition.mask != _WORD:
        code.append((_AND, 0, 0, condition.mask))
    for index, value in enumerate(condition.values):
        last = index == count - 1
        to_error, past_error = count - 1 - index, count - index
        if condition.excluded:
            code.append((_JUMP_EQUAL, to_error, 1 if last else 0, value))
        else:
            code.append((_JUMP_EQUAL, past_error, 0, value))
    code.append((_RETURN, 0, 0, _ERRNO | condition.error))
    return code


def _ranges(column: int) -> list[tuple[int, int]]:
    """First number and answer of each run of calls with the same answer, starting at 0; the last run has no end."""
    answers = {numbers[column]: _ALLOW for numbers in ALLOWED.values()}
    answers.update((numbers[column], _REFUSE) for numbers in REFUSED.values())
    ranges: list[tuple[int, int]] = []
    for number in range(max(answers) + 2):
        answer = answers.get(number, _MISSING)
        if not ranges or ranges[-1][1] != answer:
            ranges.append((number, answer))
    return ranges  # x32 numbers are larger than all of them


def _search(ranges: Sequence[tuple[int, int]]) -> list[Instruction]:
    """A binary search for the range that contains the number."""
    if len(ranges) == 1:
        return [(_RETURN, 0, 0, ranges[0][1])]
    middle = len(ranges) // 2
    lower, upper = _search(ranges[:middle]), _search(ranges[middle:])
    return [(_JUMP_GREATER_EQUAL, len(lower), 0, ranges[middle][0]), *lower, *upper]


class Program(ctypes.Structure):
    """`struct sock_fprog`, with a reference to its instructions."""

    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
    _code: ctypes.Array[ctypes.c_char]


def program(machine: str | None = None) -> Program | None:
    """The filter for this machine, or None for an architecture without a table."""
    machine = machine or os.uname().machine
    if machine not in ARCHITECTURES:
        return None
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions(machine))
    buffer = ctypes.create_string_buffer(packed, len(packed))
    result = Program(len(packed) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    result._code = buffer
    return result
