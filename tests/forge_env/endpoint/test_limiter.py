"""The window of requests in flight, against simulated endpoints in virtual time."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forge_env as fe
from forge_env.endpoint.limiter import AdaptiveLimiter
from forge_env.endpoint.policy import EndpointOptions, EndpointPolicy
from forge_env.policy import PolicySession, Reply
from forge_env.working_time import WorkingTime
from tests.forge_env.evaluation.toys import Sums
from tests.trainers.buffer.virtual_time import run

LATENCIES: dict[str, Callable[[random.Random], float]] = {
    "constant": lambda rng: 5.0,
    "uniform": lambda rng: rng.uniform(3, 7),
    "lognormal": lambda rng: 5 * rng.lognormvariate(-0.5, 1),
}


@dataclass
class Played:
    """What the limiter did, answer by answer."""

    windows: list[int] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)
    refused: int = 0


class Simulation:
    """Samples of one request each: a reset, then the request. As many are under way as the window has places.

    Args:
        latency: seconds of an answer.
        reset: seconds before each request.
        servers: requests that are answered at once, by how many answers there have been; others queue.
        allowed: requests in flight beyond which the endpoint refuses, likewise.
    """

    def __init__(
        self,
        latency: Callable[[random.Random], float],
        *,
        reset: float = 0.0,
        servers: Callable[[int], int] = lambda answered: 10**6,
        allowed: Callable[[int], int] = lambda answered: 10**6,
        seed: int = 0,
        start: int = 16,
        maximum: int = 256,
    ) -> None:
        self.latency, self.reset, self.servers, self.allowed = latency, reset, servers, allowed
        self.rng = random.Random(seed)
        self.played = Played()
        self.limiter = AdaptiveLimiter(start=start, maximum=maximum, clock=asyncio.get_running_loop().time)
        self.changed = asyncio.Event()
        self.limiter.on_change = self.changed.set
        self.queue: deque[asyncio.Future[None]] = deque()
        self.under_way = self.served = 0

    async def until(self, answers: int) -> Played:
        """Play until there have been so many."""
        tasks: set[asyncio.Task[None]] = set()
        while len(self.played.windows) < answers:
            if self.under_way < self.limiter.size:
                self.under_way += 1
                tasks.add(asyncio.create_task(self._sample()))
                continue
            self.limiter.press()
            self.changed.clear()
            await self.changed.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return self.played

    async def _sample(self) -> None:
        await asyncio.sleep(self.reset)
        if not await self._ask():
            await self._sample()
            return
        self.under_way -= 1
        self.changed.set()

    async def _ask(self) -> bool:
        played, limiter = self.played, self.limiter
        async with limiter.slot() as begun:
            if limiter.in_flight > self.allowed(len(played.windows)):
                played.refused += 1
                await asyncio.sleep(0.01)
                limiter.overloaded(begun)
                return False
            if self.served < self.servers(len(played.windows)):
                self.served += 1
            else:
                turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self.queue.append(turn)
                await turn
            await asyncio.sleep(self.latency(self.rng))
            limiter.succeeded(begun)
            self.served -= 1
            played.windows.append(limiter.size)
            played.in_flight.append(limiter.in_flight)
            self._serve()
        return True

    def _serve(self) -> None:
        while self.queue and self.served < self.servers(len(self.played.windows)):
            self.served += 1
            self.queue.popleft().set_result(None)


def simulate(answers: int, latency: str, **options: object) -> Played:
    async def play() -> Played:
        return await Simulation(LATENCIES[latency], **options).until(answers)

    return run(play())


def seeded(seeds: int) -> pytest.MarkDecorator:
    """Each kind of latency with so many seeds, of which the first is quick; a constant one draws nothing."""
    cases = [
        pytest.param(latency, seed, marks=[pytest.mark.slow] if seed else [])
        for latency in LATENCIES
        for seed in range(1 if latency == "constant" else seeds)
    ]
    return pytest.mark.parametrize(("latency", "seed"), cases)


RESETS = pytest.mark.parametrize("reset", [0.0, pytest.param(0.2, marks=pytest.mark.slow), 1.0])


@seeded(3)
@RESETS
def test_it_grows_to_the_maximum_where_nothing_pushes_back(reset: float, latency: str, seed: int) -> None:
    """However long samples reset before they ask, and however much latencies vary; and it stays there."""
    windows = simulate(1500, latency, reset=reset, seed=seed).windows
    assert next(number for number, window in enumerate(windows) if window >= 240) < 700
    assert statistics.quantiles(windows[700:], n=20)[0] >= 200


@seeded(2)
@RESETS
def test_it_does_not_queue_where_more_completes_no_more(reset: float, latency: str, seed: int) -> None:
    in_flight = simulate(3000, latency, reset=reset, seed=seed, servers=lambda answered: 32).in_flight[1000:]
    assert 22 <= statistics.median(in_flight) <= 80
    assert statistics.quantiles(in_flight, n=20)[-1] <= 180


@pytest.mark.parametrize("latency", LATENCIES)
def test_capacity_that_comes_later_is_found(latency: str) -> None:
    windows = simulate(3500, latency, servers=lambda answered: 32 if answered < 1500 else 10**6).windows
    assert max(windows[1000:1500]) < 256
    assert next(number for number, window in enumerate(windows[1500:]) if window >= 240) < 1200


@pytest.mark.parametrize("latency", LATENCIES)
@pytest.mark.parametrize("reset", [0.0, 1.0])
def test_it_stays_near_what_is_allowed(reset: float, latency: str) -> None:
    played = simulate(2500, latency, reset=reset, allowed=lambda answered: 40)
    assert min(played.windows[500:]) >= 10
    assert max(played.windows[500:]) <= 70
    assert played.refused <= 60


def test_it_doubles_again_after_a_storm_of_refusals() -> None:
    played = simulate(1500, "uniform", allowed=lambda answered: 4 if answered < 40 else 10**6)
    assert min(played.windows) <= 4
    assert max(played.windows) == 256


def test_a_window_that_nobody_waits_for_does_not_grow() -> None:
    async def play() -> int:
        limiter = AdaptiveLimiter(start=4, maximum=300)
        for _ in range(200):
            async with limiter.slot() as begun:
                limiter.succeeded(begun)
        return limiter.size

    assert run(play()) == 4


def test_a_refusal_halves_the_window_once_a_round() -> None:
    limiter = AdaptiveLimiter(start=64, maximum=300)
    begun = [limiter.begin() for _ in range(10)]
    for request in begun:
        limiter.overloaded(request)
    assert limiter.size == 32


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 100)), max_size=80), st.integers(1, 64))
def test_the_window_stays_within_its_bounds(events: list[tuple[bool, float]], maximum: int) -> None:
    now = 0.0
    limiter = AdaptiveLimiter(start=16, maximum=maximum, clock=lambda: now)
    for good, latency in events:
        limiter.press()
        begun = limiter.begin()
        now += latency
        if good:
            limiter.succeeded(begun)
        else:
            limiter.overloaded(begun)
        assert 1 <= limiter.size <= maximum


async def test_waiting_for_a_place_is_no_working_time() -> None:
    limiter = AdaptiveLimiter(start=1, maximum=1)
    held, release = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with limiter.slot():
            held.set()
            await release.wait()

    holder = asyncio.create_task(hold())
    await held.wait()
    asyncio.get_running_loop().call_later(0.05, release.set)
    async with WorkingTime(0.02) as working, limiter.slot():
        pass
    await holder
    assert not working.expired
    assert working.waited_s > 0.02


async def test_working_time_runs_out() -> None:
    with pytest.raises(TimeoutError):
        async with WorkingTime(0.01) as working:
            await asyncio.Event().wait()
    assert working.expired


class Slow(Sums):
    def num_tasks(self, split: str) -> int | None:
        return 1000

    async def setup(self, task: fe.Task) -> None:
        await asyncio.sleep(0.2)


class Patient(EndpointPolicy, PolicySession):
    """Answers everything after half a second, however much is asked at once."""

    def __init__(self) -> None:
        super().__init__(EndpointOptions(model="m", base_url="http://127.0.0.1:9/v1"))
        self.limiter = AdaptiveLimiter(clock=asyncio.get_running_loop().time)

    def session(self, tools: list[fe.ToolSpec], *, seed: int | None = None) -> Any:
        return self

    async def reply(self, observation: list[fe.Message]) -> Reply:
        async with self.limiter.slot() as begun:
            await asyncio.sleep(0.5)
            self.limiter.succeeded(begun)
        return Reply(message=fe.Message(role="assistant", content="1"))


@pytest.mark.slow
def test_a_run_whose_samples_reset_before_they_ask_fills_the_endpoint(tmp_path: Path) -> None:
    async def play() -> tuple[int, int]:
        policy = Patient()
        result = await fe.evaluate_async(Slow, policy, num_tasks=1000, out=tmp_path / "out")
        return result.summary.environments["Slow"].samples, policy.limiter.size

    samples, window = run(play())
    assert samples == 1000
    assert window >= 240
