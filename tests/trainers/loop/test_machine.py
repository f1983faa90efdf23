"""A run next to other runs and other users, and under a wall clock that jumps."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("torch")

from forge_env.listeners import matching
from tests.leftovers import assert_no_shared_memory, shared_memory
from tests.listeners import Listener, as_another_user, listeners
from tests.trainers.loop import unhurried
from tests.trainers.loop.training import PATIENCE_S, Training

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]
RECIPE: dict[str, Any] = {
    "environment": {"name": f"{unhurried.__name__}:Programs"},
    "sandbox": {"engine": "local", "concurrency": 2},
    "model": {"max_length": 1024, "tiny": {"layers": 1, "dim": 64, "heads": 2, "kv_heads": 2, "hidden_dim": 96}},
    "grpo": {"steps": 100_000, "groups_per_step": 2, "group_size": 2, "max_tokens_per_turn": 8},
    "evaluation": {"every": 0, "num_tasks": 2},
    "checkpoint": {"every": 2},
    "generator": {"spare": False},
    "watchdog": {"warn_s": 300.0, "end_s": 600.0},
    "logging": {"tensorboard": False},
}
ROLES = ("trainer", "generator0", "buffer", "rollouts0")
DAY_S = 86_400


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """Short: it is the TMPDIR of runs whose sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="fe-", dir="/tmp") as root:
        yield Path(root)


@contextmanager
def training(root: Path, name: str, *more: str, variables: Mapping[str, str] | None = None) -> Iterator[Training]:
    run = Training(root, RECIPE, name, *more, variables={"TMPDIR": str(root), **(variables or {})})
    try:
        yield run
    finally:
        run.process.kill()
        run.process.wait()


def trains_on(run: Training, steps: int = 2) -> None:
    """Wait until it has done so many steps more."""
    wanted = max(run.steps, default=0) + steps
    run.until(lambda: max(run.steps, default=0) >= wanted)


def finish(run: Training) -> None:
    """End it as a person does; it must have met nothing on its way."""
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(PATIENCE_S) == 130, run.said
    assert [len(run.lives(role)) for role in ROLES] == [1] * len(ROLES), run.said
    untaught = ("contract: rewards: doubtful", "contract: weights: doubtful")  # nobody earns anything here
    warnings = [line for line in run.said.lower().splitlines() if "warning" in line]
    assert not [line for line in warnings if not any(words in line for words in untaught)], run.said
    assert run.steps == list(range(1, len(run.steps) + 1))


def scratch(root: Path) -> set[str]:
    return {path.name for path in root.glob("*forge-env-run-*")}


def sandboxes(run: Training) -> list[psutil.Process]:
    return [process for process in run.family() if "sandboxes/local/launch.py" in " ".join(process.cmdline())]


@dataclass(frozen=True)
class Other:
    """A run that trains next to others, with every kind of socket, and a wall clock that can be set.

    Attributes:
        run: the run.
        library: the clock's library, or None without a compiler.
        file: holds the seconds by which the clock is ahead.
        seen: sockets that it listened on between its start and its second step.
    """

    run: Training
    library: Path | None
    file: Path
    seen: set[Listener]

    def jump(self, days: int) -> None:
        with self.file.open("r+b") as file:
            file.write(struct.pack("q", days * DAY_S))


@pytest.fixture(scope="module")
def other(root: Path) -> Iterator[Other]:
    before, clock, library = shared_memory(), root / "clock", None
    if compiler := shutil.which("cc"):
        library, source = root / "clock.so", Path(__file__).with_name("clock.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    clock.write_bytes(struct.pack("q", 0))
    variables = {"LD_PRELOAD": str(library), "CLOCK_FILE": str(clock)} if library else {}
    seen: set[Listener] = set()

    def trains() -> bool:
        seen.update(listeners(run.family()))
        return max(run.steps, default=0) >= 2

    with training(root, "other", "trainer.procs=2", "generator.engine=async_llm", variables=variables) as run:
        run.until(trains)
        yield Other(run, library, clock, seen)
        finish(run)
    assert scratch(root) == set()
    assert_no_shared_memory(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_connects_to_no_process_of_a_run(other: Other) -> None:
    """Every socket seen from start to training is in the list of listeners, and refuses other users."""
    run = other.run
    there = listeners(run.family())
    ends = as_another_user(there)
    actors = {pid for role in ROLES for pid in run.lives(role)}
    assert {each.pid for each in there if each.kind == "unix"} >= {run.process.pid, *actors}
    assert any(each.kind == "tcp" for each in there), "torch's groups"
    assert set(ends.values()) == {"PermissionError", "TimeoutError"}, ends
    unknown = [
        each
        for each in other.seen
        if not any(entry.refuses_others for entry in matching(each.kind, each.address, "train"))
    ]
    assert not unknown


def test_two_runs_at_once_leave_each_other_alone(root: Path, other: Other) -> None:
    """They have the recipe, the output folder, the cache and the machine in common. One is killed, and goes on."""
    with training(root, "one") as one:
        trains_on(one)
        trains_on(other.run)
        family, own_scratch = one.family(), scratch(root)
        assert len(own_scratch) == 2
        assert sandboxes(one)
        assert sandboxes(other.run)
        one.process.kill()
        one.process.wait()
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive
    with training(root, "one", "--resume") as again:  # whose command removes what the killed one has left
        trains_on(again)
        trains_on(other.run)
        assert len(scratch(root)) == 2
        assert len(own_scratch & scratch(root)) == 1
        again.process.send_signal(signal.SIGINT)
        assert again.process.wait(PATIENCE_S) == 130, again.said
        trains_on(other.run)


def test_a_wall_clock_that_jumps_costs_nothing(other: Other) -> None:
    """Days ahead, as when a machine first hears of the time; far back, as when it forgets it again."""
    if other.library is None:
        pytest.skip("NOT RUN: no C compiler to make a clock that can jump with")
    run = other.run
    trains_on(run)
    for role in ROLES:
        assert str(other.library) in Path(f"/proc/{run.lives(role)[0]}/maps").read_text(), f"{role} has its own clock"
    for days in (40, -400, 0):
        other.jump(days)
        saved = run.log.count(" saved: ")
        trains_on(run, 3)
        run.until(lambda saved=saved: run.log.count(" saved: ") > saved)
