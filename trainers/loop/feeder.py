"""Filling the replay buffer: a group is rolled out wherever there is room for one."""

from __future__ import annotations

import asyncio
import time

from forge_env.errors import ForgeError
from forge_env.run import Run
from trainers.buffer.packed import PackedGroup
from trainers.buffer.types import GroupBuffer, Outcome, Ticket
from trainers.loop.advantages import Group, packed
from trainers.loop.metrics import Totals
from trainers.loop.rollouts import Rollouts

MAX_DISCARDED_IN_A_ROW = 20


class Feeder:
    """Rolls out groups, and hands them to the buffer."""

    def __init__(self, run: Run, rollouts: Rollouts, buffer: GroupBuffer[PackedGroup], totals: Totals) -> None:
        self._run = run
        self._rollouts = rollouts
        self._buffer = buffer
        self._totals = totals
        self._discarded_in_a_row = 0

    async def feed(self) -> None:
        """Until cancelled; every rollout is then cancelled too.

        Raises:
            ForgeError: group after group comes to nothing.
        """
        async with asyncio.TaskGroup() as rollouts:
            while True:
                ticket = await self._buffer.admit()
                rollouts.create_task(self._roll_out(ticket))

    async def _roll_out(self, ticket: Ticket) -> None:
        started = time.perf_counter()
        group = await self._rollouts.group(ticket.index)
        if (timeline := self._run.timeline) is not None:
            name = f"group {ticket.index}"
            timeline.overlapping("groups", name, name, started, time.perf_counter(), version=ticket.version)
        self._totals.count(group, self._run.config.grpo.group_size)
        for episode in group.episodes:
            self._run.trajectory(episode, "train")
        if not group.valid:
            await self._discard(ticket, group)
            return
        self._discarded_in_a_row = 0
        outcome = await self._buffer.add(packed(group, normalize_std=self._run.config.grpo.normalize_std), ticket)
        if outcome == Outcome.STALE:
            self._run.warn("a group was dropped as stale: this should not happen, please report it")

    async def _discard(self, ticket: Ticket, group: Group) -> None:
        self._discarded_in_a_row += 1
        self._run.warn("a whole group came to nothing and is replaced")
        if self._discarded_in_a_row >= MAX_DISCARDED_IN_A_ROW:
            reason, fix = why_nothing(group)
            text = f"{MAX_DISCARDED_IN_A_ROW} groups in a row came to nothing, the last because: {reason}"
            raise ForgeError(text, fix=fix)
        await self._buffer.discard(ticket)


def why_nothing(group: Group) -> tuple[str, str]:
    """Why a group has no episode to train on, and what to do about it."""
    if error := next((episode.error for episode in group.episodes if not episode.valid), None):
        return error, "run.log has the errors of all episodes"
    if group.episodes:
        return "the first prompt leaves no room for a token", "raise model.max_length"
    return "no episode finished in time", "raise grpo.group_timeout_s, or lower grpo.max_tokens_per_turn"
