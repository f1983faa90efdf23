"""`Run`: what a trainer says, and where it lands."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import threading
from functools import partial
from pathlib import Path

import pytest

from forge_env.config import RunConfig
from forge_env.display.state import RunState, sparkline
from forge_env.display.terminal import Display, LiveDisplay, PlainDisplay, duration, open_display
from forge_env.run import Run, RunFolder
from forge_env.run.metrics import JSONLMetrics
from forge_env.run.outcome import read_summary, write_summary
from forge_env.run.trajectories import MOST_OPEN, MOST_WAITING
from forge_env.trajectory import Trajectory, TrajectoryWriter, read_trajectories


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(clock: Clock) -> RunState:
    return RunState("first", max_staleness=2, clock=clock)


def plain_run(config: RunConfig, folder: RunFolder, state: RunState) -> tuple[Run, io.StringIO]:
    folder.create()
    stream = io.StringIO()
    sink = JSONLMetrics(folder.metrics, lambda: state.elapsed)
    return Run(config, folder, state=state, display=Display(PlainDisplay(state, stream)), loggers=[sink]), stream


def test_the_summary_is_made_from_what_was_said(
    config: RunConfig, folder: RunFolder, state: RunState, clock: Clock
) -> None:
    run, _ = plain_run(config, folder, state)
    run.evaluation(0, "eval", 0.4, 128, 0.04)
    run.stage("training")
    clock.now += 5
    run.log(1, {"reward/mean": 0.5})
    run.log(2, {"reward/mean": 0.6})
    run.evaluation(2, "eval", 0.8, 128, 0.03)
    run.evaluation(2, "unseen", 0.1, 64, 0.03)
    run.warn("careful")
    run.warn("careful")
    run.summary |= {"engine": "docker", "tokens_generated": 10}
    run.close()
    write_summary(run, "success", "", 7.0)
    summary = json.loads(folder.summary.read_text())
    assert (summary["heldout_start"], summary["heldout_end"], summary["steps"]) == (0.4, 0.8, 2)
    assert (summary["engine"], summary["tokens_generated"], summary["tokens_discarded_stale"]) == ("docker", 10, 0)
    assert (summary["exit"], summary["error"], summary["wall_s"], summary["max_staleness"]) == ("success", None, 7.0, 0)
    assert summary["heldout"]["unseen"]["n"] == 64
    assert summary["heldout_unseen_start"] == summary["heldout"]["unseen"]["start"]
    assert summary["warnings"] == {"careful": 2}
    assert summary["stages"] == {"training": 5.0}


def test_a_resumed_run_remembers_its_curve(config: RunConfig, folder: RunFolder, state: RunState) -> None:
    run, _ = plain_run(config, folder, state)
    run.evaluation(0, "eval", 0.4, 128, 0.04)
    run.log(1, {"reward/mean": 0.5})
    run.log(2, {"reward/mean": 0.6})
    run.close()
    folder.release()
    again = Run(config, folder, resume=True, state=RunState("first"))
    assert again.state.rewards == [0.5, 0.6]
    assert again.state.step == 2
    assert [(item.step, item.score, item.n) for item in again.state.scores()] == [(0, 0.4, 128)]


@pytest.mark.parametrize(("keep", "kinds"), [("all", ["eval", "train"]), ("eval", ["eval"]), ("none", [])])
def test_the_recipe_says_which_trajectories_are_kept(
    config: RunConfig, folder: RunFolder, state: RunState, keep: str, kinds: list[str]
) -> None:
    config = RunConfig.model_validate(config.model_dump() | {"logging": {"trajectories": keep}})
    run, _ = plain_run(config, folder, state)
    for kind in ("train", "eval"):
        run.trajectory(Trajectory(id="t", environment="e", task_id="k"), kind)
    run.close()
    assert sorted(path.stem for path in folder.trajectories.iterdir()) == kinds
    for path in folder.trajectories.iterdir():
        assert Trajectory.from_dict(json.loads(path.read_text())).task_id == "k"


def test_plain_lines_are_sparse(config: RunConfig, folder: RunFolder, state: RunState, clock: Clock) -> None:
    run, stream = plain_run(config, folder, state)
    run.stage("training", "60 steps")
    run.status(staleness=1, tokens_per_s=3000.0, waiting={"trainer": "episodes", "generator": None})
    for step in range(1, 61):
        clock.now += 1
        run.log(step, {"reward/mean": 0.5})
        run.progress(step, 60)
    run.evaluation(60, "eval", 0.75, 128, 0.04)
    run.warn("something")
    run.warn("something")
    lines = stream.getvalue().splitlines()
    assert len([line for line in lines if "training" in line]) == 5
    progress = next(line for line in lines if "training 1" in line)
    for part in ("reward 0.500", "staleness 1/2", "3,000 tokens/s", "trainer waits for episodes", "left"):
        assert part in progress
    assert sum("warning: something" in line for line in lines) == 1
    assert any("held-out (eval) after step 60: 0.750 +- 0.040 (n=128)" in line for line in lines)


def test_the_live_panel_shows_what_matters(config: RunConfig, folder: RunFolder, state: RunState, clock: Clock) -> None:
    stream = io.StringIO()
    display = Display(LiveDisplay(state, stream))
    run = Run(config, folder, state=state, display=display)
    run.stage("sandbox", "docker")
    clock.now += 2
    run.stage("training")
    clock.now += 60
    run.progress(10, 40)
    run.log(10, {"reward/mean": 0.5})
    run.evaluation(0, "eval", 0.4, 128, 0.04)
    run.evaluation(10, "eval", 0.6, 128, 0.04)
    run.status(staleness=1, tokens_per_s=3000.0, waiting={"trainer": "episodes"})
    run.warn("one group was lost")
    run.request_stop()
    display.close()
    text = stream.getvalue()
    for part in (
        "✓ sandbox 2.0s", "● training", "10/40", "3m00s left", "reward", "0.600 ± 0.040", "from 0.400", "staleness 1/2",
        "3,000 tokens/s", "trainer waits for episodes", "! one group was lost", "Ctrl-C again stops now",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_that_is_gone_ends_no_run(
    terminal: bool, config: RunConfig, folder: RunFolder, state: RunState, caplog: pytest.LogCaptureFixture
) -> None:
    class Gone(io.StringIO):
        def isatty(self) -> bool:
            return terminal

        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    run = Run(config, folder, state=state, display=open_display(state, Gone()))
    run.stage("training")
    run.note("worth a line")
    run.warn("careful")
    run.evaluation(0, "eval", 0.4, 128, 0.04)
    run.display.close()
    assert [text for text in caplog.messages if "no longer drawn" in text] == [
        "progress is no longer drawn: OSError: [Errno 5] Input/output error"
    ]


def test_sparkline_has_a_fixed_scale_and_width() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.0, 1.0]) == "▁█"
    assert len(sparkline([0.5] * 1000, width=40)) == 40
    assert sparkline([-5.0, 5.0]) == "▁█"


@pytest.mark.parametrize(("seconds", "text"), [(8.31, "8.3s"), (125, "2m05s"), (3840, "1h04m")])
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_summary_is_complete_or_absent(config: RunConfig, folder: RunFolder, state: RunState) -> None:
    run, _ = plain_run(config, folder, state)
    run.summary["odd"] = Path("/x")
    write_summary(run, "running", "", 0.0)
    assert json.loads(folder.summary.read_text())["odd"] == "/x"
    assert not list(folder.root.glob("*.tmp"))


class FullDisk:
    """Has no room until it is given some, and knows which threads wrote to it."""

    def __init__(self) -> None:
        self.room = False
        self.threads: set[int] = set()

    def __call__(self, descriptor: int, data: bytes) -> int:
        self.threads.add(threading.get_ident())
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(descriptor, data)


def test_a_full_disk_ends_no_run_and_trajectories_are_written_by_a_thread(
    config: RunConfig, folder: RunFolder, state: RunState, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk()
    monkeypatch.setattr("forge_env.run.trajectories.TrajectoryWriter", partial(TrajectoryWriter, write=disk))
    run, stream = plain_run(config, folder, state)
    for name in "abc":
        run.trajectory(Trajectory(id=name, environment="e", task_id="k"), "train")
    assert run._trajectories._writing[-1].result()  # it waits for room
    disk.room = True
    run.trajectory(Trajectory(id="d", environment="e", task_id="k", info={"odd": object()}), "train")
    run.trajectory(Trajectory(id="e", environment="e", task_id="k"), "train")
    run.close()
    assert [item.id for item in read_trajectories(folder.trajectories / "train.jsonl")] == ["a", "b", "c", "e"]
    assert "the disk is full: metrics and trajectories stay in memory" in stream.getvalue()
    assert "a trajectory can't be recorded: Object of type object is not JSON serializable" in stream.getvalue()
    assert threading.get_ident() not in disk.threads


def test_few_files_are_open_however_many_kinds_there_are(config: RunConfig, folder: RunFolder, state: RunState) -> None:
    run, _ = plain_run(config, folder, state)
    for step in range(50):
        for name in ("a", "b"):
            run.trajectory(Trajectory(id=f"{name}{step}", environment="e", task_id="k"), f"eval-{step:05d}")
            run.trajectory(Trajectory(id=f"{name}{step}", environment="e", task_id="k"), "train")
    run._trajectories._writing[-1].result()
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert 0 < sum(str(folder.trajectories) in link for link in links) <= MOST_OPEN
    run.close()
    for step in range(50):
        written = [item.id for item in read_trajectories(folder.trajectories / f"eval-{step:05d}.jsonl")]
        assert written == [f"a{step}", f"b{step}"]


def test_what_waits_for_room_is_written_with_the_next_of_any_kind(
    config: RunConfig, folder: RunFolder, state: RunState, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk()
    monkeypatch.setattr("forge_env.run.trajectories.TrajectoryWriter", partial(TrajectoryWriter, write=disk))
    run, _ = plain_run(config, folder, state)
    kinds = [f"eval-{step}" for step in range(MOST_OPEN + 3)]
    for kind in kinds:
        run.trajectory(Trajectory(id=kind, environment="e", task_id="k"), kind)
    run._trajectories._writing[-1].result()
    disk.room = True
    run.trajectory(Trajectory(id="z", environment="e", task_id="k"), "train")
    run._trajectories._writing[-1].result()
    for kind in kinds:
        assert [item.id for item in read_trajectories(folder.trajectories / f"{kind}.jsonl")] == [kind]
    run.close()


async def test_who_writes_faster_than_the_disk_waits_and_nobody_else(
    config: RunConfig, folder: RunFolder, state: RunState, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = threading.Event()

    def write(descriptor: int, data: bytes) -> int:
        slow.wait()
        return os.write(descriptor, data)

    monkeypatch.setattr("forge_env.run.trajectories.TrajectoryWriter", partial(TrajectoryWriter, write=write))
    run, _ = plain_run(config, folder, state)
    for number in range(MOST_WAITING + 10):
        run.trajectory(Trajectory(id=str(number), environment="e", task_id="k"), "train")
    given_up = asyncio.ensure_future(run.drain())
    draining = asyncio.ensure_future(run.drain())
    await asyncio.sleep(0)  # the loop goes on
    assert not draining.done()
    given_up.cancel()
    await asyncio.wait([given_up])
    slow.set()
    await draining
    assert len(run._trajectories._writing) <= MOST_WAITING
    run.close()
    written = [item.id for item in read_trajectories(folder.trajectories / "train.jsonl")]
    assert written == [str(number) for number in range(MOST_WAITING + 10)]


def test_what_can_never_be_written_is_told_when_the_run_closes(
    config: RunConfig, folder: RunFolder, state: RunState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forge_env.run.trajectories.TrajectoryWriter", partial(TrajectoryWriter, write=FullDisk()))
    run, stream = plain_run(config, folder, state)
    run.trajectory(Trajectory(id="a", environment="e", task_id="k"), "train")
    run.close()
    assert "1 train trajectories could not be written" in stream.getvalue()


def test_a_resumed_run_that_is_killed_at_once_keeps_its_counts(config: RunConfig, folder: RunFolder) -> None:
    folder.create()
    try:
        earlier = {"episodes": 7, "tokens_generated": 5, "steps": 3, "name": "before it was moved"}
        write_summary(Run(config, folder, earlier=earlier), "running", "", 0.0)
        kept = read_summary(folder.summary)
    finally:
        folder.release()
    assert [kept[name] for name in ("episodes", "tokens_generated", "name")] == [7, 5, folder.name]
