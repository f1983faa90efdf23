"""How many requests an endpoint gets at once, found out while asking (`AdaptiveLimiter`)."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto

from forge_env.rollout.working_time import waiting

# ---
# Does a larger load pay? Latencies under two loads, compared with regard to how much they vary.
#
# Where more requests in flight are simply served, latency stays; where they only queue, it grows in proportion. Between
# them lies what is asked for: a load half as large again must complete a tenth more. Latencies are compared by their
# logarithms, whose means a few very long answers don't move.

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
class Begun:
    """A request's beginning."""

    epoch: int
    """Decreases of the window before it."""
    at: float
    """Seconds on the clock."""
    area: float
    """Requests in flight, summed over time until then."""
    window: int


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

    def add(self, begun: Begun, ended: float, load: float) -> None:
        """One answer more, to a request with `load` in flight on average, itself among them."""
        self.count += 1
        self.loads += load
        self.windows += begun.window
        value = math.log(max(ended - begun.at, 1e-6))
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

    def add(self, begun: Begun, ended: float, load: float, *, known: bool) -> Verdict:
        """One answer more; `known`: the window stands at the known load."""
        if known or self._known.count < self._round_size:
            self._known.add(begun, ended, load)
            self._level = self._known.load
            return Verdict.OPEN
        if load >= PROBE * self._known.load:
            self._tried_from = min(self._tried_from, ended)
            if begun.at >= self._tried_from:
                self._tried.add(begun, ended, load)
        elif self._level / NEAR <= load <= self._level * NEAR:
            self._known.add(begun, ended, load)  # the longest answers of the first rounds come last
        return self._judge()

    def _judge(self) -> Verdict:
        known, tried = self._known, self._tried
        if tried.count < max(FEWEST, tried.load):  # the first answers of a round are its shortest
            return Verdict.OPEN
        # by how much the logarithm of latency may grow with the load, where that just pays
        growth = (1 - math.log(GAIN) / math.log(PROBE)) * math.log(tried.load / known.load)
        distance = tried.mean - known.mean - growth
        error = math.sqrt(known.variance + tried.variance)
        sure = SURE_IT_QUEUES if distance > 0 else SURE_IT_PAYS
        if tried.count < PATIENCE * tried.load and abs(distance) < sure * error:
            return Verdict.OPEN
        if distance > 0:
            return Verdict.QUEUES
        self._known, self._level, self._round_size = tried, tried.load, tried.count
        self._tried, self._tried_from = Answers(), math.inf
        return Verdict.PAYS

    def knee(self) -> float:
        """The window whose load completes, with the known latency, what the larger one does."""
        known, tried = self._known, self._tried
        load = tried.load * math.exp(known.mean - tried.mean)
        elsewhere = max(0.0, tried.windows / tried.count - tried.load)  # places of those who are not asking
        return min(max(load, known.load), tried.load) + elsewhere


# ---
# How many requests an endpoint gets at once, found out while asking.
#
# A window of requests in flight: it grows by one for every answer (doubles each round) until the endpoint pushes back,
# then by one a round (additive increase), and halves when told "too many" or when nothing comes back in time
# (multiplicative decrease, once a round at most), as TCP does (V. Jacobson, "Congestion avoidance and control", SIGCOMM
# 1988). It grows only while it is what requests wait for. Latency holds it too: by Little's law a load of w requests
# with latency l completes w / l a second, and when a load half as large again completes hardly more, the larger one
# only queues (`Comparison`), so the window goes back to where that began, and after a while it is tried again.

REACH = 4.0
"""How far beyond the last load that is known to pay the window grows while nothing is known of more."""
PROBE_REACH = 2.0
"""The same after larger loads have not paid."""
HOLD_ROUNDS = 4
"""Rounds without growth after a load that didn't pay; doubled with every further one."""
MOST_HOLD_ROUNDS = 8
CALM_ROUNDS = 20
"""Rounds without a refusal after which growth doubles again: what was too much was a passing matter."""


