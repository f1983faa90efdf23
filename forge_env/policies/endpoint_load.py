"""Does a larger load pay? Latencies under two loads, compared with regard to how much they vary.

Where more requests in flight are simply served, latency stays; where they only queue, it grows in proportion. Between
them lies what is asked for: a load half as large again must complete a tenth more. Latencies are compared by their
logarithms, whose means a few very long answers don't move.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto

PROBE = 1.5
"""How much larger a load must be to be compared with the known one."""
NEAR = 1.2
"""How much a load may differ from the known one to tell more of that."""
GAIN = 1.1
"""How much more such a load must complete."""
SURE_IT_PAYS = 1.0
"""Standard errors between what is seen and what would just pay, for a verdict."""
SURE_IT_QUEUES = 2.0
"""The same for the verdict that costs more where it is wrong."""
PATIENCE = 4
"""Rounds after which there is a verdict in any case."""
FEWEST = 8
"""Answers below which nothing is compared."""


class Verdict(Enum):
    """What a comparison says so far."""

    OPEN = auto()
    PAYS = auto()
    QUEUES = auto()


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered request."""

    begun: float
    """Seconds on the clock."""
    ended: float
    load: float
    """Requests in flight beside it and it, on average."""
    window: int
    """When it began."""


@dataclass(slots=True)
class Answers:
    """Sums over the answers under one load."""

    count: int = 0
    loads: float = 0.0
    windows: float = 0.0
    mean: float = 0.0
    """Of the logarithm of latency."""
    squares: float = 0.0
    """Of its deviations from the mean (B. P. Welford, Technometrics 4, 1962)."""

    def add(self, answer: Answer) -> None:
        """One answer more."""
        self.count += 1
        self.loads += answer.load
        self.windows += answer.window
        value = math.log(max(answer.ended - answer.begun, 1e-6))
        before = value - self.mean
        self.mean += before / self.count
        self.squares += before * (value - self.mean)

    @property
    def load(self) -> float:
        """Mean number of requests in flight."""
        return self.loads / max(self.count, 1)

    @property
    def variance(self) -> float:
        """Of the mean."""
        return self.squares / max(self.count - 1, 1) / max(self.count, 1)


class Comparison:
    """A known load and a larger one.

    Args:
        round_size: answers that make the load known.
    """

    def __init__(self, round_size: int) -> None:
        self._round_size = max(FEWEST, round_size)
        self._known = Answers()
        self._level = 0.0  # its load when it became known
        self._tried = Answers()
        self._tried_from = math.inf  # those begun while the load still grew met a shorter queue than it makes

    @property
    def known_load(self) -> float:
        """Requests in flight that are known to pay; endless while nothing is known."""
        return self._known.load if self._known.count >= self._round_size else math.inf

    def add(self, answer: Answer, *, known: bool) -> Verdict:
        """One answer more; `known`: the window stands at the known load."""
        if known or self._known.count < self._round_size:
            self._known.add(answer)
            self._level = self._known.load
            return Verdict.OPEN
        if answer.load >= PROBE * self._known.load:
            self._tried_from = min(self._tried_from, answer.ended)
            if answer.begun >= self._tried_from:
                self._tried.add(answer)
        elif self._level / NEAR <= answer.load <= self._level * NEAR:
            self._known.add(answer)  # the longest answers of the first rounds come last
        return self._judge()

    def _judge(self) -> Verdict:
        known, tried = self._known, self._tried
        if tried.count < max(FEWEST, tried.load):  # the first answers of a round are its shortest
            return Verdict.OPEN
        distance = tried.mean - known.mean - self._just_pays()
        error = math.sqrt(known.variance + tried.variance)
        sure = SURE_IT_QUEUES if distance > 0 else SURE_IT_PAYS
        if tried.count < PATIENCE * tried.load and abs(distance) < sure * error:
            return Verdict.OPEN
        if distance > 0:
            return Verdict.QUEUES
        self._known, self._level, self._round_size = tried, tried.load, tried.count
        self._tried, self._tried_from = Answers(), math.inf
        return Verdict.PAYS

    def _just_pays(self) -> float:
        """By how much the logarithm of latency may grow with the load."""
        return (1 - math.log(GAIN) / math.log(PROBE)) * math.log(self._tried.load / self._known.load)

    def knee(self) -> float:
        """The window whose load completes, with the known latency, what the larger one does."""
        known, tried = self._known, self._tried
        load = tried.load * math.exp(known.mean - tried.mean)
        elsewhere = max(0.0, tried.windows / tried.count - tried.load)  # places of those who are not asking
        return min(max(load, known.load), tried.load) + elsewhere
