"""Sampling rules order the groups to train on; eviction rules order the used groups to drop. The recipe names them.

Rules order groups within the staleness bound and can't break it: a group on its due date is taken whatever its
position in the order (`trainers.buffer.window`). Without re-use every group is trained on exactly once and the rule
decides when; with re-use it also decides which groups are trained on again.

A custom rule is a class whose constructor takes the rule's options. Name it as `module:Class`, or install it in the
entry-point group `forge_env.sampling_rules` or `forge_env.eviction_rules`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from forge_env.config.reader import make_plugin
from forge_env.config.recipe import ReplaySection
from trainers.buffer.types import Held

SamplingRule = Callable[[Held[Any], random.Random], float]
"""Sort key of a group, asked when it becomes available, again for each re-use: the smallest is trained on first, ties
in order of admission. Draws come from the given generator only."""
EvictionRule = Callable[[Held[Any]], float]
"""Sort key of a used group: the smallest is dropped first."""


def fifo(held: Held[Any], rng: random.Random) -> float:
    """Order of admission: waits are shortest, and the task order is preserved."""
    return held.index


def freshest(held: Held[Any], rng: random.Random) -> float:
    """Youngest tokens first: lowest average staleness, but older groups wait for their due date."""
    return -held.version


def shuffled(held: Held[Any], rng: random.Random) -> float:
    """Random order."""
    return rng.random()


class Prioritized:
    """Groups drawn without replacement with weights p^alpha, p the mean of |advantage| over the group's episodes.

    The sort keys are -log(u) / p^alpha with u uniform (Efraimidis and Spirakis, "Weighted random sampling with a
    reservoir", 2006). Weights p^alpha are those of prioritized experience replay (Schaul et al., arXiv 1511.05952),
    without its importance weights, since every group is trained on anyway.

    Args:
        alpha: 0 draws uniformly; the larger, the closer the order is to descending priority.
    """

    def __init__(self, alpha: float = 1.0) -> None:
        if not 0.0 <= alpha < 100.0:
            raise ValueError(f"alpha={alpha} is not within [0, 100)")
        self.alpha = alpha

    def __call__(self, held: Held[Any], rng: random.Random) -> float:
        """An exponential draw divided by the weight; groups without advantage come last."""
        weight = held.priority**self.alpha
        draw = rng.expovariate(1.0)
        return draw / weight if weight > 0.0 else float("inf")


SAMPLING: dict[str, Any] = {
    "fifo": lambda: fifo,
    "freshest": lambda: freshest,
    "prioritized": Prioritized,
    "random": lambda: shuffled,
}
EVICTION: dict[str, Any] = {
    "oldest": lambda: lambda held: held.version,  # they have the fewest steps left
    "least_advantage": lambda: lambda held: held.priority,
    "most_used": lambda: lambda held: -held.uses,
}


def make_rules(section: ReplaySection) -> tuple[SamplingRule, EvictionRule]:
    """Create the sampling and eviction rules named in a recipe."""
    sampling = _make("sampling", section.sampling, SAMPLING, section.options)
    return sampling, _make("eviction", section.eviction, EVICTION, {})


def _make(key: str, name: str, own: dict[str, Any], options: dict[str, Any]) -> Any:
    group, options_at = f"forge_env.{key}_rules", "grpo.replay.options"
    return make_plugin(group, name, options, name_at=f"grpo.replay.{key}", options_at=options_at, own=own)
