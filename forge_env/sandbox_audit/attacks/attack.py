"""The description of a hostile program, for this catalogue and for third-party collections."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from forge_env.sandbox.spec import Limits

Group = Literal["escape", "starvation", "leftovers", "network", "cheating"]
GROUPS: tuple[Group, ...] = get_args(Group)
LEAK = "LEAK"
"""Printed by a program that reached something it must not reach."""
EXPECTED = (70417, 80231)
"""Right answers to the calls f(1) and f(2), unknown to solutions except those with an honest part (`Attack.earns`)."""
TESTS = f"""\
import solution
def test_one(): assert solution.f(1) == {EXPECTED[0]}
def test_two(): assert solution.f(2) == {EXPECTED[1]}
"""
"""Tests for cheating solutions that bring none of their own."""
BAIT = "bait"
"""File that the engine is asked to read after some attacks, see `Attack.bait`."""
ATTEMPT = f"""\
def attempt(action, *leak):
    try: action()
    except OSError: return
    if leak: print('{LEAK}', *leak)
"""
"""Prelude of programs with many attempts: `attempt(action, *leak)` reports `leak`, if given, when `action` succeeds."""
Unguarded = Literal["", "user", "root", "judge"]


@dataclass(frozen=True)
class Attack:
    """One hostile program. A `cheating` one is a solution that must earn what it would without its tricks."""

    name: str
    group: Group
    tries: str
    """Its aim, in one sentence."""
    code: str
    limits: Limits = field(default_factory=lambda: Limits(wall_s=0.5, memory_mb=256))
    session: bool = False
    """Run it as a cell of a persistent Python session, after another program has run in the same sandbox."""
    bait: bool = False
    """It creates the file `bait`; the engine's attempt to read that must soon fail with an `OSError`."""
    plant: str = ""
    """Cheating: a program that the agent runs in the same sandbox before the solution is judged."""
    tests: str = TESTS
    """Cheating: the tests that the solution must not pass."""
    earns: int = 0
    """Cheating: number of calls, of f(1) and f(2), that the solution's honest part answers correctly."""
    unguarded: Unguarded = ""
    """Setting in which the attack succeeds without a sandbox, harmlessly: as any `user`, as `root`, or (cheating) in
    one process with its `judge`. Such attacks prove that success would be detected.
    """
