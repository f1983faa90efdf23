"""Generators on simulated time: engines that decode many sequences at once, and load new weights in between."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

from forge_env.run.account import Account
from trainers.actors.router import Router
from trainers.rehearsal.timing import Timing

ROUNDING = 1e-6
"""Tokens by which a sequence may fall short of its length through rounding."""


class Processors:
    """Processors of a host that trainer and generators share: with more busy threads than processors, all are slower.

    Args:
        count: processors; None: every actor has a device of its own.
    """

    def __init__(self, count: int | None) -> None:
        self._count = count
        self._busy: dict[object, int] = {}
        self.watchers: list[Callable[[], None]] = []
        """Called before the speed changes."""

    @property
    def speed(self) -> float:
        """Speed of every thread, as a share of that of a thread with a processor of its own."""
        busy = sum(self._busy.values())
        return 1.0 if self._count is None or busy <= self._count else self._count / busy

    def use(self, who: object, threads: int) -> None:
        """Set the number of busy threads of an actor."""
        if self._count is None or self._busy.get(who, 0) == threads:
            return
        for watcher in self.watchers:
            watcher()
        self._busy[who] = threads

    async def run(self, seconds: float, threads: int) -> None:
        """Take the time of work that lasts `seconds` at full speed."""
        who, changed = object(), asyncio.Event()
        loop, left = asyncio.get_running_loop(), seconds
        self.use(who, threads)
        self.watchers.append(changed.set)
        try:
            while left > 0:
                changed.clear()
                began, speed = loop.time(), self.speed
                await _either(changed, left / speed)
                left -= (loop.time() - began) * speed
                if not changed.is_set():
                    return
        finally:
            self.watchers.remove(changed.set)
            self.use(who, 0)


async def _either(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, at most for some time."""
    waking = asyncio.get_running_loop().call_later(seconds, event.set)
    when = waking.when()
    await event.wait()
    waking.cancel()
    if asyncio.get_running_loop().time() >= when:
        event.clear()


@dataclass(order=True, slots=True)
class _Sequence:
    """A sequence in an engine: the engine's count of tokens at which it is done."""

    due: float
    number: int
    done: asyncio.Future[None]


@dataclass(slots=True)
class _Request:
    """A request: seconds of its prompt, tokens to sample, when it came, its end, and the version it starts with."""

    prefill_s: float
    tokens: int
    came: float
    done: asyncio.Future[None]
    version: int = 0


