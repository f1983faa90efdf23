"""The catalogue of hostile programs, which `forge-env sandbox audit` and the tests run on every engine."""

from __future__ import annotations

from forge_env.sandbox_audit.attacks import cheating, escape, kernel, leftovers, network, starvation
from forge_env.sandbox_audit.attacks.attack import BAIT, EXPECTED, GROUPS, LEAK, TESTS, Attack, Group

ATTACKS: tuple[Attack, ...] = (
    *escape.FILES,
    *kernel.CALLS,
    *starvation.PROCESSES,
    *starvation.MEMORY,
    *leftovers.PROCESSES,
    *leftovers.FILES,
    *network.NETWORK,
    *cheating.ANSWERS,
    *cheating.JUDGES,
    *cheating.SEARCHES,
    *cheating.PLANTS,
)

__all__ = ["ATTACKS", "BAIT", "EXPECTED", "GROUPS", "LEAK", "TESTS", "Attack", "Group"]
