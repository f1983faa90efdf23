"""The end of a process that nobody asked to end."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest

pytest.importorskip("monarch")

import monarch.actor

from forge_env.errors import ForgeError
from trainers.actors.faults import expect_ends, unless_a_process_dies
from trainers.buffer.types import BufferSettings
from trainers.loop.stack import prepare_controller


async def test_work_goes_on_as_it_would() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    assert await unless_a_process_dies(work()) == 7


async def test_its_failure_is_its_own() -> None:
    async def work() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await unless_a_process_dies(work())


async def test_a_cancelled_caller_ends_the_work() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.ensure_future(unless_a_process_dies(work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


class Failure:
    """What Monarch tells of a process."""

    mesh_name = "generator0-1abc"

    def report(self) -> str:
        return "a supervision event\ncleanup error: deadline has elapsed"


async def told(before: bool) -> str:
    """How work ends that Monarch tells of a process's end, before or after processes are ended on purpose."""

    async def work() -> str:
        if not before:
            expect_ends()
        await asyncio.to_thread(monarch.actor.unhandled_fault_hook, Failure())
        await asyncio.sleep(0)
        if before:
            expect_ends()
        return "stopped in order"

    return await unless_a_process_dies(work())


async def test_the_end_of_a_process_that_is_ended_on_purpose_is_no_failure() -> None:
    """Also where it takes so long that Monarch complains of it."""
    assert await told(before=False) == "stopped in order"
    with pytest.raises(ForgeError, match="generator0 ended: cleanup error"):
        await told(before=True)


@pytest.mark.slow
@pytest.mark.stack
@pytest.mark.parametrize("asking", [True, False], ids=["in a call", "between calls"])
async def test_a_killed_process_is_named(asking: bool) -> None:
    prepare_controller()
    from trainers.buffer.actor import ReplayBuffer

    settings = BufferSettings(per_step=1, max_off_policy_steps=0)

    async def work() -> None:
        actor = await ReplayBuffer.options(mesh_name="buffer").as_actor(settings)
        before = {process.pid for process in psutil.Process().children(recursive=True)}
        pids.extend(before - earlier)
        call = actor.sample.call_one(0) if asking else asyncio.Event().wait()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await call

    pids: list[int] = []
    earlier = {process.pid for process in psutil.Process().children(recursive=True)}
    with pytest.raises(ForgeError, match="the process of buffer was killed by signal 9") as caught:
        await unless_a_process_dies(work())
    assert pids
    assert "--resume" in str(caught.value.fix)
