"""What the replay buffer promises its callers, in this process and as an actor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import numpy as np
import pytest

from forge_env.errors import UsageError
from forge_env.trajectory import Segment
from tests.trainers.buffer.buffer_model import FakeGroup
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.types import BufferSettings, Outcome, Ticket

Make = Callable[[BufferSettings], Awaitable[LocalReplayBuffer[FakeGroup]]]
actor = pytest.param("actor", marks=[pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(300)])


@pytest.fixture(params=["local", actor])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    started: list[Any] = []

    async def local(settings: BufferSettings) -> LocalReplayBuffer[FakeGroup]:
        return LocalReplayBuffer(settings)

    async def remote(settings: BufferSettings) -> LocalReplayBuffer[FakeGroup]:
        from trainers.buffer.actor import RemoteReplayBuffer, ReplayBuffer
        from trainers.loop.stack import prepare_controller

        prepare_controller()
        started.append(await ReplayBuffer.as_actor(settings))
        client: Any = RemoteReplayBuffer(started[-1])
        return cast("LocalReplayBuffer[FakeGroup]", client)

    yield local if request.param == "local" else remote
    for own in started:
        from trainers.buffer.actor import ReplayBuffer

        await ReplayBuffer.shutdown(own)


async def fill(buffer: LocalReplayBuffer[FakeGroup], count: int, **fields: Any) -> list[Ticket]:
    tickets = [await buffer.admit() for _ in range(count)]
    for ticket in tickets:
        await buffer.add(FakeGroup.of(ticket.index, ticket.version, **fields), ticket)
    return tickets


async def settled(waiting: asyncio.Future[Any]) -> bool:
    """Whether a call has come back, after everything had its turn."""
    await asyncio.wait([waiting], timeout=0.05)
    return waiting.done()


async def test_a_step_waits_for_its_groups_and_admission_for_their_release(make: Make) -> None:
    buffer = await make(BufferSettings(per_step=2, max_off_policy_steps=0))
    first, second = await buffer.admit(), await buffer.admit()
    assert (first, second) == (Ticket(0, 0), Ticket(1, 0))
    sampling = asyncio.ensure_future(buffer.sample(0))
    admitting = asyncio.ensure_future(buffer.admit())
    assert await buffer.add(FakeGroup.of(1, 0), second) is Outcome.KEPT
    assert not await settled(sampling)
    assert (await buffer.stats()).waiting_for == "groups: 1 ready, 1 in progress, 2 needed"
    await buffer.add(FakeGroup.of(0, 0), first)
    batch = await asyncio.wait_for(sampling, 10)
    assert [group.members[0] for group in batch.groups] == ["0-0", "1-0"]
    assert batch.reservation.staleness == [0, 0]
    assert not await settled(admitting)
    await buffer.release(1)
    assert await asyncio.wait_for(admitting, 10) == Ticket(2, 1)
    stats = await buffer.stats()
    assert (stats.admitted, stats.completed, stats.trained, stats.rolling, stats.first_open) == (3, 2, 2, 1, 2)


async def test_the_data_of_a_step_can_be_fetched_until_it_is_released(make: Make) -> None:
    buffer = await make(BufferSettings(per_step=2, max_off_policy_steps=1))
    await fill(buffer, 3)
    reserved = await buffer.reserve(0)
    assert (reserved.indices, reserved.tokens, reserved.uses) == ([0, 1], 20, [1, 1])
    for _ in range(2):
        batch = await buffer.fetch(0)
        assert batch.reservation == reserved
        assert [group.index for group in batch.groups] == [0, 1]
    await buffer.release(1)
    with pytest.raises(UsageError, match="no groups are in training for step 0"):
        await buffer.fetch(0)


async def test_a_cancelled_call_takes_nothing(make: Make) -> None:
    buffer = await make(BufferSettings(per_step=1, max_off_policy_steps=0))
    ticket = await buffer.admit()
    waiting = [asyncio.ensure_future(call) for call in (buffer.admit(), buffer.sample(0), buffer.reserve(0))]
    for call in waiting:
        assert not await settled(call)
        call.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert all(call.cancelled() for call in waiting)
    await buffer.add(FakeGroup.of(0, 0), ticket)
    assert (await buffer.sample(0)).reservation.indices == [0]
    await buffer.release(1)
    assert await buffer.admit() == Ticket(1, 1)


async def test_mistakes_are_named(make: Make) -> None:
    buffer = await make(BufferSettings(per_step=1, max_off_policy_steps=1, steps=2))
    [ticket, _] = await fill(buffer, 2)
    with pytest.raises(UsageError, match="group 0 can't be added: it is not in progress"):
        await buffer.add(FakeGroup.of(0, 0), ticket)
    with pytest.raises(UsageError, match="group 0 can't be discarded"):
        await buffer.discard(ticket)
    with pytest.raises(UsageError, match=r"version 1 can't be released.*release\(step \+ 1\)"):
        await buffer.release(1)
    await buffer.sample(0)
    with pytest.raises(UsageError, match=r"step 0 already has its groups: the next is 1 \(`fetch`"):
        await buffer.sample(0)
    with pytest.raises(UsageError, match="there is no step 2: the run has 2"):
        await buffer.sample(2)
    with pytest.raises(UsageError, match="format None"):
        await buffer.load_state_dict({})


async def test_without_a_ticket_a_group_waits_for_a_place(make: Make) -> None:
    buffer = await make(BufferSettings(per_step=1, max_off_policy_steps=0))
    assert await buffer.add(FakeGroup.of(0, 0)) is Outcome.KEPT
    adding = asyncio.ensure_future(buffer.add(FakeGroup.of(1, 1)))
    assert not await settled(adding)
    assert (await buffer.sample(0)).groups[0].index == 0
    await buffer.release(1)
    assert await asyncio.wait_for(adding, 10) is Outcome.KEPT
    assert await buffer.add(FakeGroup.of(2, 0, num_tokens=7)) is Outcome.STALE
    assert (await buffer.stats()).tokens_discarded_stale == 7


async def test_a_restart_hands_out_again_what_was_lost(make: Make) -> None:
    buffer = await make(BufferSettings(per_step=2, max_off_policy_steps=1))
    await fill(buffer, 3)
    lost = await buffer.admit()
    batch = await buffer.sample(0)
    await buffer.restart(0)
    assert (await buffer.sample(0)).reservation == batch.reservation
    with pytest.raises(UsageError, match="not in progress"):
        await buffer.add(FakeGroup.of(lost.index, 0), lost)
    again = await buffer.admit()
    assert again.index == lost.index
    await buffer.restart(1)
    stats = await buffer.stats()
    assert (stats.trained, stats.ready, stats.rolling, stats.first_open, stats.admitted) == (2, 1, 0, 2, 4)
    assert await buffer.admit() == Ticket(lost.index, 1)


async def test_sequences_are_fetched_by_whoever_computes_them(make: Make) -> None:
    buffer = await make(BufferSettings(per_step=2, max_off_policy_steps=1))
    await fill(buffer, 3)
    reservation = await buffer.reserve(0)
    assert reservation.groups == [tuple(f"{index}-{member}" for member in range(3)) for index in range(2)]
    assert (await buffer.batch_sizes(0)).numbers.tolist() == [0, 1, 2, 3, 4, 5]
    sizes = await buffer.batch_sizes(0, "segments")
    assert sizes.numbers.tolist() == [1, 2, 4, 5], "the first of each group has no advantage"
    assert (sizes.lengths.tolist(), sizes.targets.tolist()) == ([3] * 4, [2] * 4)
    assert (sizes.total_tokens, sizes.total_sequences, sizes.not_finite) == (12, 6, 0)
    await buffer.set_reference(0, {4: np.array([-3, -4], np.float32)})
    one, other = await buffer.sequences(0, [4, 1])
    assert one.token_ids.tolist() == [101, 102, 103]
    assert one.advantages.tolist() == [0, 1, 1]
    assert one.ref_logprobs.tolist() == [0, -3, -4]
    assert other.ref_logprobs is None
    await buffer.release(1)
    with pytest.raises(UsageError, match="no groups are in training for step 0"):
        await buffer.sequences(0, [1])


async def test_sequences_with_logprobs_that_are_not_finite_are_left_out_and_counted(make: Make) -> None:
    buffer = await make(BufferSettings(per_step=2, max_off_policy_steps=1))
    await fill(buffer, 1)
    await buffer.add(SpoiledGroup.of(1, 0), await buffer.admit())
    await buffer.reserve(0)
    sizes = await buffer.batch_sizes(0, "segments")
    assert sizes.numbers.tolist() == [1, 2, 5]
    assert (sizes.total_tokens, sizes.total_sequences, sizes.not_finite) == (8, 4, 2)


class SpoiledGroup(FakeGroup):
    """Two of its three members hold a log-probability that is none."""

    def segments(self) -> list[Segment]:
        found = super().segments()
        found[0].logprobs[1], found[1].logprobs[2] = float("nan"), float("-inf")
        return found


async def test_eviction_and_clear_drop_and_count(make: Make) -> None:
    buffer = await make(BufferSettings(per_step=1, max_off_policy_steps=1))
    await fill(buffer, 1, num_tokens=5)
    rolling = await buffer.admit()
    assert await buffer.evict(0) == 0
    assert await buffer.evict(2) == 2, "the trainer has skipped both steps that these were for"
    assert await buffer.add(FakeGroup.of(1, 0, num_tokens=6), rolling) is Outcome.STALE
    await buffer.release(2)
    await fill(buffer, 2)
    await buffer.clear()
    stats = await buffer.stats()
    assert (stats.ready, stats.discarded_stale, stats.tokens_discarded_stale, stats.cleared) == (0, 2, 11, 2)
    assert stats.tokens_held == 0


async def test_it_accounts_for_its_time(make: Make) -> None:
    buffer = await make(BufferSettings(per_step=2, max_off_policy_steps=0))
    await fill(buffer, 2)
    await buffer.sample(0)
    await buffer.release(1)
    before, after = (await buffer.stats()).seconds, (await buffer.stats()).seconds
    assert {"wait for calls", "add", "sample", "release"} <= set(before)
    assert sum(after.values()) > sum(before.values()) > 0
    assert all(after[doing] >= seconds for doing, seconds in before.items())
