"""Death of each actor of a run: replicas heal; the others restart from the newest checkpoint."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("torch")

from tests.trainers.loop.dry_run import BASE
from tests.trainers.loop.training import PATIENCE_S, Training

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 100_000
RECIPE: dict[str, Any] = {
    **BASE,
    "model": {"max_length": 160, "tiny": {"layers": 1, "dim": 64, "heads": 2, "kv_heads": 2, "hidden_dim": 96}},
    "grpo": {
        "steps": STEPS,
        "groups_per_step": 2,
        "group_size": 4,
        "max_tokens_per_turn": 8,
        "reference": {"source": "initial"},
        "loss": {"options": {"beta": 0.01}},
    },
    "checkpoint": {"every": 2},
    "evaluation": {"every": 0, "num_tasks": 2},
    "generator": {"num_replicas": 2},
}


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    training = Training(tmp_path, RECIPE)
    family = []
    try:
        training.until(lambda: training.steps)
        family = training.family()
        yield training
    finally:
        training.process.kill()
        training.process.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


@pytest.mark.core
def test_the_run_continues_after_the_death_of_each_actor(training: Training) -> None:
    for role in ("generator0", "reference", "buffer", "trainer", "rollouts0"):
        done, lives = training.steps[-1], training.lives(role)
        os.kill(lives[-1], signal.SIGKILL)
        training.until(lambda role=role, lives=lives: len(training.lives(role)) > len(lives))
        training.until(lambda done=done: training.steps[-1] > done)
    training.until(lambda: "generator 0 is back at version" in training.log)
    training.process.send_signal(signal.SIGINT)
    assert training.process.wait(PATIENCE_S) == 130, training.said
    assert set(training.steps) == set(range(1, max(training.steps) + 1)), training.said
    summary = json.loads((training.folder / "summary.json").read_text())
    assert summary["steps"] == max(training.steps)
    assert summary["max_staleness"] <= 2
    assert summary["tokens_discarded_stale"] == 0
    assert "never retrieved" not in training.log
