"""The credit of each tool call of an episode, with intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from forge_env.evaluation.estimates import Estimate, share_of
from forge_env.schema import with_schema


@dataclass(slots=True)
class Value:
    """Rewards of the continuations from one point of an episode."""

    rewards: list[float] = field(default_factory=list)
    repeated: int = 0
    """Number of continuations that made the recorded call (or wrote the recorded message) next."""
    lost: int = 0
    """Number of continuations that the infrastructure or the environment's code ended; they don't count."""

    def estimate(self, low: float, high: float) -> Estimate | None:
        """Mean reward; None without continuations.

        The interval is Wilson's for the share of the range [low, high]. It holds for any rewards within the range, and
        is wider than needed if they are graded.
        """
        span = high - low
        share = share_of([((reward - low) / span, 1) for reward in self.rewards])
        if share is None:
            return None
        ends = [low + span * end for end in (share.value, share.low, share.high)]
        return Estimate(ends[0], span * share.stderr, ends[1], ends[2])


def difference(after: Estimate, before: Estimate) -> Estimate:
    """`after` minus `before`, from independent samples.

    The interval joins those of both (R. G. Newcombe, "Interval estimation for the difference between independent
    proportions", 1998, method 10), so it isn't empty if all rewards are equal.
    """
    value = after.value - before.value
    low = value - math.hypot(after.value - after.low, before.high - before.value)
    high = value + math.hypot(after.high - after.value, before.value - before.low)
    return Estimate(value, math.hypot(after.stderr, before.stderr), low, high)


@dataclass(slots=True)
class Call:
    """A tool call of an episode, or a message without one, and its credit."""

    turn: int
    """Number of its turn, from 1."""
    name: str
    """Name of the tool; empty for a message."""
    arguments: str
    """Arguments of the call, or the message's text."""
    before: Estimate | None
    """Mean reward of continuations from just before it."""
    after: Estimate | None
    """Mean reward of continuations from just after it; after the last call, the episode's reward, which is certain."""
    repeated: float | None
    """Share of the continuations from before it that made the same call next."""

    @property
    def credit(self) -> Estimate | None:
        """`after` minus `before`; None if one of them is unknown."""
        if self.after is None or self.before is None:
            return None
        return difference(self.after, self.before)

    @property
    def is_clear(self) -> bool:
        """Whether the interval of the credit excludes 0."""
        return (credit := self.credit) is not None and not credit.low <= 0 <= credit.high

    def as_json(self) -> dict[str, Any]:
        """The call's part of `credit.json`."""
        return {**asdict(self), "credit": None if self.credit is None else asdict(self.credit)}


@dataclass(slots=True)
class Cost:
    """What the continuations took."""

    continuations: int = 0
    turns: int = 0
    """Messages that the policy wrote; recorded ones that were played again don't count."""
    tokens: int = 0
    """Tokens that it sampled, if they are known."""
    replayed: int = 0
    """Recorded messages that were played again."""
    seconds: float = 0.0


@dataclass(slots=True)
class Credits:
    """The credit of each call of an episode."""

    run: str
    episode: str
    environment: str
    task: str
    model: str
    reward: float
    continuations: int
    """Continuations from each point."""
    calls: Sequence[Call] = ()
    cost: Cost = field(default_factory=Cost)
    differs: int | None = None
    """Turn (from 1) whose answer differed from the recorded one when it was played again; 0: the first observation;
    None: all were the same. Credits from this turn on are unknown."""
    difference: str = ""
    """The recorded answer and the new one, shortened."""
    lost: int = 0
    """Continuations that were lost, and don't count."""

    @property
    def ranked(self) -> list[Call]:
        """Calls with a credit, the largest absolute one first."""
        known = [call for call in self.calls if call.credit is not None]
        return sorted(known, key=lambda call: -abs(call.credit.value if call.credit else 0.0))

    def notes(self) -> Iterator[str]:
        """What limits the credits."""
        if self.differs is not None:
            yield (
                f"the environment isn't deterministic: its answer to turn {self.differs} differs when the actions are "
                f"played again ({self.difference}); credits from this turn on are unknown"
            )
        if self.lost:
            yield f"{self.lost:,} continuations were lost, and don't count"
        if certain := [call.turn for call in self.calls if call.repeated == 1.0 and not call.is_clear]:
            yield (
                f"turn {certain[0]}{f' and {len(certain) - 1} more' if certain[1:] else ''}: every continuation made "
                "the same call again, so its credit says nothing about the episode without it"
            )

    def as_json(self) -> dict[str, Any]:
        """The content of `credit.json`."""
        data = {**asdict(self), "calls": [call.as_json() for call in self.calls]}
        data["cost"] |= {"seconds": round(self.cost.seconds, 3)}
        return with_schema(data)
