"""`forge-env export` of episodes: what it writes of a run, whatever reads it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from forge_env.cli.main import main
from forge_env.policy import Reply
from forge_env.trajectory import Trajectory, TrajectoryWriter, Turn
from forge_env.types import Message


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A run with three evaluations, each of the same two tasks."""
    reply = Reply(Message(role="assistant", content="42"))
    for step in (0, 10, 20):
        with TrajectoryWriter(tmp_path / "run" / "trajectories" / f"eval-{step:05}.jsonl") as writer:
            for number in range(2):
                turns = [Turn([Message(role="user", content="6 * 7?")], reply)]
                writer.write(Trajectory(f"eval-{number}", "sums", f"t{number}", turns=turns, reward=float(step)))
    return tmp_path / "run"


IDS = [f"eval-{step:05}/eval-{number}" for step in (0, 10, 20) for number in range(2)]


def test_episodes_of_all_evaluations_are_documents_of_their_own(source: Path, tmp_path: Path) -> None:
    assert main(["export", str(source), str(tmp_path / "out"), "--format", "atif"]) == 0
    read = {file.name: json.loads(file.read_text()) for file in sorted((tmp_path / "out").iterdir())}
    assert list(read) == [f"{each.replace('/', '_')}.json" for each in IDS]
    assert [each["session_id"] for each in read.values()] == IDS
    assert [each["extra"]["reward"] for each in read.values()] == [0.0, 0.0, 10.0, 10.0, 20.0, 20.0]


def test_episodes_of_all_evaluations_are_samples_of_their_own(source: Path, tmp_path: Path) -> None:
    assert main(["export", str(source), str(tmp_path / "out.eval"), "--format", "inspect"]) == 0
    with zipfile.ZipFile(tmp_path / "out.eval") as log:
        names = [name for name in log.namelist() if name.startswith("samples/")]
        samples = [json.loads(log.read(name)) for name in names]
        assert json.loads(log.read("header.json"))["eval"]["config"]["epochs"] == 3
    assert [each["uuid"] for each in samples] == IDS
    assert [(each["id"], each["epoch"]) for each in samples] == [
        (f"sums/t{number}", epoch) for epoch in (1, 2, 3) for number in range(2)
    ]


def test_an_id_of_one_file_is_left_as_it_is(source: Path, tmp_path: Path) -> None:
    file = source / "trajectories" / "eval-00010.jsonl"
    assert main(["export", str(file), str(tmp_path / "out"), "--format", "atif"]) == 0
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == ["eval-0.json", "eval-1.json"]
