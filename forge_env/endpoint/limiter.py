"""Adaptive limit on the number of concurrent requests to an endpoint (`AdaptiveLimiter`)."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto

from forge_env.working_time import waiting

# ---
# Does a larger load increase throughput? Compare the latencies under two loads, considering their variance.
#
# If the endpoint serves additional requests in parallel, latency stays constant; if it queues them, latency grows in
# proportion to the load. The criterion is between these: accept 1.5x load only for 10 % more throughput. The logarithms
# of latencies are compared, because a few very long answers hardly move their mean.

PROBE = 1.5
"""Minimum ratio of a load to the known load for a comparison."""
NEAR = 1.2
"""Maximum ratio of a load to the known load at which its answers count as answers under the known load."""
GAIN = 1.1
"""Minimum ratio of throughputs at a load of `PROBE` times the known load."""
SURE_IT_PAYS = 1.0
"""Standard errors between the observed latency and the break-even latency required for the verdict PAYS."""
SURE_IT_QUEUES = 2.0
"""The same for the verdict QUEUES, which costs more if it is wrong."""
PATIENCE = 4
"""Rounds after which a verdict is given in any case."""
FEWEST = 8
"""Minimum number of answers for a comparison."""


class Verdict(Enum):
    """Result of a comparison so far."""

    OPEN = auto()
    PAYS = auto()
    QUEUES = auto()


@dataclass(frozen=True, slots=True)
class Begun:
    """State of the limiter when a request began."""

    epoch: int
    """Number of earlier decreases of the window."""
    at: float
    """Start time on the limiter's clock in seconds."""
    area: float
    """Integral of the number of requests in flight over time, up to the start."""
    window: int


@dataclass(slots=True)
class Answers:
    """Statistics of the answers under one load."""

    count: int = 0
    loads: float = 0.0
    windows: float = 0.0
    mean: float = 0.0
    """Mean of the logarithms of latencies."""
    squares: float = 0.0
    """Sum of squared deviations from the mean (B. P. Welford, Technometrics 4, 1962)."""

    def add(self, begun: Begun, ended: float, load: float) -> None:
        """Add an answer to a request during which `load` requests were in flight on average, including itself."""
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
        """Variance of the mean."""
        return self.squares / max(self.count - 1, 1) / max(self.count, 1)


class Comparison:
    """Comparison of a known load with a larger one."""

    def __init__(self, round_size: int) -> None:
        self._round_size = max(FEWEST, round_size)
        self._known = Answers()
        self._level = 0.0  # mean load when it became known
        self._tried = Answers()
        self._tried_from = math.inf  # requests that began while the load still grew met a shorter queue

    @property
    def known_load(self) -> float:
        """Load that is known to pay, in requests in flight; infinite until a load is known."""
        return self._known.load if self._known.count >= self._round_size else math.inf

    def add(self, begun: Begun, ended: float, load: float, *, known: bool) -> Verdict:
        """Add an answer. `known`: the window is held at the known load."""
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
        # break-even growth of the logarithm of latency at this load
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
        """Window size whose load has the throughput of the larger load at the latency of the known one."""
        known, tried = self._known, self._tried
        load = tried.load * math.exp(known.mean - tried.mean)
        unused = max(0.0, tried.windows / tried.count - tried.load)  # slots that were not in use
        return min(max(load, known.load), tried.load) + unused


# ---
# A window limits the requests in flight. It grows by one for every answer (doubling each round) until the endpoint
# pushes back, then by one per round (additive increase). It halves when the endpoint reports overload or a request
# times out (multiplicative decrease, at most once per round), as in TCP (V. Jacobson, "Congestion avoidance and
# control", SIGCOMM 1988). It grows only while requests wait for it. Latency limits it too: by Little's law, w requests
# in flight with latency l complete w / l requests per second. If a load 1.5 times as large hardly completes more, its
# requests only queue (`Comparison`); the window then shrinks to the size at which queueing began, and grows again after
# a while.

REACH = 4.0
"""Maximum ratio of a load to the last one known to pay, up to which the window grows if no larger load has failed."""
PROBE_REACH = 2.0
"""The same after a larger load did not pay."""
HOLD_ROUNDS = 4
"""Rounds without growth after a load that didn't pay; doubled each time."""
MOST_HOLD_ROUNDS = 8
CALM_ROUNDS = 20
"""Rounds without overload after which the window doubles each round again: the overload was temporary."""


class AdaptiveLimiter:
    """A semaphore whose size adapts to the endpoint's capacity, for use from one event loop."""

    def __init__(self, *, start: int = 16, maximum: int = 256, clock: Callable[[], float] = time.perf_counter) -> None:
        self.maximum = maximum
        self.window = float(min(start, maximum))
        self.in_flight = 0
        self.on_change: Callable[[], object] = lambda: None
        """Called after each change of the window's size."""
        self._clock = clock
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._area, self._since = (
            0.0,
            clock(),
        )  # integral of requests in flight over time; its mean over an interval is the load
        self._epoch = 0  # number of decreases; requests that began before one don't cause another
        self._doubling = True
        self._calm = 0  # answers since the endpoint last pushed back
        self._pressed = 0  # answers until requests no longer count as waiting for the window
        self._held = 0  # answers until the window may grow again
        self._hold_rounds = HOLD_ROUNDS
        self._reach = REACH
        self._comparison = Comparison(self.size)

    @property
    def size(self) -> int:
        """Number of requests allowed in flight, at least 1."""
        return max(1, int(self.window))

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[Begun]:
        """Hold one slot of the window; pass the yielded value to `succeeded` or `overloaded`."""
        await self._acquire()
        try:
            yield self.begin()
        finally:
            self.count(-1)
            self._wake()

    def begin(self) -> Begun:
        """Record the limiter's state for a request that begins now."""
        self.count(0)
        return Begun(self._epoch, self._since, self._area, self.size)

    def count(self, change: int) -> None:
        """Change the number of requests in flight."""
        now = self._clock()
        self._area += self.in_flight * (now - self._since)
        self._since = now
        self.in_flight += change

    def press(self) -> None:
        """Note that requests are waiting for the window, or soon will be."""
        self._pressed = self.size

    async def _acquire(self) -> None:
        if self.in_flight < self.size and not self._waiters:
            self.count(1)
            return
        self.press()
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(slot)
        try:
            with waiting():
                await slot  # `_wake` counts this request as in flight
        except asyncio.CancelledError:
            if slot.cancelled():
                with suppress(ValueError):
                    self._waiters.remove(slot)
            else:
                self.count(-1)
                self._wake()
            raise

    def _wake(self) -> None:
        while self._waiters and self.in_flight < self.size:
            slot = self._waiters.popleft()
            if not slot.done():
                self.count(1)
                slot.set_result(None)
        if self._waiters:
            self.press()

    def succeeded(self, begun: Begun) -> None:
        """Record the answer to a request; the window may grow or shrink."""
        if begun.epoch != self._epoch:
            return
        self.count(0)
        latency = self._since - begun.at
        load = (self._area - begun.area) / latency if latency > 0 else float(self.in_flight)
        load = min(load, float(begun.window))  # while the window grows, later requests don't slow this one
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
        """Record an overload error or timeout of a request; the window is halved."""
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
