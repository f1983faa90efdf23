"""`forge-env trajectory`: lists of recorded episodes, and single ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_env.cli.main import main
from forge_env.policy import Reply
from forge_env.trajectory import Trajectory, TrajectoryWriter, Turn
from forge_env.types import Message, call_tool
from tests.forge_env.test_trajectory import RECORD


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    reply = Reply(call_tool("add", a=3), [1, 2], [3], [-0.5], [0])
    said = Message(role="user", content="how much?\n\x1b[2J\ud800\rgone " + "x" * 3000)
    with TrajectoryWriter(tmp_path / "trajectories" / "train.jsonl") as writer:
        writer.write(
            Trajectory("first", "sums", "train-1", turns=[Turn([said], reply)], reward=0.5, metrics={"m": 1.0})
        )
        writer.write(Trajectory("second", "sums", "train-2", valid=False, error="the box\nwas lost"))
        writer.write(Trajectory("third", "sums", "train-3", truncated=True, truncation="turns"))
    (tmp_path / "trajectories" / "eval.jsonl").write_text(RECORD)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    return tmp_path


def test_all_episodes_of_a_folder_are_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trajectory", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a  arithmetic train-3  reward 1  4 turns, 4 sampled tokens  ended",
        "first  sums train-1  reward 0.5  1 turns, 1 sampled tokens  ended",
        "second  sums train-2  reward 0  0 turns  lost (the box was lost)",
        "third  sums train-3  reward 0  0 turns  truncated (turns)",
    ]


def test_one_episode_is_shown_in_full_and_moves_no_cursor(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "trajectories" / "train.jsonl"
    assert main(["trajectory", str(path), "first", "--full"]) == 0
    shown = capsys.readouterr().out
    assert "\nuser\n  how much?\n" in shown
    assert r"\x1b[2J\ud800\rgone " + "x" * 3000 + "\n" in shown
    assert "\nassistant\n  → add\n    a: 3\n" in shown
    assert "\x1b" not in shown
    assert shown.endswith("m 1\nended: reward 0.5\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trajectory", "nowhere"], "there is no nowhere"),
        (["trajectory", "{}", "fourth"], "has no episode 'fourth'"),
    ],
)
def test_missing_episodes(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main([word.format(folder) for word in words]) == 2
    assert message in capsys.readouterr().err


def test_a_damaged_line_is_told_and_the_others_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "trajectories" / "train.jsonl"
    path.write_bytes(b"garbage\n" + path.read_bytes())
    assert main(["trajectory", str(path)]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3
    assert "line 1 is not a trajectory" in err


def test_newer_records_are_skipped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "trajectories" / "train.jsonl"
    path.write_bytes(b'{"schema":99,"id":"later"}\n' + b"[" * 100_000 + b"\n" + path.read_bytes())
    for words in (["trajectory", str(folder)], ["export", "--format", "atif", str(path), str(folder / "out")]):
        assert main(words) == 0
        said = capsys.readouterr()
        assert "line 1: the trajectory has version 99" in said.err
        assert "update forge-env" in said.err
        assert "line 2 is not a trajectory" in said.err
        assert "later" not in said.out
