"""Rollout workers as processes: what they play arrives, also when one of them is killed in the middle of it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("torch")

import forge_env as fe
from forge_env.config import load_config
from forge_env.run import Run, RunFolder
from forge_env.trajectory import read_trajectories
from tests.trainers.rollout.gated import GatedGenerator
from trainers.actors.processes import survive_deaths
from trainers.actors.remote import result
from trainers.algorithms.grpo import Weighing
from trainers.buffer.actor import RemoteReplayBuffer, ReplayBuffer
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.types import BufferSettings
from trainers.generator.client import Member
from trainers.loop.stack import prepare_controller
from trainers.model.tiny import build_tiny_folder
from trainers.rollout.local import WorkerSettings
from trainers.rollout.rollouts import Crew, Rollouts
from trainers.rollout.types import Fate, GroupReport, Links

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(300)]
GROUPS, MEMBERS = 4, 2
KEYS = [
    "rollouts.workers=2",
    f"grpo.groups_per_step={GROUPS}",
    f"grpo.group_size={MEMBERS}",
    "grpo.max_off_policy_steps=0",
    "sandbox={engine: local, concurrency: 16}",
    "logging.timeline=true",
]


class Parts:
    """Two workers, a generator and a buffer, in processes; the trainer is missing."""

    def __init__(self, run: Run, crew: Crew, generator: Any, buffer: LocalReplayBuffer[Any]) -> None:
        self.run, self.crew, self.generator, self.buffer = run, crew, generator, buffer
        self.rollouts = Rollouts(run, fe.make("coding_rlvr"), crew)

    async def group(self) -> GroupReport:
        return await self.rollouts.group(await self.buffer.admit())


@asynccontextmanager
async def parts(root: Path) -> AsyncIterator[Parts]:
    prepare_controller()
    survive_deaths()
    config = load_config("coding_rlvr", KEYS)
    run = Run(config, RunFolder(root / "run"))
    run.folder.create()
    model = build_tiny_folder(config.model, fe.make("coding_rlvr"), 0, root / "model")
    generator = await GatedGenerator.options(mesh_name="generator0").as_actor()
    buffer = await ReplayBuffer.options(mesh_name="buffer").as_actor(BufferSettings(GROUPS, 0, steps=2))
    crew = Crew([WorkerSettings(number, config, run.folder.root, model, Weighing) for number in range(2)])
    try:
        await crew.start()
        client: Any = RemoteReplayBuffer(buffer)
        made = Parts(run, crew, generator, client)
        await made.rollouts.connect(Links([Member(0, 1, generator, True)], made.buffer))
        yield made
    finally:
        await crew.stop()
        await asyncio.gather(GatedGenerator.shutdown(generator), ReplayBuffer.shutdown(buffer))
        run.close()
        run.folder.release()


def inside(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


async def test_a_worker_that_is_killed_costs_no_group_and_leaves_no_sandbox(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        groups = [asyncio.create_task(made.group()) for _ in range(GROUPS)]
        await result(made.generator.until.call_one(GROUPS * MEMBERS))
        await made.rollouts.look()
        assert made.rollouts.episodes_running == GROUPS * MEMBERS
        assert made.rollouts.engine == "local"
        [pid] = made.crew.replicas[1].actor._forge_pids
        sandboxes = inside(pid)
        assert len(sandboxes) >= MEMBERS
        os.kill(pid, signal.SIGKILL)
        await result(made.generator.until.call_one(GROUPS * MEMBERS * 3 // 2))  # those of the dead were asked again
        await result(made.generator.open.call_one())
        assert [report.fate for report in await asyncio.gather(*groups)] == [Fate.KEPT] * GROUPS
        _gone, left = psutil.wait_procs(sandboxes, timeout=30)
        assert not left
        stats = await made.buffer.stats()
        assert (stats.completed, stats.ready, stats.rolling) == (GROUPS, GROUPS, 0)
        assert made.rollouts.totals.episodes == GROUPS * MEMBERS
        assert [replica.metrics.deaths for replica in made.crew.replicas] == [0, 1]
        await made.rollouts.close()
        names = [episode.id for episode in read_trajectories(made.run.folder.trajectories / "train.jsonl")]
        assert sorted(names) == sorted(f"train-{group}-{n}" for group in range(GROUPS) for n in range(MEMBERS))
        assert "rollouts1: groups" in made.run.folder.timeline.read_text()
        assert any("rollout worker 1 died" in text for text in made.run.state.warnings)


async def test_a_group_that_nobody_wants_any_more_ends_in_worker_and_generator(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        group = asyncio.create_task(made.group())
        await result(made.generator.until.call_one(MEMBERS))
        group.cancel()
        await asyncio.gather(group, return_exceptions=True)
        await result(made.generator.until.call_one(0, MEMBERS))
        await made.rollouts.look()
        assert made.rollouts.episodes_running == 0
        times = made.rollouts.take_times()
        assert times["rollouts0"]["busy"] > 0
        assert times["episodes"]["generate"] > 0
