"""Engines with a bounded pool of warm boxes, which replaces failed ones and grows as far as the machine allows.

    starting --ready--> idle <--> leased --release--> resetting --clean--> idle
        |                |          |                     |
        +-- failed       |          +------ lost ---------+-- dirty, worn out --> destroyed
                         +-- idle too long, or room for another spec needed ----> destroyed

Every box is in exactly one of these states, and there are never more than `size` boxes. Waiters are served in order of
arrival, with two exceptions. A tenant (an environment) with fewer leased boxes goes first. An episode that has already
had a box goes before episodes that have not begun: it needs the box to be judged, and its time limit is running.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

from forge_env.concurrency import to_its_end
from forge_env.errors import EnvironmentBugError, SandboxError, UsageError
from forge_env.machine import free_memory_gb, usable_cpus
from forge_env.sandbox import HOLDER, SANDBOXES_PER_CPU, TENANT, Sandbox, SandboxEngine, SandboxSpec, phase
from forge_env.working_time import waiting
from sandboxes.box import Box, BoxSandbox
from sandboxes.network import AllowList

logger = logging.getLogger(__name__)

MAX_SANDBOXES = 10_000
"""Upper bound of `concurrency`; a larger number is taken for a mistake."""
RESERVE_MB = 256
RUNNER_MB = 64
"""Memory of the runner itself (MiB), added to the program's `memory_mb`."""
SCRATCH_MB = 32
"""Size of each writable folder other than the work folders (MiB)."""
PIDS = 1024
"""Process limit of a box: `MAX_PROCESSES` for each of its two users, plus the runner's own."""
CPU_PERIOD_US = 100_000
MAX_USES = 5000
"""Default number of leases after which a box is replaced."""
_DEFAULT = SandboxSpec()
STUCK_S = 60.0
"""Seconds without a release after which a holder's wait for another box is checked for deadlock."""
IDLE_S = 60.0
"""Seconds after which an idle box is destroyed, unless it is one of the `warm` ones."""
_WINDOW = 1024
"""Number of recent durations of each phase for percentiles."""


@dataclass(eq=False)
class Waiter:
    """A pending `acquire` call for a box of `spec`."""

    spec: SandboxSpec
    tenant: str
    holder: object
    """The future holder of the box. Boxes with the same holder are released by the code that is now waiting."""
    box: asyncio.Future[Box]
    again: bool
    """Whether the holder, an episode, has had a box before."""

    def fail(self, error: Exception) -> None:
        """Make the pending call raise `error`."""
        if not self.box.done():
            self.box.set_exception(error)


