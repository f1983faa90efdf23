"""A trainer without a model, for tests of what happens around training: `method=tests.miniature:train`.

Its weights are a chain of checksums, so that they show which steps they have seen. Steps, evaluations, checkpoints and
records are made as in a real run; only actors and sandboxes are missing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable
from pathlib import Path

from forge_env.run import Run
from forge_env.run.outcome import save_progress
from forge_env.trajectory import Trajectory
from trainers.buffer.core import BufferCore
from trainers.buffer.packed import PackedGroup
from trainers.buffer.types import BufferSettings
from trainers.loop.checkpoints import Checkpoints, Saved

STEP_S = 0.6
"""Long enough for another process to see each moment of a run."""
COPIES = 50_000
"""Of the weights in each file: a checkpoint does not fit where a few lines of a log were."""
logger = logging.getLogger("forge_env.run")


class Weights:
    def __init__(self) -> None:
        self.value = "0" * 64

    async def begin_save(self, folder: str) -> Awaitable[dict[str, float]]:
        return asyncio.ensure_future(self._write(Path(folder), self.value))

    async def _write(self, folder: Path, value: str) -> dict[str, float]:
        for name in ("model/model.safetensors", "optimizer/__0_0.distcp", "state.pt"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(value * COPIES)
            await asyncio.sleep(STEP_S / 3)
        return {}

    async def load(self, folder: str) -> None:
        self.value = (Path(folder) / "model" / "model.safetensors").read_text()[:64]


async def train(run: Run) -> None:
    steps, checkpoints, weights = run.config.grpo.steps, Checkpoints(run), Weights()
    checkpoints.tidy()
    run.stage("trainer", "trainer and generators are starting")
    if run.resume:
        checkpoints.verify()
    await asyncio.sleep(STEP_S)
    saved = await checkpoints.restore(weights) if run.resume else None
    done = saved.step if saved else 0
    run.saved(done)
    run.summary |= counts(run, done)
    if not done:
        await score(run, 0, "before")
    run.stage("training", f"{steps} steps")
    checkpoints.start_clock()
    while done < steps and not run.stop.is_set():
        await asyncio.sleep(STEP_S)
        done += 1
        weights.value = hashlib.sha256(f"{weights.value} {done}".encode()).hexdigest()
        logger.info("step %d trains groups %s", done, [done - 1])
        record(run, done)
        if checkpoints.due(done) and done < steps:
            await checkpoints.settled()
            await checkpoints.begin(weights, state(done))
            save_progress(run)
    await checkpoints.save(weights, state(done))
    if not run.stop.is_set() and not any(item.step == steps for item in run.state.evaluations):
        await score(run, steps, "after")


def state(done: int) -> Saved:
    buffer: BufferCore[PackedGroup] = BufferCore(BufferSettings(per_step=1, max_off_policy_steps=0))
    return Saved(done, {}, buffer.state_dict())


def record(run: Run, done: int) -> None:
    """Everything that a run keeps of a step."""
    run.log(done, {"reward/mean": 0.5, "staleness/max": 0.0})
    run.trained(done, [{"group": done - 1, "task": "t", "version": done, "staleness": 0, "uses": 1, "episodes": []}])
    for member in range(run.config.grpo.group_size):
        run.trajectory(Trajectory(id=f"train-{done}-{member}", environment="e", task_id="t", answer="a"), "train")
    run.summary |= counts(run, done)


def counts(run: Run, done: int) -> dict[str, int]:
    return {"episodes": done * run.config.grpo.group_size, "episodes_late": 0}


async def score(run: Run, step: int, when: str) -> None:
    run.stage("evaluation", f"held-out score {when} training")
    await asyncio.sleep(STEP_S)
    run.trajectory(Trajectory(id=f"eval-{step}", environment="e", task_id="t", answer="a"), "eval")
    run.evaluation(step, run.config.evaluation.split, 0.5, 4, 0.1)
