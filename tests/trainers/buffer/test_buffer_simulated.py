"""The loop around the replay buffer on a simulated clock: stragglers, deadlines, lost groups, stops, resumes."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from forge_env.config.recipe import ReplaySection
from tests.trainers.buffer import virtual_time
from tests.trainers.buffer.buffer_model import FakeGroup
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.types import BufferSettings, Outcome, Ticket

DEADLINE_S = 30.0


class Run:
    """A run as the loop does it: rollouts with a deadline, a trainer, weights that take a while to arrive.

    Args:
        own: of the buffer.
        seed: of durations and mishaps.
        overlap: the next step begins while the weights are on their way.
    """

    def __init__(self, own: BufferSettings, seed: int, overlap: bool = False) -> None:
        self.own = own
        self.rng = random.Random(seed)
        self.overlap = overlap
        self.buffer: LocalReplayBuffer[FakeGroup] = LocalReplayBuffer(own)
        self.generators = self.step = own.version
        self.trained: list[int] = []
        self.rolled_out = 0

    async def to_end(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            rolling = tasks.create_task(self._roll_out())
            await self._train()
            rolling.cancel()

    async def _roll_out(self) -> None:
        async with asyncio.TaskGroup() as rollouts:
            while True:
                ticket = await self.buffer.admit()
                rollouts.create_task(self._group(ticket))

    async def _group(self, ticket: Ticket) -> None:
        kind, duration = self.rng.random(), self.rng.expovariate(1.0)
        version = self.generators
        await asyncio.sleep(DEADLINE_S if kind < 0.1 else duration)  # a straggler is cut at the deadline
        self.rolled_out += 1
        if kind < 0.05 or 0.9 < kind < 0.95:
            await self.buffer.discard(ticket)
            return
        group = FakeGroup.of(ticket.index, version, priority=self.rng.random())
        assert await self.buffer.add(group, ticket) is Outcome.KEPT

    async def _train(self) -> None:
        arriving: asyncio.Task[None] | None = None
        while self.own.steps is not None and self.step < self.own.steps:
            batch = await self.buffer.sample(self.step)
            assert len(batch.groups) == self.own.per_step
            assert max(self.step - group.oldest_version for group in batch.groups) <= self.own.max_off_policy_steps
            await asyncio.sleep(self.rng.expovariate(1.0))
            self.trained += batch.reservation.indices
            self.step += 1
            if arriving is not None:
                await arriving
            arriving = asyncio.create_task(self._arrive(self.step))
            if not self.overlap:
                await arriving
        if arriving is not None:
            await arriving

    async def _arrive(self, version: int) -> None:
        await asyncio.sleep(self.rng.random())
        self.generators = version
        await self.buffer.release(version)


@st.composite
def run_settings(draw: st.DrawFn) -> BufferSettings:
    bound = draw(st.integers(0, 4))
    uses = draw(st.integers(1, max(1, bound)))
    sampling = draw(st.sampled_from(["fifo", "freshest", "prioritized", "random"]))
    return BufferSettings(
        per_step=draw(st.integers(1, 5)),
        max_off_policy_steps=bound,
        steps=draw(st.integers(1, 15)),
        replay=ReplaySection(sampling=sampling, max_uses=uses),
    )


@given(own=run_settings(), seed=st.integers(0, 10_000), overlap=st.booleans())
def test_every_run_comes_to_its_end_within_the_bound(own: BufferSettings, seed: int, overlap: bool) -> None:
    """Also if weights arrive during the next step."""
    run = Run(own, seed, overlap and own.max_off_policy_steps > 0)
    virtual_time.run(run.to_end())
    stats = virtual_time.run(run.buffer.stats())
    assert stats.tokens_discarded_stale == stats.ready == stats.rolling == 0
    assert run.own.steps is not None
    assert len(run.trained) == run.own.steps * run.own.per_step == stats.trained + stats.reused
    assert len(set(run.trained)) == stats.trained
    if run.own.replay.max_uses == 1:
        assert stats.admitted == run.rolled_out == stats.trained + stats.discarded


@given(own=run_settings(), seed=st.integers(0, 10_000), stops=st.lists(st.floats(0, 40), max_size=4))
def test_resumed_run_loses_and_repeats_nothing(own: BufferSettings, seed: int, stops: list[float]) -> None:
    """At any moment everything ends; weights and buffer are what the last completed step left behind."""
    trained: list[int] = []
    run = Run(own, seed)
    for number, after in enumerate(stops):
        virtual_time.run(_stopped_after(run, after))
        trained += run.trained
        saved = virtual_time.run(run.buffer.state_dict())
        run = Run(replace(own, seed=number, version=run.step), seed + number)
        virtual_time.run(_resume(run, saved))
    virtual_time.run(run.to_end())
    trained += run.trained
    stats = virtual_time.run(run.buffer.stats())
    assert own.steps is not None
    assert len(trained) == own.steps * own.per_step
    assert max(trained.count(index) for index in set(trained)) <= own.replay.max_uses
    assert stats.tokens_discarded_stale == 0
    assert stats.admitted == stats.completed + stats.discarded
    assert stats.completed == len(set(trained))
    assert stats.first_open == stats.admitted


async def _stopped_after(run: Run, seconds: float) -> None:
    try:
        await asyncio.wait_for(run.to_end(), seconds)
    except TimeoutError:
        pass


async def _resume(run: Run, saved: dict[str, object]) -> None:
    await run.buffer.load_state_dict(saved)
    await run.buffer.restart(run.step)