class AdaptiveLimiter:
    """A semaphore whose size follows the endpoint. Used from one event loop."""

    def __init__(self, *, start: int = 16, maximum: int = 256, clock: Callable[[], float] = time.perf_counter) -> None:
        self.maximum = maximum
        self.window = float(min(start, maximum))
        self.in_flight = 0
        self.overloads = 0
        """How often the endpoint said that it was too much."""
        self.on_change: Callable[[], object] = lambda: None
        """Called whenever the window changed."""
        self._clock = clock
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._area, self._since = 0.0, clock()  # requests in flight summed over time: means of it are loads
        self._epoch = 0  # counts decreases: requests begun before one don't cause another
        self._doubling = True
        self._calm = 0  # answers since the endpoint last pushed back
        self._pressed = 0  # answers for which the window still counts as what requests wait for
        self._held = 0  # answers until the window may grow again
        self._hold_rounds = HOLD_ROUNDS
        self._reach = REACH
        self._comparison = Comparison(self.size)

    @property
    def size(self) -> int:
        """Requests allowed in flight, at least one."""
        return max(1, int(self.window))

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[Begun]:
        """Hold one place in the window; the value goes to `succeeded` or `overloaded`."""
        await self._acquire()
        try:
            yield self.begin()
        finally:
            self.count(-1)
            self._wake()

    def begin(self) -> Begun:
        """A request begins now."""
        self.count(0)
        return Begun(self._epoch, self._since, self._area, self.size)

    def count(self, change: int) -> None:
        """Requests in flight change by this many."""
        now = self._clock()
        self._area += self.in_flight * (now - self._since)
        self._since = now
        self.in_flight += change

    def press(self) -> None:
        """Someone would ask, now or soon, if the window were larger."""
        self._pressed = self.size

    async def _acquire(self) -> None:
        if self.in_flight < self.size and not self._waiters:
            self.count(1)
            return
        self.press()
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(place)
        try:
            with waiting():
                await place  # `_wake` counts us in
        except asyncio.CancelledError:
            if place.cancelled():
                with suppress(ValueError):
                    self._waiters.remove(place)
            else:
                self.count(-1)
                self._wake()
            raise

    def _wake(self) -> None:
        while self._waiters and self.in_flight < self.size:
            place = self._waiters.popleft()
            if not place.done():
                self.count(1)
                place.set_result(None)
        if self._waiters:
            self.press()

    def succeeded(self, begun: Begun) -> None:
        """A request was answered now."""
        if begun.epoch != self._epoch:
            return
        self.count(0)
        latency = self._since - begun.at
        load = (self._area - begun.area) / latency if latency > 0 else float(self.in_flight)
        load = min(load, float(begun.window))  # while the window grows, those that came later don't slow this one
        self._calm += 1
        self._doubling = self._doubling or self._calm >= CALM_ROUNDS * self.size
        pressed = self._pressed > 0
        self._pressed -= pressed
        verdict = self._comparison.add(begun, self._since, load, known=self._held > 0)
        if verdict is Verdict.QUEUES:
            self._take_back(self._comparison.knee())
        elif self._held:
            self._held -= 1
        else:
            if verdict is Verdict.PAYS:
                self._reach, self._hold_rounds = REACH, HOLD_ROUNDS
            if pressed and max(load, self.in_flight) < self._reach * self._comparison.known_load:
                self._resize(self.window + (1.0 if self._doubling else 1.0 / self.window))

    def overloaded(self, begun: Begun) -> None:
        """The endpoint pushed back, or let a request run into its time limit."""
        self.overloads += 1
        if begun.epoch == self._epoch:
            self._doubling, self._calm, self._held = False, 0, 0
            self._decrease(self.window / 2)

    def _take_back(self, window: float) -> None:
        self._decrease(min(window, self.window))
        self._held = self._hold_rounds * self.size
        self._hold_rounds = min(2 * self._hold_rounds, MOST_HOLD_ROUNDS)
        self._reach = PROBE_REACH

    def _decrease(self, window: float) -> None:
        self._epoch += 1
        self._resize(window)
        self._comparison = Comparison(self.size)

    def _resize(self, window: float) -> None:
        before = self.size
        self.window = min(max(window, 1.0), float(self.maximum))
        if self.size != before:
            self._wake()
            self.on_change()
