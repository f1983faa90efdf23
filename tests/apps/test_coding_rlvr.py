"""`forge-env train coding_rlvr.yaml` as a person runs it, shortened: its end, its interruption, its death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from forge_env.machine import docker_version

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]

SHORT = [
    "warmup.steps=60",
    "grpo.steps=3",
    "grpo.groups_per_step=4",
    "grpo.group_size=4",
    "grpo.max_off_policy_steps=1",
    "evaluation.num_tasks=16",
    "evaluation.extra_tasks=4",
    "evaluation.every=2",
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One warmed-up model for all runs of this module."""
    return tmp_path_factory.mktemp("cache")


class Training:
    """One `forge-env train` in a process of its own."""

    def __init__(self, folder: Path, cache: Path, name: str, *overrides: str) -> None:
        self.run = folder / "runs" / name
        self.output = folder / f"{name}.out"
        environment = {**os.environ, "FORGE_ENV_CACHE": str(cache), "TMPDIR": str(folder)}
        command = [sys.executable, "-m", "forge_env", "train", "coding_rlvr.yaml", "--name", name]
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [*command, *SHORT, *overrides], cwd=folder, stdout=output, stderr=output, env=environment
            )

    def wait(self, timeout: float = 600) -> int:
        return self.process.wait(timeout)

    def wait_for(self, text: str, timeout: float = 600) -> None:
        """Until the run's own output says `text`."""
        deadline = time.monotonic() + timeout
        while text not in self.output.read_text():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.2)  # the output of another program has no event to wait for

    @property
    def summary(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads((self.run / "summary.json").read_text())
        return data

    def family(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those still running after the time an orphan is given to notice."""
    _, left = psutil.wait_procs(processes, timeout=60)
    return [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


def containers() -> set[str]:
    if not docker_version()[0]:
        return set()
    listed = subprocess.run(
        ["docker", "ps", "-aq", "--filter", "label=forge_env"], capture_output=True, text=True, check=True
    )
    return set(listed.stdout.split())


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.fixture
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """No container, shared memory or temporary file more than before."""
    before = containers(), shared_memory()
    yield
    deadline = time.monotonic() + 60
    while containers() - before[0] and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not containers() - before[0]
    assert not shared_memory() - before[1]
    assert {path.name for path in tmp_path.iterdir()} <= {"runs", *(f"{name}.out" for name in NAMES)}


NAMES = ("done", "stopped", "killed", "after")


@pytest.mark.parametrize("engine", [pytest.param("docker", marks=pytest.mark.docker), "local"])
def test_a_run_to_its_end(engine: str, tmp_path: Path, cache: Path, nothing_left: None) -> None:
    training = Training(tmp_path, cache, "done", f"sandbox.engine={engine}")
    assert training.wait() == 0, training.output.read_text()
    summary = training.summary
    assert summary["exit"] == "success"
    assert summary["engine"] == engine
    assert summary["steps"] == 3
    assert summary["tokens_generated"] > 0
    assert summary["tokens_discarded_stale"] == 0
    assert 0 <= summary["max_staleness"] <= 1
    assert summary["episodes_invalid"] == 0
    assert {"heldout_start", "heldout_end", "wall_s"} <= summary.keys()
    for name in ("config.yaml", "metrics.jsonl", "reward_curve.png", "report.html", "trajectories/train.jsonl"):
        assert (training.run / name).stat().st_size > 0, name
    log = (training.run / "run.log").read_text()
    assert "Traceback" not in log
    assert "WARNING" not in log
    assert "Pushing weights for policy version 3" in log
    assert "Reached training limit (3 steps)" in training.output.read_text()


def test_held_out_tasks_are_never_trained_on(tmp_path: Path, cache: Path) -> None:
    training = Training(tmp_path, cache, "done", "sandbox.engine=local", "grpo.max_off_policy_steps=0")
    assert training.wait() == 0, training.output.read_text()
    assert training.summary["max_staleness"] == 0  # the synchronous twin
    trained, held_out = set(), set()
    for path in (training.run / "trajectories").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            (trained if path.stem == "train" else held_out).add((record["split"], record["task_id"]))
    assert {split for split, _ in trained} == {"train"}
    assert {split for split, _ in held_out} == {"eval", "unseen"}
    assert not {task for _, task in trained} & {task for _, task in held_out}


def test_one_interrupt_saves_and_leaves_nothing(tmp_path: Path, cache: Path, nothing_left: None) -> None:
    training = Training(tmp_path, cache, "stopped", "sandbox.engine=local", "grpo.steps=500")
    training.wait_for("training: 500 steps")
    family = training.family()
    training.process.send_signal(signal.SIGINT)
    assert training.wait(120) == 130, training.output.read_text()
    assert training.summary["exit"] == "interrupted"
    assert list((training.run / "checkpoints").glob("step-*/progress.json"))
    assert not alive(family)


@pytest.mark.docker
def test_a_killed_run_leaves_nothing(tmp_path: Path, cache: Path, nothing_left: None) -> None:
    training = Training(tmp_path, cache, "killed", "sandbox.engine=docker", "grpo.steps=500")
    training.wait_for("training: 500 steps")
    family = training.family()
    training.process.kill()
    training.wait(30)
    assert not alive(family)
    # Any next command removes what only a command can.
    subprocess.run([sys.executable, "-m", "forge_env", "list"], check=True, capture_output=True, cwd=tmp_path)
