"""`forge-env train coding_rlvr.yaml` as a person runs it, shortened: its end, its interruption, its terminal's end."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest

from forge_env.run.contract import CLAUSES
from forge_env.trajectory import read_trajectories
from forge_env.trajectory_index import is_index
from sandboxes.docker import DockerEngine
from tests.leftovers import assert_no_shared_memory, shared_memory

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]

SHORT = {
    "grpo.steps": 3,
    "grpo.groups_per_step": 4,
    "grpo.group_size": 4,
    "grpo.max_off_policy_steps": 1,
    "evaluation.num_tasks": 16,
    "evaluation.extra_num_tasks": 4,
    "evaluation.every": 2,
}


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Short: it is the TMPDIR of runs whose sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="fe-", dir="/tmp") as folder:
        yield Path(folder)


class Training:
    """One `forge-env train` in a process of its own, at a terminal of its own on request."""

    def __init__(self, folder: Path, name: str, overrides: dict[str, object], *, terminal: bool = False) -> None:
        self.folder = folder
        self.run = folder / "runs" / name
        self.output = folder / f"{name}.out"
        environment = {**os.environ, "FORGE_ENV_CACHE": str(folder / "cache"), "TMPDIR": str(folder)}
        command = [sys.executable, "-m", "forge_env", "train", "coding_rlvr.yaml", "--name", name]
        command += [f"{key}={value}" for key, value in {**SHORT, **overrides}.items()]
        if terminal:
            self._at_terminal(command, environment)
            return
        with self.output.open("w") as output:
            self.process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=environment)

    def _at_terminal(self, command: list[str], environment: dict[str, str]) -> None:
        self.terminal, theirs = pty.openpty()
        command = ["setsid", "--ctty", "--wait", *command]  # so that ^C goes to it and all its children, as at a desk
        self.process = subprocess.Popen(
            command, cwd=self.folder, stdin=theirs, stdout=theirs, stderr=theirs, env={**environment, "TERM": "xterm"}
        )
        os.close(theirs)
        Thread(target=self._copy_terminal, daemon=True).start()

    def _copy_terminal(self) -> None:
        with self.output.open("wb") as output, suppress(OSError):  # EIO: the other end is closed
            while data := os.read(self.terminal, 65536):
                output.write(data)
                output.flush()

    def press_control_c(self) -> None:
        os.write(self.terminal, b"\x03")

    def wait(self, timeout: float = 600) -> int:
        return self.process.wait(timeout)

    def wait_for(self, text: str, timeout: float = 600) -> None:
        """Until the run's log says `text`."""
        deadline, log = time.monotonic() + timeout, self.run / "run.log"
        while not log.exists() or text not in log.read_text():
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


def containers(owner: int) -> set[str]:
    """Containers of the process `owner`, running or not."""
    if DockerEngine.unavailable_reason():
        return set()
    listed = subprocess.run(
        ["docker", "ps", "-a", "--filter", "label=forge_env", "--format", '{{.ID}} {{.Label "forge_env"}}'],
        capture_output=True,
        text=True,
        check=True,
    )
    return {line.split()[0] for line in listed.stdout.splitlines() if f".{owner}." in line}


def assert_nothing_left(training: Training, family: list[psutil.Process], shm_before: set[str]) -> None:
    """No process, container, shared memory or temporary file of the run remains."""
    assert not alive(family)
    assert not containers(training.process.pid)
    assert_no_shared_memory(shm_before)
    assert {path.name for path in training.folder.iterdir()} <= {"runs", "cache", training.output.name}


@pytest.mark.core
def test_a_run_to_its_end(tmp_path: Path) -> None:
    engine = "local" if DockerEngine.unavailable_reason() else "docker"
    shm = shared_memory()
    training = Training(tmp_path, "done", {"sandbox.engine": engine})
    assert training.wait() == 0, training.output.read_text()
    summary = training.summary
    assert summary["exit"] == "success"
    assert summary["contract"] == dict.fromkeys((clause for clause in CLAUSES if clause != "rounding"), "holds")
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
    assert versions_of_scores(training) == {0: {0}, 2: {2}, 3: {3}}
    check_held_out(training)
    assert_nothing_left(training, [], shm)


def check_held_out(training: Training) -> None:
    """No held-out task was trained on."""
    trained: set[tuple[str, str]] = set()
    held_out: set[tuple[str, str]] = set()
    for path in (training.run / "trajectories").glob("*.jsonl"):
        for line in path.read_text().splitlines() if not is_index(path) else ():
            record = json.loads(line)
            (trained if path.stem == "train" else held_out).add((record["split"], record["task_id"]))
    assert {split for split, _ in trained} == {"train"}
    assert {split for split, _ in held_out} == {"eval", "unseen"}
    assert not {task for _, task in trained} & {task for _, task in held_out}


def versions_of_scores(training: Training) -> dict[int, set[int]]:
    """Which policy versions sampled the tokens of each held-out score, by training step."""
    found: dict[int, set[int]] = {}
    for path in (training.run / "trajectories").glob("eval-?????.jsonl"):
        versions = {
            version
            for episode in read_trajectories(path)
            for turn in episode.turns
            for version in turn.reply.versions.tolist()
        }
        found[int(path.stem.split("-")[1])] = versions
    return found


def test_an_interrupt_of_the_start_up_ends_it_soon(tmp_path: Path) -> None:
    shm = shared_memory()
    endless = {"sandbox.engine": "local", "model.path": "tiny", "warmup.steps": 100_000}
    training = Training(tmp_path, "early", endless, terminal=True)
    training.wait_for("stage warm-up")
    family = training.family()
    training.press_control_c()
    assert training.wait(120) == 130, training.output.read_text()
    assert training.summary["exit"] == "interrupted"
    assert_nothing_left(training, family, shm)


def test_a_closed_terminal_saves_and_leaves_nothing(tmp_path: Path) -> None:
    shm = shared_memory()
    endless = {"sandbox.engine": "local", "grpo.steps": 500, "evaluation.num_tasks": 4, "evaluation.extra_num_tasks": 1}
    training = Training(tmp_path, "closed", endless, terminal=True)
    training.wait_for("step 1 trains groups")
    family = training.family()
    os.close(training.terminal)
    assert training.wait(120) == 130, (training.run / "run.log").read_text()[-2000:]
    assert training.summary["exit"] == "interrupted"
    assert list((training.run / "checkpoints").glob("step-*/progress.json"))
    assert_nothing_left(training, family, shm)
