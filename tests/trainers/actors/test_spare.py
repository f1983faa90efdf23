"""A replica that dies takes the processes that wait for it, where they are of use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest

pytest.importorskip("monarch")

from tests.trainers.actors.counter import Counter
from tests.trainers.actors.signals import kill
from trainers.actors.service import Service
from trainers.actors.spare import Spare

pytestmark = [pytest.mark.stack, pytest.mark.slow]
PATIENCE_S = 60.0


def import_fractions() -> None:
    import fractions  # noqa: F401


def fail() -> None:
    raise ValueError("nothing can be got ready")


@asynccontextmanager
async def counter(spare: Spare, replicas: int = 1) -> AsyncIterator[Service]:
    """A service, and its spare."""
    before = set(psutil.Process().children())
    service = await Counter.options(num_replicas=replicas, spare=spare).as_service()
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield service
    finally:
        await service.stop()
    _, left = await asyncio.to_thread(psutil.wait_procs, set(psutil.Process().children()) - before, 10)
    assert not left


async def replaced(service: Service) -> int:
    """The process after the one that there was; that is killed."""
    pid, _ = await service.where.route()
    kill(pid)
    new, _ = await service.where.route()
    assert new != pid
    return int(new)


async def test_a_replica_that_dies_becomes_the_spare_and_the_next_is_prepared() -> None:
    spare = Spare(import_fractions, first_after_s=0)
    async with counter(spare) as service:
        for _ in range(2):
            await spare.ready.wait()
            waiting = spare.pids
            assert [await replaced(service)] == waiting


async def test_of_two_that_die_together_one_becomes_the_spare() -> None:
    spare = Spare(import_fractions, first_after_s=0)
    async with counter(spare, replicas=2) as service:
        await spare.ready.wait()
        waiting = spare.pids
        before = {pid for pid, _ in await service.where.fanout()}
        for pid in before:
            kill(pid)
        while len(after := {pid for pid, _ in await service.where.fanout()} - before) < 2:  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.05)
        assert set(waiting) < after


async def test_a_dead_spare_is_no_loss() -> None:
    spare = Spare(import_fractions, first_after_s=0)
    async with counter(spare) as service:
        await spare.ready.wait()
        [waiting] = spare.pids
        kill(waiting)
        assert await replaced(service) != waiting
        await spare.ready.wait()
        assert [await replaced(service)] == spare.pids, "there is another"


async def test_a_spare_that_can_not_get_ready_is_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trainers.actors.spare")
    spare = Spare(fail, first_after_s=0)
    async with counter(spare) as service:
        assert spare._work is not None
        await spare._work
        await replaced(service)
        assert not spare.ready.is_set()
    failures = [record for record in caplog.records if "nothing can be got ready" in record.message]
    assert failures
    assert failures[0].exc_info, "the log has where it failed"
