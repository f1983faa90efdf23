"""Parts of the loop on its edges: what counts as a score, what a resumed run has, what is saved twice."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from forge_env.config import RunConfig, load_config
from forge_env.errors import ForgeError
from forge_env.run import Run, RunFolder
from forge_env.trajectory import Trajectory
from trainers.loop.advantages import Group
from trainers.loop.checkpoints import Checkpoints
from trainers.loop.evaluation import Evaluator
from trainers.loop.grpo import train
from trainers.loop.metrics import Totals
from trainers.loop.session import Session, _why_nothing


@pytest.fixture
def config() -> RunConfig:
    return load_config("coding_rlvr", ["grpo.steps=4"])


@pytest.fixture
def run(config: RunConfig, tmp_path: Path) -> Run:
    return Run(config, RunFolder(tmp_path / "run"))


class Lost:
    """Rollouts of which infrastructure spoils every one."""

    async def evaluate(self, split: str, count: int, policy: object) -> list[Trajectory]:
        return [
            Trajectory(id=str(n), environment="", task_id="", valid=False, error="no sandbox") for n in range(count)
        ]


async def test_a_score_of_nothing_is_an_error_and_no_zero(run: Run) -> None:
    with pytest.raises(ForgeError, match=r"no episode of the evaluation on eval could be played.*no sandbox"):
        await Evaluator(run, Lost(), None).evaluate(0, "eval", 3)  # type: ignore[arg-type]
    assert run.state.evaluations == []


def test_why_a_group_came_to_nothing() -> None:
    def episode(**fields: Any) -> Trajectory:
        return Trajectory(id="", environment="", task_id="", **fields)

    assert "no sandbox" in _why_nothing(Group([episode(valid=False, error="no sandbox")]))[0]
    assert "model.max_length" in _why_nothing(Group([episode(error="lost once, then played")]))[1]
    assert "grpo.group_timeout_s" in _why_nothing(Group([]))[1]


async def test_work_ends_when_the_run_is_asked_to_stop(run: Run) -> None:
    session = Session.__new__(Session)
    session.run = run
    ended: list[str] = []

    async def forever() -> None:
        run.request_stop()
        try:
            await run_forever.wait()
        finally:
            ended.append("cleaned up")

    run_forever = asyncio.Event()

    async def quick() -> int:
        return 3

    assert await session._unless_stopped(quick()) == 3
    assert await session._unless_stopped(forever()) is None
    assert ended == ["cleaned up"]


class Writer:
    """A trainer that counts how often it saves."""

    def __init__(self) -> None:
        self.saved: list[str] = []

    async def save(self, folder: str) -> None:
        self.saved.append(Path(folder).name)


async def test_a_step_is_saved_once(run: Run) -> None:
    writer, checkpoints = Writer(), Checkpoints(run)
    assert checkpoints.step == 0
    for step in (1, 2, 2, 3):
        await checkpoints.save(writer, step, step * 24)  # type: ignore[arg-type]
    assert writer.saved == ["step-000001", "step-000002", "step-000003"]
    assert checkpoints.step == 3
    assert [path.name for path in sorted(run.folder.checkpoints.iterdir())] == ["step-000002", "step-000003"]


async def test_a_finished_run_is_not_started_again(config: RunConfig, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    (folder.checkpoints / "step-000004").mkdir(parents=True)
    (folder.checkpoints / "step-000004" / "progress.json").write_text(json.dumps({"step": 4, "position": 96}))
    folder.metrics.write_text(json.dumps({"step": 4, "eval/eval/score": 0.8}) + "\n")
    run = Run(config, folder, resume=True)
    await train(run)
    assert [stage.name for stage in run.state.stages] == []


def test_counts_go_on_after_a_resume() -> None:
    totals = Totals.since({"tokens_generated": 10, "episodes": 4, "forks": None, "engine": "local"})
    assert (totals.tokens_generated, totals.episodes, totals.forks) == (10, 4, 0)
