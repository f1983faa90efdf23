"""Attacking a sandbox on purpose: run a hostile program, then look whether it was contained.

`forge-env sandbox audit` runs `attacks.ATTACKS`; a larger collection can be passed to `audit` in the same form.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Literal

from forge_env.errors import ForgeError
from forge_env.sandbox.protocol import Sandbox, SandboxEngine
from forge_env.sandbox.types import Limits

Group = Literal["escape", "starvation", "leftovers", "network", "cheating"]
LEAK = "LEAK"
"""What a program prints when it reached what it must not reach."""
EXPECTED = (7, 8)
"""Right answers to the calls f(1) and f(2), which a cheating solution does not know."""
_LATE_S = 3.0
_LOOK = (
    "import os\n"
    "print(len([p for p in os.listdir('/proc') if p.isdigit()]))\n"
    "print([f for d in ('.', '/tmp', '/dev/shm') for f in os.listdir(d)][:9])\n"
    "print(sorted(os.environ))"
)


@dataclass(frozen=True)
class Attack:
    """One hostile program. A `cheating` one is a solution that must not pass; others are programs."""

    name: str
    group: Group
    tries: str
    """What it attempts, in a few words."""
    code: str
    limits: Limits = field(default_factory=lambda: Limits(wall_s=0.8, memory_mb=256))


@dataclass(frozen=True)
class Finding:
    """What came of one attack."""

    attack: Attack
    problems: list[str]
    """Empty: it was contained."""


async def audit(engine: SandboxEngine, attacks: Iterable[Attack]) -> AsyncIterator[Finding]:
    """Run every attack on `engine`, which must allow at least two sandboxes at once."""
    for attack in attacks:
        yield Finding(attack, await try_attack(engine, attack))


async def try_attack(engine: SandboxEngine, attack: Attack) -> list[str]:
    """Run one attack beside an innocent neighbour. Returns what went wrong, in words."""
    problems: list[str] = []
    try:
        async with engine.session() as neighbour:
            await neighbour.write_file("mine", b"untouched")
            usual = (await neighbour.run_python(_LOOK)).stdout.splitlines()
            async with engine.session() as sandbox:
                problems += await (_cheat if attack.group == "cheating" else _attack)(sandbox, attack)
                if (await sandbox.run_python("print(1 + 1)")).stdout != "2\n":
                    problems.append("the sandbox does not work any more")
            if await neighbour.read_file("mine") != b"untouched":
                problems.append("a neighbour's file was changed")
        for _ in range(2):
            async with engine.session() as sandbox:
                problems += await _leftovers(sandbox, usual)
    except ForgeError as error:
        problems.append(f"the engine lost a sandbox: {error}")
    return problems


async def _attack(sandbox: Sandbox, attack: Attack) -> list[str]:
    result = await sandbox.run_python(attack.code, limits=attack.limits)
    problems = [line for line in result.stdout.splitlines() if line.startswith(LEAK)]
    if result.usage.wall_s > attack.limits.wall_s + _LATE_S:
        problems.append(f"ended late, after {result.usage.wall_s:.1f} s")
    return problems


async def _cheat(sandbox: Sandbox, attack: Attack) -> list[str]:
    problems = []
    result = await sandbox.run_calls(attack.code, ["f(1)", "f(2)"], limits=attack.limits)
    for outcome, expected in zip(result.outcomes, EXPECTED, strict=False):
        if outcome.error is None and type(outcome.value) is int and outcome.value == expected:
            problems.append("a wrong solution gave a right value")
    assertions = "\n".join(f"assert solution.f({n}) == {value}" for n, value in enumerate(EXPECTED, 1))
    if (await sandbox.run_tests(attack.code, f"import solution\n{assertions}", limits=attack.limits)).passed:
        problems.append("a wrong solution passed its tests")
    return problems


async def _leftovers(sandbox: Sandbox, usual: list[str]) -> list[str]:
    """What the next user would find that a clean sandbox does not have."""
    result = await sandbox.run_python(_LOOK)
    lines = result.stdout.splitlines()
    if len(lines) != 3:
        return [f"the next sandbox does not work: {result.stderr[-200:]}"]
    problems = [] if int(lines[0]) <= int(usual[0]) else [f"processes were left: {lines[0]} instead of {usual[0]}"]
    if lines[1] != "[]":
        problems.append(f"files were left: {lines[1]}")
    if lines[2] != usual[2]:
        problems.append(f"variables were left: {lines[2]}")
    return problems
