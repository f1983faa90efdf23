"""What episodes of one event loop share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from forge_env.sharing import Shared

EVENTS: list[str] = []
CLOSED = asyncio.Semaphore(0)


@asynccontextmanager
async def opened(key: str) -> AsyncIterator[str]:
    if key == "broken":
        raise OSError("no such thing")
    EVENTS.append(f"open {key}")
    try:
        yield key
    finally:
        EVENTS.append(f"close {key}")
        CLOSED.release()


@pytest.fixture(autouse=True)
def _none() -> None:
    global CLOSED
    EVENTS.clear()
    CLOSED = asyncio.Semaphore(0)


async def test_it_is_made_once_and_ends_after_the_last() -> None:
    shared = Shared(opened, linger_s=0)
    async with shared.use("a") as one, shared.use("a") as two, shared.use("b"):
        assert one is two
    await CLOSED.acquire()
    await CLOSED.acquire()
    assert sorted(EVENTS) == ["close a", "close b", "open a", "open b"]
    async with shared.use("a"):
        assert EVENTS[4:] == ["open a"]


async def test_it_is_kept_for_the_next_and_may_be_forgotten() -> None:
    shared = Shared(opened)
    for _ in range(2):
        async with shared.use("a"):
            pass
    assert EVENTS == ["open a"]
    shared.forget("a")
    async with shared.use("a"):
        await CLOSED.acquire()
    assert sorted(EVENTS) == ["close a", "open a", "open a"]


async def test_a_failure_is_raised_and_tried_again() -> None:
    shared = Shared(opened)
    for _ in range(2):
        with pytest.raises(OSError, match="no such thing"):
            async with shared.use("broken"):
                pass


def test_what_is_open_when_the_loop_ends_is_closed() -> None:
    shared = Shared(opened)

    async def use() -> None:
        async with shared.use("a"):
            pass

    asyncio.run(use())
    asyncio.run(use())  # another loop has one of its own
    assert EVENTS == ["open a", "close a"] * 2
