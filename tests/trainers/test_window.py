"""The staleness bound, as a property over interleavings of admission, completion and training."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.buffer.replay import ReplayBuffer
from trainers.buffer.window import feasible, select, slots


def test_budget_is_one_batch_more_than_the_bound() -> None:
    assert slots(8, 0) == 8
    assert slots(8, 3) == 32


def test_feasible_counts_groups_against_the_steps_before_their_date() -> None:
    assert feasible([0, 0, 1, 1], version=0, per_step=2)
    assert not feasible([0, 0, 0, 1], version=0, per_step=2)
    assert feasible([], version=5, per_step=1)
    assert not feasible([4], version=5, per_step=1)


def test_a_straggler_is_passed_over_only_while_it_can_be() -> None:
    # Both admitted at version 0 with a bound of 1: the incomplete one may wait until step 1, not longer.
    assert select([(0, False), (0, True)], version=0, per_step=1, max_off_policy_steps=1) == [1]
    assert select([(0, False), (1, True)], version=1, per_step=1, max_off_policy_steps=1) is None


@settings(max_examples=300, deadline=None)
@given(
    per_step=st.integers(1, 4),
    bound=st.integers(0, 4),
    choices=st.lists(st.integers(0, 10_000), min_size=50, max_size=300),
)
def test_no_interleaving_trains_a_group_older_than_the_bound(per_step: int, bound: int, choices: list[int]) -> None:
    asyncio.run(_drive(per_step, bound, choices))


async def _drive(per_step: int, bound: int, choices: list[int]) -> None:
    """Complete groups in any order, and train whenever the buffer lets us: nothing is too old, lost or repeated."""
    buffer: ReplayBuffer[int] = ReplayBuffer(per_step, bound)
    rolling = []
    trained: list[int] = []
    for choice in choices:
        while buffer.rolling + buffer.ready < slots(per_step, bound):
            rolling.append(await asyncio.wait_for(buffer.admit(), 1))
        if rolling:
            ticket = rolling.pop(choice % len(rolling))
            await buffer.add(ticket, ticket.index)
        sampling = asyncio.ensure_future(buffer.sample())
        for _ in range(3):
            await asyncio.sleep(0)
        if not sampling.done():
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
            assert rolling, "everything is complete and still no batch: a deadlock"
            continue
        batch = sampling.result()
        assert len(batch) == per_step
        for ticket in batch:
            assert 0 <= buffer.version - ticket.version <= bound
            trained.append(ticket.index)
        await buffer.release(batch)
    assert len(trained) == len(set(trained))
    held = {ticket.index for ticket in buffer._pending}
    assert set(trained) | held == set(range(buffer.stats.admitted))


async def test_admission_waits_for_a_release() -> None:
    buffer: ReplayBuffer[str] = ReplayBuffer(2, 0)
    tickets = [await buffer.admit(), await buffer.admit()]
    waiting = asyncio.ensure_future(buffer.admit())
    for ticket in tickets:
        await buffer.add(ticket, "group")
    batch = await buffer.sample()
    await asyncio.sleep(0)
    assert not waiting.done()
    await buffer.release(batch)
    ticket = await asyncio.wait_for(waiting, 1)
    assert (ticket.index, ticket.version) == (2, 1)


async def test_a_discarded_group_frees_its_slot() -> None:
    buffer: ReplayBuffer[str] = ReplayBuffer(1, 0)
    lost = await buffer.admit()
    waiting = asyncio.ensure_future(buffer.admit())
    await asyncio.sleep(0)
    await buffer.discard(lost)
    ticket = await asyncio.wait_for(waiting, 1)
    assert ticket.index == 1
    assert buffer.stats.discarded == 1


@pytest.mark.parametrize("bound", [0, 2])
async def test_a_slow_first_group_does_not_stall_the_rest_before_its_date(bound: int) -> None:
    buffer: ReplayBuffer[str] = ReplayBuffer(1, bound)
    tickets = [await buffer.admit() for _ in range(slots(1, bound))]
    for ticket in tickets[1:]:
        await buffer.add(ticket, "group")
    steps = 0
    while steps < bound:
        batch = await asyncio.wait_for(buffer.sample(), 1)
        assert tickets[0] not in batch
        await buffer.release(batch)
        steps += 1
    sampling = asyncio.ensure_future(buffer.sample())
    await asyncio.sleep(0)
    assert not sampling.done()
    await buffer.add(tickets[0], "late")
    assert await asyncio.wait_for(sampling, 1) == [tickets[0]]


async def test_no_more_groups_are_admitted_than_the_run_needs() -> None:
    buffer: ReplayBuffer[str] = ReplayBuffer(1, 4, needed=2)
    first, _ = await buffer.admit(), await buffer.admit()
    waiting = asyncio.ensure_future(buffer.admit())
    await asyncio.sleep(0)
    assert not waiting.done(), "there are slots, but nothing to train it in"
    await buffer.discard(first)
    assert (await asyncio.wait_for(waiting, 1)).index == 2, "a lost group is replaced"
