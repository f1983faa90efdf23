"""`Run`: what a trainer says, and where it lands."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from functools import partial
from pathlib import Path

import pytest

from forge_env.config import RunConfig
from forge_env.run import Run, RunFolder
from forge_env.run.metrics import read_metrics
from forge_env.run.outcome import read_summary, write_summary
from forge_env.run.state import RunState
from forge_env.run.trajectories import MOST_OPEN, MOST_WAITING
from forge_env.trajectory import Trajectory, TrajectoryWriter, read_trajectories
from forge_env.trajectory_index import is_index
from tests.forge_env.run.conftest import Clock, plain_run


def test_summary_of_what_was_said(config: RunConfig, folder: RunFolder, state: RunState, clock: Clock) -> None:
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
def test_kept_trajectories(config: RunConfig, folder: RunFolder, state: RunState, keep: str, kinds: list[str]) -> None:
    config = RunConfig.model_validate(config.model_dump() | {"logging": {"trajectories": keep}})
    run, _ = plain_run(config, folder, state)
    for kind in ("train", "eval"):
        run.trajectory(Trajectory(id="t", environment="e", task_id="k"), kind)
    run.close()
    kept = [path for path in folder.trajectories.iterdir() if not is_index(path)]
    assert sorted(path.stem for path in kept) == kinds
    for path in kept:
        assert Trajectory.from_dict(json.loads(path.read_text())).task_id == "k"


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
    assert 0 < sum(str(folder.trajectories) in link for link in links) <= 2 * MOST_OPEN  # each with its index
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


def test_a_score_says_which_versions_played_for_it(config: RunConfig, folder: RunFolder, state: RunState) -> None:
    run, terminal = plain_run(config, folder, state)
    run.evaluation(10, "eval", 0.5, 8, 0.1, {10: 600})
    run.evaluation(20, "eval", 0.6, 8, 0.1, {20: 300, 21: 700})
    run.evaluation(30, "eval", 0.6, 8, 0.1, {29: 700})
    run.evaluation(40, "eval", 0.6, 8, 0.1)
    run.close()
    assert [score.played_by for score in run.state.evaluations] == [
        "",
        "played by versions 20 to 21, 70% by 21",
        "played by version 29",
        "",
    ]
    assert "0.600 ± 0.100 (standard error, n=8); played by versions 20 to 21, 70% by 21" in terminal.getvalue()
    rows = list(read_metrics(folder.metrics))
    found = [(row.get("eval/eval/oldest_version"), row.get("eval/eval/share_of_step")) for row in rows]
    assert found == [(10.0, 1.0), (20.0, 0.3), (29.0, 0.0), (None, None)]
