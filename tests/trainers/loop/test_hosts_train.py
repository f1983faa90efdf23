"""A real run on several hosts over TLS, one of which dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("monarch")

from tests.trainers.actors.workers import certificates, workers
from trainers.loop.stack import PROCESS_ENVIRONMENT

pytestmark = [pytest.mark.slow, pytest.mark.stack, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("transport", "steps"), [pytest.param("shared", 30, marks=pytest.mark.core), ("torchstore", 10)]
)
def test_run_continues_when_the_trainers_host_is_lost(transport: str, steps: int, tmp_path: Path) -> None:
    environment = certificates(tmp_path)
    with workers(3, tmp_path, "tls", environment) as hosts:
        recipe = {
            "environment": {
                "name": "tests.trainers.loop.dry_run:Sums",
                "options": {"shades": 1000},  # so that rewards differ within a group
            },
            "model": {"max_length": 160, "cache_dir": str(tmp_path / "cache")},
            "grpo": {"steps": steps, "groups_per_step": 2, "group_size": 2, "max_tokens_per_turn": 12},
            "weights": {"transport": transport},
            "evaluation": {"every": 0, "num_tasks": 3},
            "checkpoint": {"every": 1, "keep": 1, "keep_best": 0},
            "output_dir": str(tmp_path / "runs"),
            "job": {
                "kind": "hosts",
                "workers": [host.address for host in hosts],
                "place": {"trainer": [0, 1], "generator": [2], "rollouts": [2]},
            },
        }
        (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
        command = [sys.executable, "-m", "forge_env", "train", str(tmp_path / "recipe.yaml"), "--name", "run"]
        printed_to = tmp_path / "printed.txt"
        with (
            printed_to.open("wb") as output,
            subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **environment}) as run,
        ):
            log = ["tail", "-F", "-n", "+1", str(tmp_path / "runs" / "run" / "run.log")]
            with subprocess.Popen(log, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as tail:
                assert tail.stdout is not None
                threading.Thread(target=lambda: (run.wait(), tail.kill())).start()  # a run that fails before
                began = next((line for line in tail.stdout if "step 3 trains" in line), "")
                hosts[0].kill()  # trainer and buffer are there
                tail.kill()
            run.wait()
        printed = printed_to.read_text()
        assert began, printed
        assert run.returncode == 0, printed
        assert all(len(host.family()) == 1 for host in hosts[1:]), "the workers alone"
    assert f"host 0 {hosts[0].address}" in printed
    assert "is lost: trainer moves to host 1" in printed
    rows = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    trained = {row["step"]: row for row in rows if "staleness/max" in row}
    assert set(trained) == set(range(1, steps + 1))
    fresh = [row for row in trained.values() if row["staleness/max"] == 0]
    compared = [row["mismatch/max"] for row in fresh if "mismatch/max" in row]  # absent from a step without a gradient
    assert compared
    assert max(compared) < 1e-5
    assert max(row["staleness/max"] for row in trained.values()) <= 2
    busy = {name: row[name] for row in trained.values() for name in row if name.startswith("host/")}
    assert {name.split("/")[1].partition("-")[0] for name in busy} >= {"1", "2"}
    assert all(value > 0 for value in busy.values()), busy
    assert PROCESS_ENVIRONMENT["VLLM_LOGGING_LEVEL"] == "ERROR"
    assert "INFO" not in "".join(path.read_text() for path in (tmp_path / "runs/run/logs").iterdir())
