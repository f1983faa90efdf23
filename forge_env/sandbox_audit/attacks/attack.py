"""What a hostile program is, for the catalogue beside this module and for collections of others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from forge_env.sandbox.protocol import Limits

Group = Literal["escape", "starvation", "leftovers", "network", "cheating"]
GROUPS: tuple[Group, ...] = get_args(Group)
LEAK = "LEAK"
"""What a program prints when it reached what it must not reach."""
EXPECTED = (70417, 80231)
"""Right answers to the calls f(1) and f(2), which no solution knows unless it is meant to (`Attack.earns`)."""
TESTS = f"""\
import solution
def test_one(): assert solution.f(1) == {EXPECTED[0]}
def test_two(): assert solution.f(2) == {EXPECTED[1]}
"""
"""What judges a cheating solution that brings no tests of its own."""
BAIT = "bait"
"""File that the engine is asked to read after some attacks, see `Attack.bait`."""
Unguarded = Literal["", "user", "root", "judge"]


@dataclass(frozen=True)
class Attack:
    """One hostile program. A `cheating` one is a solution that must earn what it would without its tricks."""

    name: str
    group: Group
    tries: str
    """What it attempts, in one sentence."""
    code: str
    limits: Limits = field(default_factory=lambda: Limits(wall_s=0.5, memory_mb=256))
    session: bool = False
    """Run as a cell of a persistent Python session, with an earlier program's sandbox child waiting beside it."""
    bait: bool = False
    """It plants the file `bait` for the engine: reading that must fail with an `OSError`, soon."""
    plant: str = ""
    """Cheating: a program that the agent runs in the same sandbox before it is judged there."""
    tests: str = TESTS
    """Cheating: the tests that the solution must not pass."""
    earns: int = 0
    """Cheating: how many of the calls f(1) and f(2) the honest part of the solution answers rightly."""
    unguarded: Unguarded = ""
    """Who achieves it without a sandbox and harms nothing: any `user`, `root`, or (cheating) a solution that shares a
    process with its `judge`. Such attacks prove that success would be noticed."""
