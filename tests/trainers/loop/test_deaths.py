"""Any process of a run may die: what has a twin heals, all else is started again from the newest checkpoint."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("torch")

from forge_env.run.metrics import read_metrics
from tests.trainers.loop.dry_run import BASE

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
PATIENCE_S = 240.0


class Training:
    """`forge-env train` in a process of its own."""

    def __init__(self, root: Path, recipe: dict[str, Any]) -> None:
        self.folder = root / "runs" / "run"
        file = root / "recipe.yaml"
        file.write_text(json.dumps(recipe))
        paths = [f"model.cache_dir={root / 'cache'}", f"output_dir={root / 'runs'}"]
        command = [sys.executable, "-m", "forge_env", "train", str(file), "--name", "run", *paths]
        self.output = (root / "output").open("w+")
        self.process = subprocess.Popen(command, stdout=self.output, stderr=self.output)

    def until(self, true: Callable[[], object]) -> None:
        """Wait for the run, which is another program: there is no event to wait for."""
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.1)

    @property
    def said(self) -> str:
        """Output and log, for whoever reads why a test failed."""
        self.output.seek(0)
        return f"{self.output.read()}\n{self.log}"

    @property
    def log(self) -> str:
        file = self.folder / "run.log"
        return file.read_text() if file.exists() else ""

    @property
    def steps(self) -> list[int]:
        """Training steps, in the order in which they were done."""
        file = self.folder / "metrics.jsonl"
        rows = read_metrics(file) if file.exists() else []
        return [int(row["step"]) for row in rows if "staleness/max" in row]

    def lives(self, role: str) -> list[int]:
        """A process of each life of an actor."""
        return [int(found) for found in re.findall(rf"\b{role}: process (\d+)", self.log)]

    def family(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]


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


def test_whoever_dies_the_run_goes_on(training: Training) -> None:
    for role in ("generator0", "reference", "weights", "buffer", "trainer", "rollouts0"):
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
