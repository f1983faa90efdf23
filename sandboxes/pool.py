"""A pool of warm boxes: bounded, fair, self-healing, as large as demand and the machine ask for.

    starting --ready--> idle <--> leased --release--> resetting --clean--> idle
        |                |          |                     |
        +-- failed       |          +------ lost ---------+-- dirty, worn out --> destroyed
                         +-- too long idle, or in the way of another kind ------> destroyed

Every box is in exactly one of these states and their number never exceeds `size`. Whoever waits is served first
come, first served, except that a tenant (an environment) that holds fewer boxes goes before one that holds more, and
that an episode which has had a box goes before those that have yet to begin: what it needs now is its judge's, and
its time has begun.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from forge_env.concurrency import to_its_end
from forge_env.errors import EnvironmentBugError, ForgeError, SandboxError
from forge_env.rollout.working_time import waiting
from forge_env.sandbox import SandboxSpec
from sandboxes.box import Box

STUCK_S = 60.0
"""After this long without a box given back, one who holds a box and waits for another is asked to give up."""
IDLE_S = 60.0
"""After this long without work a box beyond the warm ones is given up."""
_START_ATTEMPTS = 2
_WINDOW = 1024


@dataclass(eq=False)
class Waiter:
    """One who waits for a box of `spec`."""

    spec: SandboxSpec
    tenant: str
    holder: object
    """Who will hold it: boxes of one holder are given back by the same code that waits."""
    box: asyncio.Future[Box]
    again: bool
    """Its holder, an episode, has had a box before."""

    def fail(self, error: Exception) -> None:
        """It gets an error instead."""
        if not self.box.done():
            self.box.set_exception(error)


class Pool:
    """Hands out clean boxes. Used from one event loop.

    Args:
        make: starts a box and waits until it answers; raises `SandboxError`.
        size: most boxes alive at once.
        warm: boxes kept when nothing is to do.
        max_uses: leases after which a box is replaced.
        room: whether the machine has memory for one more box; asked before growing beyond the first.
        stuck_s: seconds after which a wait that can't end is an error.
    """

    def __init__(
        self,
        make: Callable[[SandboxSpec], Awaitable[Box]],
        *,
        size: int,
        warm: int = 0,
        max_uses: int = 5000,
        room: Callable[[SandboxSpec], bool] = lambda spec: True,
        stuck_s: float = STUCK_S,
    ) -> None:
        self._make = make
        self.size = size
        self.warm = warm
        self.max_uses = max_uses
        self._room = room
        self._stuck_s = stuck_s
        self._releases = 0
        self.counters: Counter[str] = Counter()
        self.phases = Phases()
        self.last_dirt: list[str] = []
        self._idle: dict[Box, float] = {}  # since when
        self._leased: dict[Box, Waiter] = {}  # who waited for it
        self._resetting: set[Box] = set()
        self._pending: Counter[SandboxSpec] = Counter()  # starting or resetting
        self._dying = 0
        self._waiting: list[Waiter] = []
        self._begun: WeakSet[object] = WeakSet()
        """Holders that were named and have had a box."""
        self._background = Background()
        self._shrinking: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def total(self) -> int:
        """Boxes in any state, those being destroyed included."""
        return len(self._idle) + len(self._leased) + self._pending.total() + self._dying

    async def start(self, spec: SandboxSpec) -> None:
        """Start the warm boxes and wait for them. Raises what starting them raised."""
        self._pending[spec] += self.warm
        boxes = await asyncio.gather(*(self._pending_start(spec) for _ in range(self.warm)), return_exceptions=True)
        for box in boxes:
            if isinstance(box, Box):
                self._offer(box)
        for box in boxes:
            if isinstance(box, BaseException):
                raise box

    async def acquire(self, spec: SandboxSpec, tenant: str = "", holder: object = None) -> Box:
        """A clean box; waits for its turn while all are taken.

        Args:
            spec: its kind.
            tenant: on whose behalf, such as an environment's name.
            holder: who gives it back, such as an episode; the running task when not given.

        Raises:
            SandboxError: none could be started.
            EnvironmentBugError: whoever holds a box waits for another one, so that none is ever given back.
        """
        if self._closed:
            raise SandboxError("the sandbox engine is closed")
        asked = time.monotonic()
        again = holder is not None and holder in self._begun
        holding = asyncio.current_task() if holder is None else holder
        waiter = Waiter(spec, tenant, holding, asyncio.get_running_loop().create_future(), again)
        box = None if any(other.spec == spec for other in self._waiting) else self._take_idle(waiter)
        self.counters["hits" if box else "misses"] += 1
        if box is None:
            box = await self._wait(waiter)
        box.uses += 1
        if holder is not None:  # not a task: one that takes boxes for ever would never let another begin
            self._begun.add(holder)
        self.phases.add("acquire", time.monotonic() - asked)
        return box

    async def _wait(self, waiter: Waiter) -> Box:
        begun = sum(other.again for other in self._waiting)
        self._waiting.insert(begun if waiter.again else len(self._waiting), waiter)
        self._grow()
        try:
            with waiting():
                while True:
                    before = self._releases
                    await asyncio.wait([waiter.box], timeout=self._stuck_s)
                    if waiter.box.done():
                        return waiter.box.result()
                    if before == self._releases and self._is_stuck(waiter):
                        self._waiting.remove(waiter)
                        raise self._how_stuck()
        except asyncio.CancelledError:
            if waiter.box.done() and not waiter.box.cancelled() and waiter.box.exception() is None:
                box = waiter.box.result()  # it came at the very moment of giving up
                del self._leased[box]
                self._offer(box)
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            waiter.box.cancel()
            raise

    def _is_stuck(self, waiter: Waiter) -> bool:
        """Whether whoever could give a box back waits for one, and this one could."""
        if self._idle or self._pending.total() or self._dying:
            return False
        waiting_too = {id(other.holder) for other in self._waiting}
        holders = {id(holding.holder) for holding in self._leased.values()}
        return id(waiter.holder) in holders and holders <= waiting_too

    def _how_stuck(self) -> EnvironmentBugError:
        held = Counter(holding.tenant or "a caller" for holding in self._leased.values())
        names = ", ".join(f"{name} ({count})" for name, count in held.items())
        return EnvironmentBugError(
            f"all {len(self._leased)} sandboxes are held by episodes that wait for another one: {names}",
            fix="give the first back before taking a second, as `fresh_sandbox` does, or raise sandbox.concurrency",
        )

    def release(self, box: Box) -> None:
        """Take a box back: it is wiped and checked in the background, then offered again or replaced."""
        if self._leased.pop(box, None) is None:
            return
        self._releases += 1
        if self._closed or not box.connection.alive:
            self._discard(box, "lost")
        else:
            self._pending[box.spec] += 1
            self._resetting.add(box)
            self._background.start(self._reset(box))

    async def close(self) -> None:
        """Destroy every box and refuse whoever waits."""
        self._closed = True
        if self._shrinking is not None:
            self._shrinking.cancel()
        for waiter in self._waiting:
            waiter.fail(SandboxError("the sandbox engine was closed"))
        self._waiting.clear()
        self._background.cancel()
        boxes = [*self._idle, *self._leased, *self._resetting]
        self._idle.clear()
        self._leased.clear()
        self._resetting.clear()
        await asyncio.gather(*(box.destroy() for box in boxes), return_exceptions=True)
        await self._background.wait()  # what the cancelled ones had to destroy too

    def stats(self) -> dict[str, Any]:
        """Counters, boxes in each state, hit rate, and percentiles of the phases."""
        asked = self.counters["hits"] + self.counters["misses"]
        return {
            "idle": len(self._idle),
            "leased": len(self._leased),
            "pending": self._pending.total(),
            "waiting": len(self._waiting),
            "size": self.size,
            "hit_rate": self.counters["hits"] / asked if asked else 1.0,
            "dirt": self.last_dirt,
            "phases": self.phases.summary(),
            **self.counters,
        }

    def _take_idle(self, waiter: Waiter) -> Box | None:
        for box in reversed(self._idle):  # the most recently used: its memory is warm, the others may go
            if box.spec == waiter.spec and box.connection.alive:
                del self._idle[box]
                self._leased[box] = waiter
                return box
        return None

    def _offer(self, box: Box) -> None:
        """Give a clean box to whoever is next for its kind, or keep it."""
        if self._closed or not box.connection.alive:
            self._discard(box, "lost")
            return
        if waiters := [waiter for waiter in self._waiting if waiter.spec == box.spec and not waiter.box.done()]:
            held = Counter(holding.tenant for holding in self._leased.values())
            waiter = min(waiters, key=lambda waiter: held[waiter.tenant])  # the first among equals
            self._waiting.remove(waiter)
            self._leased[box] = waiter
            waiter.box.set_result(box)
            return
        self._idle[box] = time.monotonic()
        self._grow()  # someone may wait for another kind: this one can make room
        self._schedule_shrinking()

    def _grow(self) -> None:
        """Start boxes for those who wait, as far as the bound and the machine allow."""
        if self._closed:
            return
        coming = self._pending.copy()
        for waiter in self._waiting:
            if coming[waiter.spec] > 0:
                coming[waiter.spec] -= 1
                continue
            if self.total >= self.size:
                self._make_room(waiter.spec)  # when its place is free, growing is tried again
                return
            if self.total and not self._room(waiter.spec):
                self.counters["no memory to grow"] += 1
                return
            self._pending[waiter.spec] += 1  # it counts from now on, not from when its task first runs
            self._background.start(self._start_for(waiter.spec))

    def _make_room(self, spec: SandboxSpec) -> None:
        """Give up an idle box of another kind, unless one is on its way out already."""
        if self._dying:
            return
        for box in self._idle:
            if box.spec != spec:
                del self._idle[box]
                self._discard(box, "evicted")
                return

    def _schedule_shrinking(self) -> None:
        if self._shrinking is None and len(self._idle) > self.warm:
            oldest = next(iter(self._idle.values()))
            delay = max(0.0, oldest + IDLE_S - time.monotonic())
            self._shrinking = asyncio.get_running_loop().call_later(delay, self._shrink)

    def _shrink(self) -> None:
        self._shrinking = None
        for box, since in list(self._idle.items()):
            if len(self._idle) > self.warm and since + IDLE_S <= time.monotonic():
                del self._idle[box]
                self._discard(box, "shrunk")
        self._schedule_shrinking()

    async def _pending_start(self, spec: SandboxSpec) -> Box:
        """Start a box that already counts as pending."""
        try:
            return await self._start(spec)
        finally:
            self._pending[spec] -= 1

    async def _start(self, spec: SandboxSpec) -> Box:
        for attempt in range(_START_ATTEMPTS):
            begun = time.monotonic()
            try:
                box = await self._make(spec)
            except SandboxError:
                self.counters["failed starts"] += 1
                if attempt + 1 == _START_ATTEMPTS:
                    raise
            else:
                self.counters["started"] += 1
                self.phases.add("start", time.monotonic() - begun)
                box.connection.lost.add_done_callback(functools.partial(self._lost, box))
                return box
        raise AssertionError("unreachable")

    async def _start_for(self, spec: SandboxSpec) -> None:
        try:
            box = await self._pending_start(spec)
        except ForgeError as error:
            if waiter := next((waiter for waiter in self._waiting if waiter.spec == spec), None):
                self._waiting.remove(waiter)
                waiter.fail(error)
            self._grow()
        else:
            self._offer(box)

    async def _reset(self, box: Box) -> None:
        begun = time.monotonic()
        dirty: list[str] | None = None
        try:
            dirty = await box.reset()
        except SandboxError:
            pass  # it died, or does not answer
        finally:
            self._pending[box.spec] -= 1
        if box not in self._resetting:
            return  # closed meanwhile: whoever closed the pool destroys it
        self._resetting.discard(box)
        self.phases.add("reset", time.monotonic() - begun)
        if dirty is None:
            self._discard(box, "lost")
        elif dirty:
            self.last_dirt = dirty
            self._discard(box, "poisoned")
        elif box.uses >= self.max_uses:
            self._discard(box, "recycled")
        else:
            self._offer(box)

    def _lost(self, box: Box, _: asyncio.Future[None]) -> None:
        """An idle box died: forget it. A leased or resetting one is dealt with where it is used."""
        if self._idle.pop(box, None) is not None:
            self._discard(box, "lost")

    def _discard(self, box: Box, why: str) -> None:
        """Destroy a box; its place is free when it is gone."""
        if not self._closed:
            self.counters[why] += 1
        self._dying += 1
        self._background.start(self._destroy(box), whole=True)

    async def _destroy(self, box: Box) -> None:
        try:
            await box.destroy()
        finally:
            self._dying -= 1
            self._grow()
            if not self._closed and self.total < self.warm:
                self._pending[box.spec] += 1
                self._background.start(self._replace(box.spec))

    async def _replace(self, spec: SandboxSpec) -> None:
        """Keep the warm ones warm; a failure here shows again when somebody asks for a box."""
        try:
            self._offer(await self._pending_start(spec))
        except SandboxError:
            return


# --- how long things take


class Phases:
    """Durations by phase; percentiles over the last thousand of each."""

    def __init__(self) -> None:
        self._times: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_WINDOW))

    def add(self, phase: str, seconds: float) -> None:
        """Record one duration."""
        self._times[phase].append(seconds)

    def summary(self) -> dict[str, dict[str, float]]:
        """`{phase: {"p50_ms": ..., "p95_ms": ..., "n": ...}}`."""
        found = {}
        for phase, times in self._times.items():
            ordered = sorted(times)
            found[phase] = {
                "p50_ms": ordered[len(ordered) // 2] * 1e3,
                "p95_ms": ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))] * 1e3,
                "n": float(len(ordered)),
            }
        return found


# --- tasks that nobody awaits, but that somebody owns and can end


class Background:
    """A set of running tasks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], *, whole: bool = False) -> None:
        """Run `work`; with `whole`, `cancel` does not stop it."""
        task: asyncio.Future[None] = asyncio.get_running_loop().create_task(work)
        if whole:
            task = asyncio.ensure_future(to_its_end(task))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """Ask every task to stop."""
        for task in list(self._tasks):
            task.cancel()

    async def wait(self) -> None:
        """Wait until there is none, those that are started meanwhile included."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)  # their callbacks