class Pool:
    """Hands out clean boxes. For use from a single event loop.

    Args:
        make: starts a box and waits until it answers; raises `SandboxError`.
        size: most boxes alive at once.
        warm: boxes to keep while there is no demand.
        max_uses: leases after which a box is replaced.
        room: whether the machine has memory for one more box; asked before growing beyond the first.
        stuck_s: seconds after which a deadlocked wait raises an error.
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
        self._seconds: defaultdict[str, deque[float]] = defaultdict(partial(deque, maxlen=_WINDOW))  # by phase
        self.last_dirt: list[str] = []
        self._idle: dict[Box, float] = {}  # monotonic time since when it is idle
        self._leased: dict[Box, Waiter] = {}  # the call that got the box
        self._resetting: set[Box] = set()
        self._pending: Counter[SandboxSpec] = Counter()  # starting or resetting
        self._dying = 0
        self._waiting: list[Waiter] = []
        self._begun: WeakSet[object] = WeakSet()
        """Holders passed by callers that have had a box."""
        self._tasks: set[asyncio.Future[None]] = set()
        self._shrinking: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def total(self) -> int:
        """Number of boxes in any state, including those being destroyed."""
        return len(self._idle) + len(self._leased) + self._pending.total() + self._dying

    async def start(self, spec: SandboxSpec) -> None:
        """Start the warm boxes and wait for them. Raises the first error of a failed start."""
        self._pending[spec] += self.warm
        boxes = await asyncio.gather(*(self._start(spec) for _ in range(self.warm)), return_exceptions=True)
        for box in boxes:
            if isinstance(box, Box):
                self._offer(box)
        for box in boxes:
            if isinstance(box, BaseException):
                raise box

    async def acquire(self, spec: SandboxSpec, tenant: str = "", holder: object = None) -> Box:
        """Lease a clean box, waiting while none is available.

        `tenant` is the environment that it is for, `holder` what will release it; by default the running task.

        Raises:
            SandboxError: no box could be started.
            EnvironmentBugError: all holders of boxes are waiting for another one, so none will ever be released.
        """
        if self._closed:
            raise SandboxError("the sandbox engine is closed")
        started = time.monotonic()
        again = holder is not None and holder in self._begun
        holding = asyncio.current_task() if holder is None else holder
        waiter = Waiter(spec, tenant, holding, asyncio.get_running_loop().create_future(), again)
        box = None
        if not any(other.spec == spec for other in self._waiting):
            # most recently used first: its memory is warm, and the others may shrink away
            box = next((box for box in reversed(self._idle) if box.spec == spec and box.connection.alive), None)
        if box is None:
            self.counters["misses"] += 1
            box = await self._wait(waiter)
        else:
            self.counters["hits"] += 1
            del self._idle[box]
            self._leased[box] = waiter
        box.uses += 1
        if holder is not None:  # not for tasks: a task that acquires boxes for ever would never let another one begin
            self._begun.add(holder)
        self._seconds["acquire"].append(time.monotonic() - started)
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
                box = waiter.box.result()  # assigned at the moment of cancellation
                del self._leased[box]
                self._offer(box)
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            waiter.box.cancel()
            raise

    def _is_stuck(self, waiter: Waiter) -> bool:
        """Whether all holders of boxes, this waiter included, wait for another box, so that none will be released."""
        if self._idle or self._pending.total() or self._dying:
            return False
        waiting_too = {id(other.holder) for other in self._waiting}
        holders = {id(holding.holder) for holding in self._leased.values()}
        return id(waiter.holder) in holders and holders <= waiting_too

    def _how_stuck(self) -> EnvironmentBugError:
        held = Counter(holding.tenant or "a caller" for holding in self._leased.values())
        names = ", ".join(f"{name} ({count})" for name, count in held.items())
        return EnvironmentBugError(
            f"all {len(self._leased)} sandboxes are held by episodes that wait for a second one: {names}",
            fix="release the first before acquiring a second, as `fresh_sandbox` does, or raise sandbox.concurrency",
        )

    def release(self, box: Box) -> None:
        """Return a box. It is wiped and checked in the background, then offered again or replaced."""
        if self._leased.pop(box, None) is None:
            return
        self._releases += 1
        if self._closed or not box.connection.alive:
            self._discard(box, "lost")
        else:
            self._pending[box.spec] += 1
            self._resetting.add(box)
            self._run(self._reset(box))

    async def close(self) -> None:
        """Destroy all boxes and fail all waiters."""
        self._closed = True
        if self._shrinking is not None:
            self._shrinking.cancel()
        for waiter in self._waiting:
            waiter.fail(SandboxError("the sandbox engine was closed"))
        self._waiting.clear()
        for task in list(self._tasks):
            task.cancel()
        boxes = [*self._idle, *self._leased, *self._resetting]
        self._idle.clear()
        self._leased.clear()
        self._resetting.clear()
        await asyncio.gather(*(box.destroy() for box in boxes), return_exceptions=True)
        while self._tasks:  # cancelled starts and resets still destroy their boxes
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)  # let their callbacks run

    def stats(self) -> dict[str, Any]:
        """Counters, boxes in each state, hit rate, and percentiles of the phases."""
        requests = self.counters["hits"] + self.counters["misses"]
        return {
            "idle": len(self._idle),
            "leased": len(self._leased),
            "pending": self._pending.total(),
            "waiting": len(self._waiting),
            "size": self.size,
            "hit_rate": self.counters["hits"] / requests if requests else 1.0,
            "dirt": self.last_dirt,
            "phases": {phase: _percentiles(times) for phase, times in self._seconds.items()},
            **self.counters,
        }

    def _offer(self, box: Box) -> None:
        """Give a clean box to the next waiter for its spec, or keep it idle."""
        if self._closed or not box.connection.alive:
            self._discard(box, "lost")
            return
        if waiters := [waiter for waiter in self._waiting if waiter.spec == box.spec and not waiter.box.done()]:
            held = Counter(holding.tenant for holding in self._leased.values())
            waiter = min(waiters, key=lambda waiter: held[waiter.tenant])  # the earliest among equals
            self._waiting.remove(waiter)
            self._leased[box] = waiter
            waiter.box.set_result(box)
            return
        self._idle[box] = time.monotonic()
        self._grow()  # a waiter for another spec may now evict this box
        self._schedule_shrinking()

    def _grow(self) -> None:
        """Start boxes for waiters, as far as `size` and the machine's memory allow."""
        if self._closed:
            return
        coming = self._pending.copy()
        for waiter in self._waiting:
            if coming[waiter.spec] > 0:
                coming[waiter.spec] -= 1
                continue
            if self.total >= self.size:
                self._make_room(waiter.spec)  # `_destroy` calls this method again when the box is gone
                return
            if self.total and not self._room(waiter.spec):
                self.counters["no memory to grow"] += 1
                return
            self._pending[waiter.spec] += 1  # counted now, before its task first runs
            self._run(self._start_for(waiter.spec))

    def _make_room(self, spec: SandboxSpec) -> None:
        """Evict an idle box of another spec, unless a box is already being destroyed."""
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

    async def _start(self, spec: SandboxSpec) -> Box:
        """Start a box that already counts as pending; try twice."""
        try:
            begun = time.monotonic()
            try:
                box = await self._make(spec)
            except SandboxError:
                self.counters["failed starts"] += 1
                begun = time.monotonic()
                box = await self._make(spec)
        except SandboxError:
            self.counters["failed starts"] += 1
            raise
        finally:
            self._pending[spec] -= 1
        self.counters["started"] += 1
        self._seconds["start"].append(time.monotonic() - begun)
        box.connection.lost.add_done_callback(partial(self._lost, box))
        return box

    async def _start_for(self, spec: SandboxSpec) -> None:
        """Start a box for a waiter or to keep warm. If that fails, the first waiter for this spec gets the error."""
        try:
            box = await self._start(spec)
        except Exception as error:  # noqa: BLE001  after a bug of an engine, too, the caller must not wait
            if waiter := next((waiter for waiter in self._waiting if waiter.spec == spec), None):
                self._waiting.remove(waiter)
                waiter.fail(error)
            else:
                logger.warning("A spare sandbox could not be started: %r", error)
            self._grow()
        else:
            self._offer(box)

    async def _reset(self, box: Box) -> None:
        begun = time.monotonic()
        dirty: list[str] | None = None
        try:
            dirty = await box.reset()
        except SandboxError:
            pass  # the box died or does not answer
        finally:
            self._pending[box.spec] -= 1
        if box not in self._resetting:
            return  # the pool was closed meanwhile, and `close` destroys the box
        self._resetting.discard(box)
        self._seconds["reset"].append(time.monotonic() - begun)
        if dirty is None:
            self._discard(box, "lost")
        elif dirty:
            self.last_dirt = dirty
            self._discard(box, "poisoned")
        elif box.uses >= self.max_uses:
            self._discard(box, "recycled")
        else:
            self._offer(box)

    def _run(self, work: Coroutine[Any, Any, None], *, whole: bool = False) -> None:
        """Run `work` in the background. With `whole`, `close` does not cancel it."""
        task: asyncio.Future[None] = asyncio.get_running_loop().create_task(work)
        if whole:
            task = asyncio.ensure_future(to_its_end(task))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _lost(self, box: Box, _: asyncio.Future[None]) -> None:
        """Discard an idle box whose runner died. Leased and resetting boxes are handled by their users."""
        if self._idle.pop(box, None) is not None:
            self._discard(box, "lost")

    def _discard(self, box: Box, why: str) -> None:
        """Destroy a box in the background. It counts towards `size` until it is gone."""
        if not self._closed:
            self.counters[why] += 1
        self._dying += 1
        self._run(self._destroy(box), whole=True)

    async def _destroy(self, box: Box) -> None:
        try:
            await box.destroy()
        finally:
            self._dying -= 1
            self._grow()
            if not self._closed and self.total < self.warm:
                self._pending[box.spec] += 1
                self._run(self._start_for(box.spec))


