"""What the trainer leaves out of a step is shown."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("monarch")

from trainers.loop.stack import prepare_controller

prepare_controller()

from tests.trainers.loop import stand_ins  # noqa: E402
from tests.trainers.loop.dry_run import dry_run  # noqa: E402

pytestmark = pytest.mark.stack


class Troubled(stand_ins.TitanTrainer):
    """Finds no finite gradient, and log-probabilities that are none."""

    async def do_train_on(self, buffer: Any, step: int) -> dict[str, float]:
        metrics = await super().do_train_on(buffer, step)
        return metrics | {"skipped_updates": 1.0, "sequences_not_finite": 2.0}


def test_skipped_updates_and_sequences_left_out_are_shown(tmp_path: Path) -> None:
    recipe = {"grpo.steps": 2, "evaluation.every": 0}
    events = dry_run(recipe, tmp_path, {**stand_ins.STAND_INS, "TitanTrainer": Troubled})
    [(_, _, shown)] = [event for event in events if event[1] == "warnings"]
    [found] = ast.literal_eval(shown)
    counts = {"updates": 1, "sequences": 2}
    assert found == [f"{count} {what} of step {step} were skipped" for step in (1, 2) for what, count in counts.items()]
    metrics = [details for _, what, details in events if what == "metrics"]
    assert sum("trainer/skipped_updates" in row for row in metrics) == 2
