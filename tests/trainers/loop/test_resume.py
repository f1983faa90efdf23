"""Resuming a killed synchronous run on the real stack gives bit-identical results."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file

import forge_env as fe
from forge_env.trajectory import read_trajectories
from forge_env.types import Message, Observation, StepResult
from tests.trainers.loop.training import Training

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]
STEPS, KILLED_AFTER, TURNS = 5, 2, 3
RECIPE: dict[str, Any] = {
    "environment": {"name": f"{__name__}:Chatter"},
    "sandbox": {"engine": "local"},
    "model": {"max_length": 256, "tiny": {"layers": 2, "dim": 64, "heads": 2, "kv_heads": 2, "hidden_dim": 96}},
    "warmup": {"steps": 5},
    "tasks": {"order": "curriculum", "half_life": 4},
    "trainer": {"minibatches": 2, "threads": 2, "optimizer": {"lr": 1e-2, "warmup_steps": 1}},
    "grpo": {
        "steps": STEPS,
        "groups_per_step": 6,
        "group_size": 4,
        "max_tokens_per_turn": 24,
        "max_off_policy_steps": 0,
        "advantage": {"name": "reinforce_plus_plus"},
        "filter": {"name": "with_signal"},
    },
    "evaluation": {"every": 2, "num_tasks": 4},
    "checkpoint": {"every": 1, "keep": 10},
    "generator": {"spare": False},
    "logging": {"tensorboard": False},
}


class Chatter(fe.Environment):
    """Answers after a while that nobody can foresee; the reward is drawn from what was said."""

    def num_tasks(self, split: str) -> int | None:
        return None

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", prompt=f"Say {index}.", split=split, difficulty=1 + index % 3)

    def demonstrate(self, task: fe.Task, rng: random.Random) -> list[Message]:
        said = f"I say {rng.randrange(1000)}, and nothing else."
        return [Message(role="user", content=str(task.prompt)), Message(role="assistant", content=said)]

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        self._task = fe.resolve_task(self, seed, options)
        self._said: list[str] = []
        return [Message(role="user", content=str(self._task.prompt))], {}

    async def step(self, action: fe.types.Action) -> StepResult:
        await asyncio.sleep(random.SystemRandom().random() / 20)
        self._said.append(str(action.content if isinstance(action, Message) else action))
        drawn = zlib.crc32("".join(self._said).encode())
        if len(self._said) < TURNS:
            return [Message(role="user", content=f"And {drawn % 1000}?")], 0.0, False, False, {}
        reward = float(drawn % 3 / 2) if self._task.difficulty < 3 else float(drawn % 16 == 0)
        return [], reward, True, False, {"metrics": {"solved": float(reward == 1)}}


class ResumableRun(Training):
    """A run whose folder can be copied as a kill would leave it."""

    def finish(self) -> None:
        assert self.process.wait(600) == 0, self.said

    def copy_after(self, step: int, name: str) -> None:
        """Copy the folder while the run samples or trains what comes after that step's checkpoint."""
        self.until(lambda: f"step {step} saved" in self.log)
        family = self.family()
        for process in family:
            process.suspend()
        try:
            shutil.copytree(self.folder, self.folder.with_name(name))
        finally:
            for process in family:
                process.resume()

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "checkpoints" / f"step-{STEPS:06d}" / "model" / "model.safetensors")

    @property
    def state(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(
            (self.folder / "checkpoints" / f"step-{STEPS:06d}" / "progress.json").read_text()
        )
        return data

    def episodes(self) -> dict[str, list[list[int]]]:
        """By name, the tokens of every turn; of those played again, the last."""
        played = read_trajectories(self.folder / "trajectories" / "train.jsonl")
        return {episode.id: [turn.reply.token_ids.tolist() for turn in episode.turns] for episode in played}

    def rows(self) -> dict[int, dict[str, Any]]:
        """Of each step, the last."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return {row["step"]: row for row in map(json.loads, lines) if "reward/mean" in row}


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder with a short path: sockets are below it."""
    with tempfile.TemporaryDirectory(prefix="fe-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.core
def test_a_killed_synchronous_run_resumes_bit_for_bit(root: Path) -> None:
    variables = {"TMPDIR": str(root)}
    undisturbed = ResumableRun(root, RECIPE, "undisturbed", variables=variables)
    undisturbed.copy_after(KILLED_AFTER, "killed")
    undisturbed.finish()
    resumed = ResumableRun(root, RECIPE, "killed", "--resume", variables=variables)
    resumed.finish()
    assert "Resuming after step" in resumed.said
    expected, found = undisturbed.weights, resumed.weights
    assert undisturbed.episodes() == resumed.episodes(), "the same tasks, each with the same replies"
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert resumed.state == undisturbed.state, "order, curriculum, estimator"
    for step, row in undisturbed.rows().items():
        for name in ("reward/mean", "grpo_loss/total_loss", "trainer/grad_norm"):
            assert resumed.rows()[step].get(name) == row.get(name), (step, name)
