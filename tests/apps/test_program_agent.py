"""A shortened run of `program_agent/coding_cpu`: a program with OpenAI's client is trained token by token."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forge_env.run.metrics import read_metrics
from forge_env.trajectory import read_trajectories
from tests.sandboxes.conftest import require
from tests.sandboxes.wheels import use_client

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(600)]
SHORT = (
    *("grpo.steps=2", "grpo.groups_per_step=2", "grpo.group_size=3", "trainer.threads=1", "generator.spare=false"),
    *("evaluation.num_tasks=2", "evaluation.every=0", "sandbox.engine=local"),
)


def test_a_program_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    use_client(tmp_path_factory.mktemp("wheels"), monkeypatch, tmp_path_factory)
    trained(tmp_path)


def trained(folder: Path, *options: str) -> None:
    """Train two steps: all episodes are valid, turns continue exact tokens, and each token is trained once."""
    require("local")
    command = [sys.executable, "-m", "forge_env", "train", "program_agent/coding_cpu", "--name", "run"]
    command += [*SHORT, *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run = folder / "runs" / "run"
    steps = [row["step"] for row in read_metrics(run / "metrics.jsonl") if "staleness/max" in row]
    assert steps == [1, 2]
    clauses = [json.loads(line) for line in (run / "contract.jsonl").read_text().splitlines()]
    verdicts = {each["clause"]: each["verdict"] for each in clauses}
    assert (verdicts["tokens"], verdicts["log-probs"], verdicts["weights"]) == ("holds", "holds", "holds"), clauses
    episodes = [each for file in (run / "trajectories").glob("train.jsonl") for each in read_trajectories(file)]
    assert len(episodes) >= 2 * 2 * 3
    assert all(episode.valid and episode.turns[0].seat == "c1" for episode in episodes)
    for episode in episodes:
        assert sum(int(segment.mask.sum()) for segment in episode.segments()) == episode.num_sampled_tokens
        for turn in episode.turns[1:]:
            if turn.seat == "c1":
                assert turn.reply.continues, "a turn continues the exact tokens of the one before"
