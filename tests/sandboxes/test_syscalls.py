"""The table of system calls, the two filters made from it, and what programs see of them on both engines."""

from __future__ import annotations

import ctypes
import errno
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import system_calls
from forge_env.sandbox import Limits, SandboxEngine
from sandboxes.docker import seccomp as container
from sandboxes.runner.syscalls import ALLOWED, ARCHITECTURES, CONDITIONS, MISSING, REFUSED

MACHINES = list(ARCHITECTURES)
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
TABLE = {**ALLOWED, **REFUSED, **MISSING}
X32 = 0x40000000
_PROBE = """\
import ctypes, json
libc, errors = ctypes.CDLL(None, use_errno=True), {}
for number in %s:
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(0)] * 6)
    errors[number] = ctypes.get_errno() if result == -1 else -1
print(json.dumps(errors))
"""
_PROBE_ARGUMENTS = """\
import ctypes, json
libc, errors = ctypes.CDLL(None, use_errno=True), []
for number, arguments in %s:
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(word) for word in arguments])
    errors.append(ctypes.get_errno() if result == -1 else 0)
print(json.dumps(errors))
"""
KERNELS_OWN = {"uprobe", "uretprobe"}
"""No filter is asked about them: they end a program that calls them."""
WITH_ARGUMENTS: list[tuple[str, Sequence[int], int]] = [
    *(("clone", (1 << bit | 17,), errno.EPERM) for bit in (17, 25, 26, 27, 28, 29, 30)),
    *(("socket", (family, 2, 0), errno.EAFNOSUPPORT) for family in (0, 3, 9, 15, 16, 17, 21, 31, 38, 40, 43, 44, 45)),
    *(("socketpair", (family, 1, 0, 0), errno.EAFNOSUPPORT) for family in (0, 3, 16, 17, 21, 30, 40, 43)),
    *(("socket", (2, kind, 0), errno.EPERM) for kind in (0, 4, 6, 10, 6 | 0o2000000)),
    *(("socket", (2, 1, protocol), errno.EPROTONOSUPPORT) for protocol in (2, 33, 132, 256, 262)),
    *(("setpriority", which_who, errno.EPERM) for which_who in ((0, 1), (1, 0), (2, 0))),
    ("prlimit64", (1, 7, 0, 0), errno.EPERM),
    ("sched_setaffinity", (1, 0, 0), errno.EPERM),
    *(("ioctl", (0, request), errno.EPERM) for request in (0x5412, 0x541C, 0x5423, 1 << 32 | 0x5412)),
    ("prctl", (62, 1, 0, 0, 0), errno.EPERM),
]
"""Refused by their arguments: name, arguments, error."""


def test_no_call_is_in_two_groups() -> None:
    assert len(TABLE) == len(ALLOWED) + len(REFUSED) + len(MISSING)
    for column in range(len(ARCHITECTURES)):
        numbers = Counter(numbers[column] for numbers in TABLE.values())
        del numbers[-1]
        assert set(numbers.values()) == {1}
    assert set(CONDITIONS) <= set(ALLOWED)


def test_the_documentation_has_the_table_s_counts() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sandboxes" / "security.md").read_text(encoding="utf-8")
    assert f"| allowed | {len(ALLOWED)}, of which {len(CONDITIONS)} with certain arguments only |" in page
    assert f"| {len(REFUSED)} | EPERM |" in page
    assert f"| {len(MISSING)}, and the rest | ENOSYS" in page


def test_the_numbers_are_those_of_libseccomp() -> None:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        pytest.skip("libseccomp is not installed")
    library.seccomp_syscall_resolve_num_arch.restype = ctypes.c_void_p
    free = ctypes.CDLL(None).free
    for column, audit in enumerate(ARCHITECTURES.values()):
        known = {numbers[column]: name for name, numbers in TABLE.items()}
        for number in range(512):
            if name := library.seccomp_syscall_resolve_num_arch(ctypes.c_uint32(audit), number):
                assert known[number] == ctypes.string_at(name).decode(), f"{number} is in no group"
                free(ctypes.c_void_p(name))


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_answers_as_the_table(machine: str) -> None:
    names = system_calls.names(machine)
    for number in [*range(600), -1, 0x7FFFFFFF, *(X32 | number for number in range(600))]:
        name = names.get(number, "")
        expected = ALLOW if name in ALLOWED else ERRNO | (errno.EPERM if name in REFUSED else errno.ENOSYS)
        if name not in CONDITIONS:
            assert system_calls.answer(machine, number) == expected, (number, name)
    assert system_calls.answer(machine, 0, audit=0x40000003) == KILL  # the 32-bit calls of x86


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", CONDITIONS)
@given(data=st.data())
def test_the_filter_checks_arguments(machine: str, name: str, data: Any) -> None:
    conditions = CONDITIONS[name]
    arguments = [0] * 6
    for condition in conditions:
        low = data.draw(st.sampled_from(condition.values) | st.integers(0, 2**32 - 1))
        arguments[condition.argument] = data.draw(st.sampled_from([0, 1, 2**32 - 1])) << 32 | low
    errors = [condition.error for condition in conditions if not condition.holds(arguments[condition.argument])]
    number = ALLOWED[name][MACHINES.index(machine)]
    assert system_calls.answer(machine, number, arguments) == (ERRNO | errors[0] if errors else ALLOW)
    if not errors:
        assert profile_allows(name, arguments)