class Engine:
    """An engine: a batch of sequences that grow by one token in each step, and a queue.

    Args:
        timing: durations.
        processors: shared with the trainer.
        account: time account of the generators.
    """

    def __init__(self, timing: Timing, processors: Processors, name: str) -> None:
        self._timing = timing
        self._processors = processors
        self._threads = timing.forecast.config.generator.threads
        self._active: list[_Sequence] = []
        self._queue: deque[_Request] = deque()
        self._tokens = 0.0
        """Tokens that a sequence has grown by if it was in the batch from the beginning."""
        self._debt = 0.0
        """Seconds of prompts that are not computed yet."""
        self._numbers = itertools.count()
        self._changed, self._awake = asyncio.Event(), asyncio.Event()
        self._awake.set()
        self._pause = asyncio.Lock()
        self.account = Account(name, "wait for requests", clock=asyncio.get_running_loop().time)
        self.version = self.holders = 0
        self.queued_s = self.sampled = 0.0
        """Seconds that sequences waited in the queue, and sampled tokens."""
        processors.watchers.append(self._changed.set)

    async def generate(self, prompt: int, tokens: int) -> int:
        """Sample `tokens` tokens after a prompt; return the version of the first."""
        loop = asyncio.get_running_loop()
        request = _Request(prompt * self._timing.prefill_s, tokens, loop.time(), loop.create_future())
        self._queue.append(request)
        self._changed.set()
        await request.done
        self.sampled += tokens
        return request.version

    async def run(self) -> None:
        """Step while there are sequences, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._awake.wait()
            self._admit()
            if not self._active:
                self._processors.use(self, 0)
                self.account.enter("wait for requests")
                self._changed.clear()
                await self._changed.wait()
                continue
            self._processors.use(self, self._threads)
            self.account.enter("generate")
            step = self._timing.decode_s(len(self._active)) / self._processors.speed
            self._changed.clear()
            began = loop.time()
            await _either(self._changed, self._debt + max(0.0, self._active[0].due - self._tokens) * step)
            self._advance(loop.time() - began, step)

    def _admit(self) -> None:
        while self._queue and len(self._active) < self._timing.capacity:
            request = self._queue.popleft()
            request.version = self.version
            self.queued_s += asyncio.get_running_loop().time() - request.came
            self._debt += request.prefill_s * self._timing.generation
            heapq.heappush(self._active, _Sequence(self._tokens + request.tokens, next(self._numbers), request.done))

    def _advance(self, seconds: float, step: float) -> None:
        paid = min(self._debt, seconds)
        self._debt -= paid
        self._tokens += (seconds - paid) / step
        while self._active and self._active[0].due <= self._tokens + ROUNDING:
            done = heapq.heappop(self._active).done
            if not done.done():
                done.set_result(None)

    async def load(self, version: int) -> None:
        """Load the weights of a version between two steps."""
        async with self._pause:
            with self._stopped("load weights"):
                await asyncio.sleep(self._timing.load_s)
            self.version = version

    @contextmanager
    def _stopped(self, doing: str) -> Iterator[None]:
        self._awake.clear()
        self._changed.set()
        with self.account.during(doing):
            self._processors.use(self, 0)
            yield
        self._awake.set()

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """Context in which the engine computes nothing."""
        async with self._pause:
            with self._stopped("wait for the trainer"):
                yield


class Engines:
    """All generators: routing of requests, and new weights.

    Args:
        timing: durations.
        processors: shared with the trainer.
    """

    def __init__(self, timing: Timing, processors: Processors) -> None:
        section = timing.forecast.config.generator
        self._timing = timing
        self.each = [Engine(timing, processors, f"generator{n}") for n in range(section.num_replicas)]
        self._router = Router(len(self.each), max(1, section.max_num_seqs // 8))  # as in `GeneratorClient`
        self._free = asyncio.Condition()

    async def generate(
        self, prompt: int, tokens: int, *, session: object, prefix: Hashable = None, held: Engine | None = None
    ) -> int:
        """Sample tokens in the engine that the router chooses, or in a held one; return the version of the first."""
        if held is not None:
            return await held.generate(prompt, tokens)
        serving = [number for number, engine in enumerate(self.each) if not engine.holders]
        number = self._router.choose(serving or range(len(self.each)), session, prefix)
        try:
            return await self.each[number].generate(prompt, tokens)
        finally:
            self._router.done(number)

    async def update_weights(self, version: int, published: object) -> dict[str, float]:
        """Load new weights into all engines that are not held; wait while every engine is."""
        async with self._free:
            await self._free.wait_for(lambda: any(not engine.holders for engine in self.each))
        free = [engine for engine in self.each if not engine.holders]
        await asyncio.sleep(self._timing.pull_s)
        await asyncio.gather(*(engine.load(version) for engine in free))
        return {}

    @asynccontextmanager
    async def held(self) -> AsyncIterator[Engine]:
        """Context that holds the newest weights in one engine (`evaluation.pinned`)."""
        engine = max(self.each, key=lambda each: (each.holders, each.version))
        engine.holders += 1
        try:
            yield engine
        finally:
            newest = max(each.version for each in self.each)
            if engine.holders == 1 and engine.version < newest:
                await asyncio.sleep(self._timing.pull_s)
                await engine.load(newest)
            engine.holders -= 1
            async with self._free:
                self._free.notify_all()

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """Context in which all engines have freed their memory (`generator.sleep`)."""
        async with AsyncExitStack() as stack:
            for engine in self.each:
                await stack.enter_async_context(engine.asleep())
            await asyncio.sleep(self._timing.sleep_s / 2)
            yield
            await asyncio.sleep(self._timing.sleep_s / 2)

    def shares(self) -> dict[str, float]:
        """Seconds of all engines by activity."""
        total: dict[str, float] = {}
        for engine in self.each:
            for doing, seconds in engine.account.seconds().items():
                total[doing] = total.get(doing, 0.0) + seconds
        return total