def _percentiles(seconds: Iterable[float]) -> dict[str, float]:
    """Median, 95th percentile (ms) and number of durations."""
    ordered = sorted(seconds)
    return {
        "p50_ms": ordered[len(ordered) // 2] * 1e3,
        "p95_ms": ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))] * 1e3,
        "n": float(len(ordered)),
    }


# --- engines


class PooledEngine(SandboxEngine):
    """A `SandboxEngine` whose sandboxes are boxes in a pool.

    Args:
        concurrency: most sandboxes alive at once; by default four per CPU.
        warm: sandboxes to start ahead; by default one per CPU.
        max_uses: leases after which a box is replaced by a new one.
    """

    def __init__(self, *, concurrency: int | None = None, warm: int | None = None, max_uses: int = MAX_USES) -> None:
        cpus = usable_cpus()
        size = SANDBOXES_PER_CPU * cpus if concurrency is None else concurrency
        if not 1 <= size <= MAX_SANDBOXES:
            raise UsageError(f"concurrency={size} is out of range", fix=f"use 1 to {MAX_SANDBOXES}")
        self.concurrency = size
        self.warm = min(size, cpus if warm is None else warm)
        self._max_uses = max_uses
        self._pool: Pool | None = None
        self._checked: set[SandboxSpec] = set()

    @abstractmethod
    async def _prepare(self) -> None:
        """Build missing images and files, and remove the leftovers of dead owners."""

    @abstractmethod
    async def _make_box(self, spec: SandboxSpec) -> Box:
        """Start one box and wait until its runner is ready. Raises `SandboxError`."""

    def check(self, spec: SandboxSpec) -> None:  # noqa: D102
        AllowList.of(spec)

    async def start(self) -> None:  # noqa: D102
        if self._pool is not None:
            return
        await self._prepare()
        pool = Pool(self._make_box, size=self.concurrency, warm=self.warm, max_uses=self._max_uses, room=self._has_room)
        self._pool = pool
        try:
            await pool.start(SandboxSpec())
        except BaseException:  # also when cancelled: boxes that were started must be destroyed
            await self.close()
            raise

    async def acquire(self, spec: SandboxSpec | None = None) -> Sandbox:  # noqa: D102
        if self._pool is None:
            raise SandboxError("the sandbox engine was not started", fix="use it as 'async with engine:'")
        spec = spec or _DEFAULT
        if spec not in self._checked:
            self.check(spec)
            self._checked.add(spec)
        with phase("wait for one"):
            return BoxSandbox(await self._pool.acquire(spec, TENANT.get(), HOLDER.get()))

    async def release(self, sandbox: Sandbox) -> None:  # noqa: D102
        if not isinstance(sandbox, BoxSandbox):
            raise UsageError("this sandbox belongs to another engine")
        box, sandbox.box = sandbox.box, None
        if box is not None and self._pool is not None:
            self._pool.release(box)

    async def close(self) -> None:  # noqa: D102
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    def stats(self) -> dict[str, Any]:  # noqa: D102
        return {"engine": self.name, **(self._pool.stats() if self._pool else {})}

    @property
    def _alive(self) -> int:
        """Number of sandboxes alive."""
        return self._pool.total if self._pool else 0

    def _has_room(self, spec: SandboxSpec) -> bool:
        """Whether the machine would have memory to spare if this sandbox used its whole limit."""
        return free_memory_gb() * 1024 > spec.memory_mb + RESERVE_MB


class RemoteEngine(PooledEngine):
    """A `PooledEngine` whose boxes run elsewhere, from images or templates there."""

    instead_of_allow = "use network=True, or the docker engine"
    """What to do without a filtering proxy, for error messages."""

    def _has_room(self, spec: SandboxSpec) -> bool:
        return True  # the other side decides

    def check(self, spec: SandboxSpec) -> None:  # noqa: D102
        super().check(spec)
        if spec.proxied:
            raise UsageError(f"the {self.name} engine does not support 'allow' or 'origin'", fix=self.instead_of_allow)
        if spec.packages:
            fix = "name an image that has them"
            raise UsageError(f"the {self.name} engine installs no packages ({', '.join(spec.packages)})", fix=fix)
        if spec.writable:
            fix = "use the docker engine"
            raise UsageError(f"the {self.name} engine has no writable folders ({', '.join(spec.writable)})", fix=fix)
        if spec.image.startswith(("/", "./", "../", "~")):
            raise UsageError(
                f"the {self.name} engine builds no images ({spec.image})", fix="name one that exists there"
            )