def profile_allows(name: str, arguments: Sequence[int] = ()) -> bool:
    """Whether the profile of containers allows a call with these arguments."""
    return any(
        rule["action"] == "SCMP_ACT_ALLOW"
        and name in rule["names"]
        and all(arguments[check["index"]] & check["value"] == check["valueTwo"] for check in rule.get("args", ()))
        for rule in json.loads(container.profile())["syscalls"]
    )


def test_the_profile_of_containers_is_the_same_list() -> None:
    profile = json.loads(container.profile())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    allowed = {name for rule in profile["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW" for name in rule["names"]}
    assert allowed == {*ALLOWED, *container.RUNNER}
    assert not allowed & {
        "ptrace",
        "bpf",
        "mount",
        "unshare",
        "setns",
        "io_uring_setup",
        "io_setup",
        "shmget",
        "clone3",
    }
    for name, arguments, _ in WITH_ARGUMENTS:
        if name not in ("ioctl", "prctl"):  # "all but these" can't be said there: the filter of programs refuses them
            assert not profile_allows(name, [*arguments, 0, 0, 0, 0, 0, 0])


@pytest.mark.asyncio(loop_scope="module")
async def test_every_refused_call_gives_the_same_error_on_every_engine(engine: SandboxEngine) -> None:
    column = MACHINES.index(machine := os.uname().machine)
    refused = {numbers[column]: errno.EPERM for numbers in REFUSED.values()}
    refused |= {numbers[column]: errno.ENOSYS for name, numbers in MISSING.items() if name not in KERNELS_OWN}
    refused |= {number: errno.ENOSYS for number in range(471, 512) if number not in system_calls.names(machine)}
    refused.pop(-1, None)
    async with engine.session() as sandbox:
        result = await sandbox.run_python(_PROBE % sorted(refused))
        errors = {int(number): error for number, error in json.loads(result.stdout).items()}
        assert errors == refused
        calls = [(ALLOWED[name][column], arguments) for name, arguments, _ in WITH_ARGUMENTS]
        result = await sandbox.run_python(_PROBE_ARGUMENTS % calls)
        assert json.loads(result.stdout) == [error for _, _, error in WITH_ARGUMENTS]


@pytest.mark.asyncio(loop_scope="module")
async def test_no_program_takes_what_the_machine_has_once(engine: SandboxEngine) -> None:
    def contexts() -> int:
        with open("/proc/sys/fs/aio-nr") as file:
            return int(file.read())

    before = contexts()
    column = MACHINES.index(os.uname().machine)
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        f"made = [libc.syscall({REFUSED['io_setup'][column]}, 1 << 12, "
        "ctypes.byref(ctypes.c_ulong(0))) for _ in range(16)]\n"
        "print(made.count(0), open('/proc/sys/fs/aio-nr').read())"
    )
    async with engine.session() as sandbox:
        made, during = map(int, (await sandbox.run_python(code)).stdout.split())
    assert made == 0
    assert during < before + 16 * (1 << 12)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_python_has_all_it_needs(engine: SandboxEngine) -> None:
    async with engine.session() as sandbox:
        await sandbox.write_file("p.py", system_calls.PYTHON)
        result = await sandbox.exec(["python3", "p.py"], limits=Limits(wall_s=60, cpu_s=60, memory_mb=1024))
        assert (result.exit_code, result.stderr) == (0, "")


HARMLESS = {"clone3", "io_uring_setup", "mbind", "memfd_create", "set_mempolicy", "socket"}
"""Refused calls of real programs, which do without; `socket` is netlink's."""


@pytest.mark.slow
@pytest.mark.parametrize("name", system_calls.PROGRAMS)
def test_real_programs_work_under_the_filter(name: str) -> None:
    outcome = system_calls.run_program(name)
    if outcome is None:
        pytest.skip(f"{name} is not installed")
    assert outcome.code == 0, outcome.output
    assert set(outcome.refused) <= HARMLESS
