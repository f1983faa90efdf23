"""How many requests an endpoint gets at once, found out while asking.

A window of requests in flight: it doubles each round until the endpoint pushes back, then grows by one a round
(additive increase) and halves when told "too many" or when nothing comes back in time (multiplicative decrease,
once a round at most), as TCP does (V. Jacobson, "Congestion avoidance and control", SIGCOMM 1988). Latency holds
it too: by Little's law a window w with mean latency l completes w / l requests a second, and when a window half as
large again completes hardly more, the larger one only queues, so it is taken back and held for a while.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from forge_env.working_time import waiting

PROBE = 1.5
"""How much larger a window must be to be compared with the last good one."""
GAIN = 1.1
"""How much more such a window must complete to be kept."""
HOLD_ROUNDS = 20
"""Rounds without growth after one that didn't pay."""


class AdaptiveLimiter:
    """A semaphore whose size follows the endpoint. Used from one event loop."""

    def __init__(self, *, start: int = 16, maximum: int = 256, on_change: Callable[[], object] = lambda: None) -> None:
        self.maximum = maximum
        self.window = float(min(start, maximum))
        self.in_flight = 0
        self.overloads = 0
        """How often the endpoint said that it was too much."""
        self.on_change = on_change
        """Called whenever the window changed."""
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._doubling = True
        self._epoch = 0  # counts decreases: requests begun before one don't cause another
        self._round: list[float] = []  # latencies of this round, which has as many requests as the window had places
        self._round_size = self.size
        self._full = True
        self._held = 0
        self._good: tuple[float, float] | None = None  # window, requests a second

    @property
    def size(self) -> int:
        """Requests allowed in flight, at least one."""
        return max(1, int(self.window))

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[int]:
        """Hold one place in the window; the value goes to `succeeded` or `overloaded`."""
        await self._acquire()
        try:
            yield self._epoch
        finally:
            self.in_flight -= 1
            self._wake()

    async def _acquire(self) -> None:
        if self.in_flight < self.size and not self._waiters:
            self.in_flight += 1
            return
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
                self.in_flight -= 1
                self._wake()
            raise

    def _wake(self) -> None:
        while self._waiters and self.in_flight < self.size:
            place = self._waiters.popleft()
            if not place.done():
                self.in_flight += 1
                place.set_result(None)

    def succeeded(self, epoch: int, latency_s: float) -> None:
        """A request was answered after `latency_s` seconds."""
        if epoch != self._epoch:
            return
        self._round.append(latency_s)
        self._full = self._full and self.in_flight >= self.size
        if self._full and not self._held:
            self._resize(self.window + (1.0 if self._doubling else 1.0 / self.window))
        if len(self._round) >= self._round_size:
            self._end_round()

    def overloaded(self, epoch: int) -> None:
        """The endpoint pushed back, or let a request run into its time limit."""
        self.overloads += 1
        if epoch == self._epoch:
            self._decrease(self.window / 2)

    def _end_round(self) -> None:
        rate = len(self._round) / max(sum(self._round), 1e-9) * self._round_size
        full, size = self._full, float(self._round_size)
        self._begin_round()
        if self._held:
            self._held -= 1
        elif full and (self._good is None or size >= PROBE * self._good[0]):
            if self._good is not None and rate < GAIN * self._good[1]:
                self._held = HOLD_ROUNDS
                self._decrease(self._good[0])
            else:
                self._good = (size, rate)

    def _decrease(self, window: float) -> None:
        self._doubling = False
        self._epoch += 1
        self._good = None
        self._resize(window)
        self._begin_round()

    def _begin_round(self) -> None:
        self._round.clear()
        self._round_size = self.size
        self._full = True

    def _resize(self, window: float) -> None:
        before = self.size
        self.window = min(max(window, 1.0), float(self.maximum))
        if self.size != before:
            self._wake()
            self.on_change()
