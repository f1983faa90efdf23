"""An asynchronous run with two generators, one of which dies, is computed again to the bit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("torch")

from forge_env.run.recording import Recording
from tests.trainers.loop.test_resume import RECIPE, Chatter
from tests.trainers.loop.training import Training

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 8


def test_a_run_with_a_death_is_replayed_to_the_bit() -> None:
    grpo = {**RECIPE["grpo"], "steps": STEPS, "max_off_policy_steps": 2, "groups_per_step": 3}
    recipe = {
        **RECIPE,
        "environment": {"name": f"{Chatter.__module__}:Chatter"},
        "grpo": grpo,
        "tasks": {},
        "evaluation": {"every": 0, "num_tasks": 2},
        "generator": {"num_replicas": 2, "spare": False},
    }
    root = Path(tempfile.mkdtemp(prefix="fe-", dir="/tmp"))  # a short path: sockets are below it
    try:
        training = Training(root, recipe, variables={"TMPDIR": str(root)})
        try:
            training.until(lambda: len(training.steps) > 1)
            os.kill(training.lives("generator0")[-1], signal.SIGKILL)
            assert training.process.wait(600) == 0, training.said
        finally:
            training.process.kill()
            training.process.wait()
        assert "generator 0" in training.log
        recording = Recording(training.folder)
        groups = [group for step in recording.steps for group in recording.trained.steps[step]]
        assert max(group.staleness for group in groups) > 0
        command = [sys.executable, "-m", "forge_env", "replay", str(training.folder), "--tokens"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        assert f"{STEPS} of {STEPS} steps are equal to the bit" in said
        episodes = [episode for group in groups for episode in recording.episodes(group)]
        replies = sum(len(episode.turns) for episode in episodes)
        assert f"{replies:,} of {replies:,} replies have the recorded tokens" in said
    finally:
        shutil.rmtree(root)
