"""Which groups are trained on first, and which of the used ones leave first: small classes, chosen in the recipe.

A rule orders groups within the staleness bound and never decides whether the bound holds: a group on its due date is
taken whatever its place in the order (`trainers.buffer.window`). So without re-use every group is trained on exactly
once, and a rule decides when; with re-use it also decides which groups are trained on again.

One's own: a class whose constructor takes its options, named as `module:Class` or installed in the entry-point groups
`forge_env.sampling_rules` and `forge_env.eviction_rules`.
"""

from __future__ import annotations

import random
from typing import Any, Protocol

from forge_env.config.recipe import ReplaySection
from forge_env.plugins import make_plugin
from trainers.buffer.types import Held


class SamplingRule(Protocol):
    """Gives every group its place when it is complete, and again when it may be used once more."""

    def __call__(self, held: Held[Any], rng: random.Random) -> float:
        """The smallest value is trained on first; ties go by order of admission. Draw from `rng` only."""


class EvictionRule(Protocol):
    """Says what a used group is still worth."""

    def __call__(self, held: Held[Any]) -> float:
        """The smallest value leaves first."""


class Fifo:
    """In order of admission: the least waiting, and task order is kept."""

    def __call__(self, held: Held[Any], rng: random.Random) -> float:
        """Order of admission."""
        return held.index


class Freshest:
    """Youngest tokens first: the least staleness on average, while older groups wait for their due date."""

    def __call__(self, held: Held[Any], rng: random.Random) -> float:
        """Policy version, newest first."""
        return -held.version


class Random:
    """In random order."""

    def __call__(self, held: Held[Any], rng: random.Random) -> float:
        """A uniform draw."""
        return rng.random()


class Prioritized:
    """Drawn without replacement with weights p^alpha, p the mean of |advantage| over the group's episodes.

    The places are -log(u) / p^alpha with u uniform (Efraimidis and Spirakis, "Weighted random sampling with a
    reservoir", 2006); priorities to the power of alpha are those of prioritized experience replay (Schaul et al.,
    arXiv 1511.05952), whose importance weights are left out: every group is trained on anyway.

    Args:
        alpha: 0 is a uniform draw, larger values make the order strict.
    """

    def __init__(self, alpha: float = 1.0) -> None:
        if not 0.0 <= alpha < 100.0:
            raise ValueError(f"alpha={alpha} is not within [0, 100)")
        self.alpha = alpha

    def __call__(self, held: Held[Any], rng: random.Random) -> float:
        """An exponential draw over the weight; groups without advantage come last."""
        weight = held.priority**self.alpha
        draw = rng.expovariate(1.0)
        return draw / weight if weight > 0.0 else float("inf")


class Oldest:
    """The oldest tokens leave first: they have the fewest steps left."""

    def __call__(self, held: Held[Any]) -> float:
        """Policy version."""
        return held.version


class LeastAdvantage:
    """The groups with the smallest advantages leave first."""

    def __call__(self, held: Held[Any]) -> float:
        """Mean size of the advantages."""
        return held.priority


class MostUsed:
    """The groups that were trained on most often leave first."""

    def __call__(self, held: Held[Any]) -> float:
        """Uses, most first."""
        return -held.uses


SAMPLING: dict[str, Any] = {"fifo": Fifo, "freshest": Freshest, "prioritized": Prioritized, "random": Random}
EVICTION: dict[str, Any] = {"oldest": Oldest, "least_advantage": LeastAdvantage, "most_used": MostUsed}


def make_rules(section: ReplaySection) -> tuple[SamplingRule, EvictionRule]:
    """The rules that a recipe names.

    Raises:
        NotRegisteredError: there is none of that name.
        PluginError: it can't be imported, or is not a rule.
        UsageError: it doesn't take these options.
    """
    sampling = _make("sampling", section.sampling, SAMPLING, section.options)
    return sampling, _make("eviction", section.eviction, EVICTION, {})


def _make(key: str, name: str, own: dict[str, Any], options: dict[str, Any]) -> Any:
    group, options_at = f"forge_env.{key}_rules", "grpo.replay.options"
    return make_plugin(group, name, options, name_at=f"grpo.replay.{key}", options_at=options_at, own=own)
