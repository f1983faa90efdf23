"""Calls whose callers stop waiting."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from tests.trainers.buffer import virtual_time
from trainers.actors.remote import Calls, withdrawn_when_cancelled


def test_a_cancelled_call_has_ended_on_the_other_side() -> None:
    async def play() -> list[str]:
        there, log = Calls(), []

        async def work() -> str:
            try:
                await asyncio.Event().wait()
            finally:
                log.append("ended there")
            return ""

        async def withdraw(name: str) -> None:
            there.withdraw(name)

        call = asyncio.create_task(withdrawn_when_cancelled(lambda name: there.until_withdrawn(name, work()), withdraw))
        await asyncio.sleep(0.1)
        call.cancel()
        await asyncio.wait([call])
        log.append("ended here")
        return log

    assert virtual_time.run(play()) == ["ended there", "ended here"]


@pytest.mark.parametrize("hears", [True, False])
def test_whoever_is_held_up_is_waited_for_no_longer_than_said(hears: bool) -> None:
    async def never(name: str) -> None:
        await asyncio.Event().wait()

    async def heard(name: str) -> None:
        return None

    async def play() -> float:
        withdraw = heard if hears else never
        call = asyncio.create_task(withdrawn_when_cancelled(never, withdraw, patience_s=30.0))
        await asyncio.sleep(1.0)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        return asyncio.get_running_loop().time()

    assert virtual_time.run(play()) == pytest.approx(31.0)


def test_a_call_that_fails_when_nobody_waits_any_more_is_no_news() -> None:
    """Its caller is cancelled once more while it withdraws the call from a process that dies just then."""
    told: list[dict[str, Any]] = []

    async def play() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        dies = asyncio.Event()

        async def fails(name: str) -> None:
            try:
                await dies.wait()
            finally:
                raise RuntimeError("its process was killed")

        async def never(name: str) -> None:
            await asyncio.Event().wait()

        call = asyncio.create_task(withdrawn_when_cancelled(fails, never))
        for _ in range(2):
            await asyncio.sleep(0.1)
            call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        dies.set()
        await asyncio.sleep(0.1)

    virtual_time.run(play())
    gc.collect()
    assert not told
