"""A pool of warm boxes: bounded, first come first served, self-healing.

    starting --ready--> idle <--> leased --release--> resetting --clean--> idle
                                     |                    |
                                     +------ lost --------+-- dirty, worn out --> destroyed

Every box is in exactly one of these states and their number never exceeds `size`.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from forge_env.errors import ForgeError, SandboxError
from forge_env.sandbox import SandboxSpec
from sandboxes.box import Box

_START_ATTEMPTS = 2


@dataclass
class _Waiter:
    spec: SandboxSpec
    box: asyncio.Future[Box]


class Pool:
    """Hands out clean boxes. Used from one event loop."""

    def __init__(self, make: Callable[[SandboxSpec], Awaitable[Box]], *, size: int, max_uses: int) -> None:
        self._make = make
        self.size = size
        self.max_uses = max_uses
        self.counters: Counter[str] = Counter()
        self._idle: list[Box] = []
        self._leased: set[Box] = set()
        self._pending: Counter[SandboxSpec] = Counter()  # starting or resetting
        self._waiters: deque[_Waiter] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self.last_dirt: list[str] = []
        """What the most recently poisoned box was found with."""

    @property
    def total(self) -> int:
        """Boxes in any state."""
        return len(self._idle) + len(self._leased) + self._pending.total()

    async def warm(self, spec: SandboxSpec, count: int) -> None:
        """Start up to `count` boxes and wait for them. Raises what starting them raised."""
        count = min(count, self.size - self.total)
        boxes = await asyncio.gather(*(self._started(spec) for _ in range(count)), return_exceptions=True)
        for box in boxes:
            if isinstance(box, Box):
                self._offer(box)
        for box in boxes:
            if isinstance(box, BaseException):
                raise box

    async def acquire(self, spec: SandboxSpec) -> Box:
        """A clean box; waits for its turn while all are taken."""
        if self._closed:
            raise SandboxError("the sandbox engine is closed")
        waited = any(waiter.spec == spec for waiter in self._waiters)
        box = None if waited else self._take_idle(spec)
        self.counters["warm" if box else "waited"] += 1
        if box is None:
            waiter = _Waiter(spec, asyncio.get_running_loop().create_future())
            self._waiters.append(waiter)
            self._grow()
            try:
                box = await waiter.box
            except asyncio.CancelledError:
                if waiter.box.done() and not waiter.box.cancelled() and waiter.box.exception() is None:
                    self._leased.discard(waiter.box.result())
                    self._offer(waiter.box.result())
                elif waiter in self._waiters:
                    self._waiters.remove(waiter)
                raise
        box.uses += 1
        return box

    def release(self, box: Box) -> None:
        """Take a box back: it is wiped and checked in the background, then offered again or replaced."""
        if box not in self._leased:
            return
        self._leased.discard(box)
        if self._closed or not box.connection.alive:
            self._discard(box, "lost")
        else:
            self._pending[box.spec] += 1
            self._background(self._reset(box))

    async def close(self) -> None:
        """Destroy every box and refuse whoever waits."""
        self._closed = True
        for waiter in self._waiters:
            if not waiter.box.done():
                waiter.box.set_exception(SandboxError("the sandbox engine was closed"))
        self._waiters.clear()
        for task in list(self._tasks):
            task.cancel()
        boxes = [*self._idle, *self._leased]
        self._idle.clear()
        self._leased.clear()
        await asyncio.gather(*self._tasks, *(box.destroy() for box in boxes), return_exceptions=True)

    def stats(self) -> dict[str, Any]:
        """Counters and the number of boxes in each state."""
        states = {"idle": len(self._idle), "leased": len(self._leased), "pending": self._pending.total()}
        return {**states, "waiting": len(self._waiters), "size": self.size, "dirt": self.last_dirt, **self.counters}

    # ---- inside ---------------------------------------------------------------------------------------

    def _take_idle(self, spec: SandboxSpec) -> Box | None:
        for box in self._idle:
            if box.spec == spec and box.connection.alive:
                self._idle.remove(box)
                self._leased.add(box)
                return box
        return None

    def _offer(self, box: Box) -> None:
        """Give a clean box to the first who waits for its kind, or keep it."""
        if self._closed or not box.connection.alive:
            self._discard(box, "lost")
            return
        for waiter in self._waiters:
            if waiter.spec == box.spec and not waiter.box.done():
                self._waiters.remove(waiter)
                self._leased.add(box)
                waiter.box.set_result(box)
                return
        self._idle.append(box)
        self._grow()  # someone may wait for another kind: this one can make room

    def _grow(self) -> None:
        """Start boxes for those who wait, as far as the bound allows."""
        if self._closed:
            return
        coming = self._pending.copy()
        for waiter in self._waiters:
            if coming[waiter.spec] > 0:
                coming[waiter.spec] -= 1
                continue
            if self.total >= self.size and not self._make_room(waiter.spec):
                return
            self._pending[waiter.spec] += 1
            self._background(self._start_for(waiter.spec))

    def _make_room(self, spec: SandboxSpec) -> bool:
        for box in self._idle:
            if box.spec != spec:
                self._idle.remove(box)
                self._discard(box, "evicted")
                return True
        return False

    async def _started(self, spec: SandboxSpec) -> Box:
        self._pending[spec] += 1
        try:
            return await self._start(spec)
        finally:
            self._pending[spec] -= 1

    async def _start(self, spec: SandboxSpec) -> Box:
        for attempt in range(_START_ATTEMPTS):
            try:
                box = await self._make(spec)
            except SandboxError:
                self.counters["failed starts"] += 1
                if attempt + 1 == _START_ATTEMPTS:
                    raise
            else:
                self.counters["started"] += 1
                box.connection.lost.add_done_callback(functools.partial(self._lost, box))
                return box
        raise AssertionError("unreachable")

    async def _start_for(self, spec: SandboxSpec) -> None:
        try:
            box = await self._start(spec)
        except ForgeError as error:
            self._pending[spec] -= 1
            for waiter in self._waiters:
                if waiter.spec == spec:
                    self._waiters.remove(waiter)
                    if not waiter.box.done():
                        waiter.box.set_exception(error)
                    break
            self._grow()
        except BaseException:
            self._pending[spec] -= 1
            raise
        else:
            self._pending[spec] -= 1
            self._offer(box)

    async def _reset(self, box: Box) -> None:
        try:
            dirty = await box.reset()
        except SandboxError:
            dirty = ["no answer"]
        except BaseException:
            self._pending[box.spec] -= 1
            self._discard(box, "lost")
            raise
        self._pending[box.spec] -= 1
        if dirty:
            self.last_dirt = dirty
            self._discard(box, "poisoned")
        elif box.uses >= self.max_uses:
            self._discard(box, "worn out")
        else:
            self._offer(box)

    def _lost(self, box: Box, _: asyncio.Future[None]) -> None:
        """An idle box died: forget it. A leased or resetting one is dealt with where it is used."""
        if box in self._idle:
            self._idle.remove(box)
            self._discard(box, "lost")

    def _discard(self, box: Box, why: str) -> None:
        self.counters[why] += 1
        self._background(box.destroy(), survives_close=True)
        self._grow()

    def _background(self, work: Coroutine[Any, Any, None], *, survives_close: bool = False) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks = self._tasks
        if survives_close:
            task = asyncio.ensure_future(_shielded(task))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _shielded(task: asyncio.Task[None]) -> None:
    """Wait for `task` even when cancelled: a destruction is never left half done."""
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            continue
