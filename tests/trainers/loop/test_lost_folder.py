"""A run folder that is removed while the run trains: what was trained is saved beside it, whenever that happens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from forge_env.config.reader import read_as
from forge_env.config.recipe import RunConfig
from forge_env.run import Run, RunFolder
from forge_env.run.metrics import read_metrics
from tests.trainers.loop.dry_run import dry_run
from tests.trainers.loop.stand_ins import STAND_INS, Buffer, Generator, TitanTrainer
from trainers.loop.checkpoints import Checkpoints

pytestmark = pytest.mark.stack
STEPS = 5
MOMENTS = ["a step", "the last step", "a checkpoint", "the last checkpoint", "the last evaluation"]


def remover(root: Path, moment: str) -> dict[str, Any]:
    """Actors of which one removes the run's folder at a moment."""

    def remove() -> None:
        shutil.rmtree(root / "runs" / "run", ignore_errors=True)

    class Trainer(TitanTrainer):
        _steps = _saves = 0

        async def do_train_on(self, buffer: Buffer, step: int) -> dict[str, float]:
            found = await super().do_train_on(buffer, step)
            self._steps += 1
            if (moment, self._steps) in (("a step", 3), ("the last step", STEPS)):
                remove()
            return found

        async def do_saved(self) -> dict[str, float]:
            self._saves += 1
            if (moment, self._saves) == ("a checkpoint", 1) or (moment, self._steps) == ("the last checkpoint", STEPS):
                remove()
            return await super().do_saved()

    class Sampler(Generator):
        async def do_generate(self, *args: Any, **kwargs: Any) -> Any:
            if moment == "the last evaluation" and self._version == STEPS:
                remove()
            return await super().do_generate(*args, **kwargs)

    return {**STAND_INS, "TitanTrainer": Trainer, "Generator": Sampler}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_what_was_trained_is_saved_beside_the_folder_that_is_gone(tmp_path: Path, moment: str) -> None:
    events = dry_run({"checkpoint.every": 2, "grpo.steps": STEPS}, tmp_path, remover(tmp_path, moment))
    assert not [what for _, what, _ in events if what in ("failed", "refused")]
    folder = RunFolder(tmp_path / "runs" / "run.rescued-1")
    rows = [row["step"] for row in read_metrics(folder.metrics)]
    config = read_as(RunConfig, folder.config)
    assert config.name == "run.rescued-1"
    checkpoints = Checkpoints(Run(config, folder, resume=True))
    newest = checkpoints.verify()
    assert newest is not None
    assert checkpoints.step == max(rows)
    assert (max(rows) == STEPS) is (moment not in ("a step", "a checkpoint"))
    assert {0, 1, 2} <= set(rows)
    assert json.loads((newest / "progress.json").read_text())["step"] == max(rows)
