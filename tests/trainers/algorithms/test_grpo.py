"""GRPO around its parts: what becomes of groups that the filter drops."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("safetensors")  # of the training stack; torch would cost every worker seconds

from forge_env.config import load_config
from forge_env.errors import ForgeError, PluginError
from tests.trainers.algorithms.test_parts import episode
from trainers.algorithms.grpo import GRPO, Weighing
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.types import BufferSettings, Ticket
from trainers.loop.method import Method
from trainers.loop.system import PATIENCE, Algorithm, System
from trainers.rollout.types import Fate, Group, GroupReport, Totals


async def nobody(segments: Any) -> Any:
    raise AssertionError("there is no reference model")


class Incomplete(Algorithm):
    """Its author has forgotten what the workers do."""


def test_an_algorithm_without_a_part_in_the_workers_is_refused() -> None:
    with pytest.raises(PluginError, match=r"Incomplete\.preparation is missing"):
        Method(Incomplete).check(load_config("coding_rlvr"))


async def test_what_the_filter_drops_is_not_trained_on() -> None:
    weighing = Weighing(load_config("coding_rlvr", ["grpo.filter.name=with_signal"]), nobody)
    assert await weighing(Group([episode(1.0, (1, 2)), episode(1.0, (1,))])) is None
    packed = await weighing(Group([episode(1.0, (1, 2)), episode(0.0, (1,))]))
    assert packed.record.column("advantage").tolist() == [0.5, -0.5]


async def test_dropped_groups_make_room_and_are_counted_and_nothing_but_them_ends_the_run() -> None:
    group = Group([episode(1.0, (1, 2)), episode(1.0, (1,))])

    class Rollouts:
        totals = Totals()

        async def group(self, ticket: Ticket) -> GroupReport:
            totals = Totals.of(group, Fate.DROPPED)
            self.totals.add(totals)
            return GroupReport(fate=Fate.DROPPED, totals=totals)

    buffer: LocalReplayBuffer[Any] = LocalReplayBuffer(BufferSettings(per_step=1, max_off_policy_steps=0))
    config = load_config("coding_rlvr", ["grpo.filter.name=with_signal", "grpo.groups_per_step=1"])
    recorded: list[tuple[int, str, str]] = []
    system: Any = System.__new__(System)
    system.config, system.rollouts, system.buffer = config, Rollouts(), buffer
    system.run = SimpleNamespace(not_trained=lambda index, fate, why: recorded.append((index, fate, why)))
    system.contract = SimpleNamespace(opened=lambda opening: None)
    system.lost_in_a_row = system.dropped_in_a_row = 0
    system.under_way, system.results, system._changed = set(), {}, asyncio.Event()
    algorithm = GRPO(system)
    for _ in range(PATIENCE - 1):
        await algorithm.roll_out(await buffer.admit())  # there is one place, which is free again each time
    assert Rollouts.totals.metrics()["groups/filtered"] == PATIENCE - 1
    assert Rollouts.totals.tokens_filtered == 4 * (PATIENCE - 1)
    assert recorded == [(index, Fate.DROPPED, "") for index in range(PATIENCE - 1)]
    with pytest.raises(ForgeError, match=f"{PATIENCE} groups in a row were dropped by grpo.filter"):
        await algorithm.roll_out(await buffer.admit())
