"""The window of requests in flight, against simulated endpoints in virtual time."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_env.policies.endpoint_limiter import AdaptiveLimiter
from forge_env.working_time import WorkingTime


def simulate(limiter: AdaptiveLimiter, latency: Callable[[int], float | None], requests: int) -> float:
    """Keep the window full of requests; `latency(in_flight)` is None where the endpoint refuses. Virtual seconds."""
    now, order = 0.0, 0
    running: list[tuple[float, int, float | None, int]] = []
    for _ in range(requests):
        while len(running) < limiter.size:
            took = latency(len(running) + 1)
            heapq.heappush(running, (now + (0.01 if took is None else took), order, took, limiter._epoch))
            order += 1
        limiter.in_flight = len(running)
        now, _, took, epoch = heapq.heappop(running)
        if took is None:
            limiter.overloaded(epoch)
        else:
            limiter.succeeded(epoch, took)
    return now


def test_it_grows_to_the_maximum_where_nothing_pushes_back() -> None:
    limiter = AdaptiveLimiter(start=4, maximum=300)
    simulate(limiter, lambda in_flight: 1.0, 2000)
    assert limiter.size == 300


def test_it_stays_near_what_is_allowed() -> None:
    limiter = AdaptiveLimiter(start=4, maximum=1000)
    sizes: list[int] = []
    limiter.on_change = lambda: sizes.append(limiter.size)
    simulate(limiter, lambda in_flight: 1.0 if in_flight <= 40 else None, 5000)
    late = sizes[len(sizes) // 2 :]
    assert min(late) >= 15
    assert max(late) <= 45


def test_it_does_not_queue_where_more_completes_no_more() -> None:
    limiter = AdaptiveLimiter(start=4, maximum=1000)
    simulate(limiter, lambda in_flight: max(1.0, in_flight / 32), 3000)  # 32 requests a second at most
    assert 24 <= limiter.size <= 80


@settings(max_examples=40)
@given(st.lists(st.tuples(st.booleans(), st.floats(0, 100)), max_size=80), st.integers(1, 64))
def test_the_window_stays_within_its_bounds(events: list[tuple[bool, float]], maximum: int) -> None:
    limiter = AdaptiveLimiter(start=16, maximum=maximum)
    for good, latency in events:
        limiter.in_flight = limiter.size
        if good:
            limiter.succeeded(limiter._epoch, latency)
        else:
            limiter.overloaded(limiter._epoch)
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
