"""What a step was trained on is kept, and can be joined with the episodes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from forge_env.config import RunConfig
from forge_env.policy import Reply
from forge_env.run import Run, RunFolder
from forge_env.run.trained import TrainedEpisode, read_trained
from forge_env.trajectory import Trajectory, Turn
from forge_env.types import Message
from trainers.buffer.packed import pack
from trainers.buffer.types import Held, Reservation
from trainers.loop.record import batch_metrics, trained_row


@pytest.fixture
def config() -> RunConfig:
    return RunConfig.model_validate({"environment": {"name": "coding_rlvr"}})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "runs" / "first")


def episode(group: int, member: int | None, reward: float, seat: str = "") -> Trajectory:
    reply = Reply(Message(role="assistant"), [1, 2], [3, 4, 5], [-0.5] * 3, [7] * 3)
    name = f"train-{group}-{member}" + (f"/{seat}" if seat else "")
    return Trajectory(name, "env", "task", turns=[Turn([], reply)], reward=reward, group=group, member=member)


def test_a_step_says_which_episodes_it_was_trained_on(config: RunConfig, folder: RunFolder) -> None:
    advantages = [np.full(3, value, np.float32) for value in (0.5, -0.5)]
    groups = [
        pack([episode(4, 0, 1.0), episode(4, 2, 0.0)], advantages),
        pack([episode(5, 1, 1.0, "white"), episode(5, None, 0.0)], advantages),
    ]
    held = [Held(4 + place, 7, 6, 0.5, group, uses=1) for place, group in enumerate(groups)]
    folder.create()
    run = Run(config, folder)
    run.trained(8, trained_row(Reservation.of(8, held)))
    run.trained(9, trained_row(Reservation.of(9, held[:1])))
    run.not_trained(6, "dropped")
    run.trained(9, trained_row(Reservation.of(9, held[1:])))  # the run was set back, and trains the step again
    run.close()
    folder.release()
    trained = read_trained(folder.trained)
    assert sorted(trained.steps) == [8, 9]
    first, second = trained.steps[8]
    assert (first.group, first.task, first.version, first.staleness, first.uses) == (4, "task", 7, 1, 1)
    assert first.episodes == [TrainedEpisode("0", 1.0, 0.5, 3, 1, 0), TrainedEpisode("2", 0.0, -0.5, 3, 1, 0)]
    assert [own.member for own in second.episodes] == ["1/white", ""]
    assert [group.group for group in trained.steps[9]] == [5]
    assert trained.fates == {6: "dropped"}


def test_a_step_says_how_many_replies_were_cut() -> None:
    cut = episode(4, 0, 0.0)
    cut.turns[0].reply.stop_reason = "length"
    played = [cut, *(episode(4, member, 1.0) for member in (1, 2, 3))]
    group = pack(played, [np.full(3, value, np.float32) for value in (-0.75, 0.25, 0.25, 0.25)])
    batch = Reservation.of(8, [Held(4, 7, 6, 0.5, group, uses=1)])
    assert batch_metrics(batch.groups)["episode/cut_replies"] == 0.25


def test_damaged_lines_are_left_out(folder: RunFolder) -> None:
    folder.root.mkdir(parents=True)
    row = b'{"schema": 1, "step": %d, "groups": []}\n'
    folder.trained.write_bytes(row % 1 + b'[1]\n{"step": 2}\n\xff\n' + row % 3 + b'{"step": 1, "gro')
    assert sorted(read_trained(folder.trained).steps) == [1, 3]


@pytest.mark.parametrize(
    "change",
    [
        {"group": []},
        {"group": 10**30},
        {"staleness": "old"},
        {"task": None, "version": None},
        {"episodes": [["0", "much", 0.5, 3, 1, 0]]},
        {"episodes": [["0", 1.0, [], 3, 1, 0]]},
        {"episodes": [["0", 1.0, 0.5, 10**400, 1, 0]]},
        {"episodes": [["0", 1.0]]},
        {"episodes": 3},
    ],
)
def test_a_line_that_holds_something_else_is_left_out(change: dict[str, object], folder: RunFolder) -> None:
    group = {"group": 4, "task": "t", "version": 7, "staleness": 1, "uses": 1, "episodes": [["0", 1.0, 0.5, 3, 1, 0]]}
    folder.root.mkdir(parents=True)
    rows = [{"schema": 1, "step": step, "groups": [group]} for step in (1, 3)]
    rows[1:1] = [{"schema": 1, "step": 2, "groups": [{**group, **change}]}, {"step": math.inf, "groups": []}]
    folder.trained.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sorted(read_trained(folder.trained).steps) == [1, 3]
