"""The index beside trajectories: short, complete whatever happened to it, and never in the way of the records."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_env import trajectory_index as module
from forge_env.errors import AgentError
from forge_env.policy import Reply
from forge_env.run.trajectories import TrajectoryFiles, recorded, rename
from forge_env.trajectory import Trajectory, TrajectoryWriter, Turn, read_trajectories
from forge_env.trajectory_index import IndexReader, IndexRow, encode, index_path, masked, scan
from forge_env.types import FunctionCall, Message, ToolCall
from tests.forge_env.test_trajectory import RECORD, trajectories


def played(group: int, member: int = 0, **changes: Any) -> Trajectory:
    """An episode of a run, as its worker records it."""
    call = ToolCall(id="call_0", function=FunctionCall(name="python", arguments='{"code": "1 + 1"}'))
    question = Message(role="user", content="What is 1 + 1? Call python, then answer in a ```text block.")
    turns = [
        Turn(
            [question],
            Reply(Message(role="assistant", tool_calls=[call]), [1] * 40, [2] * 8, [-0.5] * 8, [3] * 8),
            generate_s=0.5,
            step_s=0.25,
            calls_s=[0.2],
        ),
        Turn(
            [Message(role="tool", content="2", tool_call_id="call_0", name="python")],
            Reply(Message(role="assistant", content="It is 2."), [4] * 9, [5] * 4, [-0.1] * 4, [4] * 4, continues=48),
            generate_s=0.25,
        ),
    ]
    figures: dict[str, Any] = {
        "reward": 0.75,
        "answer": "```text\n2\n```",
        "metrics": {"solved": 1.0, "turns": 2.0, "tool_calls": 1.0, "tool_errors": 0.0},
        "terminated": True,
        "wall_s": 1.2345,
        "tags": ["sums"],
        "started": 1_763_898_302.123,
    }
    names = {"id": f"train-{group}-{member}", "environment": "arithmetic", "task_id": "train-7"}
    return Trajectory(**{**names, "turns": turns, "group": group, "member": member, **figures, **changes})


def rows(path: Path) -> list[IndexRow]:
    return sorted(IndexReader(path).news(), key=lambda row: row.offset)


def record_at(path: Path, row: IndexRow) -> Any:
    return json.loads(path.read_bytes()[row.offset : row.end])


def test_a_row_holds_what_a_list_shows(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    with TrajectoryWriter(path) as writer:
        writer.write(played(12, 3))
    assert rows(path) == [
        IndexRow(
            offset=0,
            length=path.stat().st_size,
            id="train-12-3",
            environment="arithmetic",
            task="train-7",
            split="train",
            group=12,
            member=3,
            reward=0.75,
            metrics={"solved": 1},
            turns=2,
            calls={"python": 1},
            tokens=12,
            context=61,
            wall_s=1.2345,
            generate_s=0.75,
            step_s=0.25,
            started=1_763_898_302.1,
            oldest=3,
            newest=4,
            tags=["sums"],
            answer="2",
            read="#",
        )
    ]
    assert (rows(path)[0].num_calls, rows(path)[0].end) == (1, path.stat().st_size)


@pytest.mark.parametrize(
    ("change", "outcome", "why"),
    [
        ({}, "ended", ""),
        ({"truncated": True, "truncation": "tool_calls"}, "limit", "tool_calls"),
        ({"valid": False, "error": "SandboxError: it died: badly"}, "lost", "SandboxError"),
        ({"valid": False, "error": "no idea"}, "lost", "Error"),
    ],
)
def test_outcomes_are_told_apart(tmp_path: Path, change: dict[str, Any], outcome: str, why: str) -> None:
    with TrajectoryWriter(tmp_path / "a.jsonl") as writer:
        writer.write(played(1, **change))
    (row,) = rows(tmp_path / "a.jsonl")
    assert (row.outcome, row.why) == (outcome, why)


def test_a_sample_of_an_evaluation_has_its_task_as_group_and_its_epoch_as_member(tmp_path: Path) -> None:
    info = {"index": 4, "epoch": 1, "max_reward": 2.0, "usage": {"completion": 30, "cost": 0.125}}
    sample = played(0, id="arithmetic/eval/4/1", split="eval", info=info, turns=[])
    sample.group = sample.member = None
    with TrajectoryWriter(tmp_path / "eval.jsonl") as writer:
        writer.write(sample)
    (row,) = rows(tmp_path / "eval.jsonl")
    assert (row.environment, row.split, row.group, row.member) == ("arithmetic", "eval", 4, 1)
    assert (row.best, row.tokens, row.cost, row.turns) == (2.0, 30, 0.125, 0)


@given(episodes=st.lists(trajectories(), max_size=4))
def test_index_and_records_give_equal_rows(
    episodes: list[Trajectory], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("index") / "a.jsonl"
    with TrajectoryWriter(path) as writer:
        for episode in episodes:
            writer.write(episode)
    indexed = rows(path)
    assert [record_at(path, row)["id"] for row in indexed] == [row.id for row in indexed]
    assert [row.id for row in indexed] == [episode.id for episode in episodes]
    index_path(path).unlink()
    made = rows(path)
    assert [encode(row) for row in made] == [encode(row) for row in indexed]


@given(
    keep=st.lists(st.sampled_from(["keep", "drop", "damage", "swap"]), min_size=5, max_size=5),
    half=st.booleans(),
    part=st.sampled_from([1, 500, module.PART]),
)
def test_rows_of_any_index(keep: list[str], half: bool, part: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("index") / "a.jsonl"
    with TrajectoryWriter(path) as writer:
        for number in range(5):
            writer.write(played(number))
    whole = rows(path)
    assert len(whole) == 5
    kept: list[bytes] = []
    for line, what in zip(index_path(path).read_bytes().splitlines(keepends=True), keep, strict=False):
        if what == "swap":
            kept.insert(0, line)
        elif what == "damage":
            kept.append(line[: len(line) // 2] + b"\n")
        elif what == "keep":
            kept.append(line)
    index_path(path).write_bytes(b"".join(kept) + (b"[1,0" if half else b""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PART", part)
        assert rows(path) == whole


def test_a_folder_from_before_is_read_and_goes_on_with_an_index(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(RECORD * 2, encoding="utf-8")
    (first, _) = rows(path)
    assert (first.id, first.tokens, first.context, first.oldest, first.newest) == ("a", 4, 6, 7, 8)
    with TrajectoryWriter(path) as writer:
        writer.write(played(3))
    assert [row.id for row in rows(path)] == ["a", "a", "train-3-0"]
    assert index_path(path).read_bytes().count(b"\n") == 1


def test_a_truncated_tail_costs_its_row_only(tmp_path: Path) -> None:
    """A machine that lost power has rows of records that it never wrote; what comes after lies where they were."""
    path = tmp_path / "train.jsonl"
    with TrajectoryWriter(path) as writer:
        for number in range(4):
            writer.write(played(number))
    reader = IndexReader(path)
    second = [row.end for row in reader.news()][1]
    os.truncate(path, second + 100)
    with TrajectoryWriter(path) as writer:
        writer.write(played(77, reward=0.123456, answer="longer than what was there"))
    assert [row.id for row in rows(path)] == ["train-0-0", "train-1-0", "train-77-0"]
    assert [row.id for row in reader.news()] == ["train-0-0", "train-1-0", "train-77-0"]
    assert reader.begun_anew
    assert [item.id for item in read_trajectories(path)] == ["train-0-0", "train-1-0", "train-77-0"]


def test_a_reader_is_given_what_came_since(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    reader = IndexReader(path)
    assert list(reader.news()) == []  # it isn't there yet
    with TrajectoryWriter(path) as writer, TrajectoryWriter(path) as another:
        writer.write(played(0))
        assert [row.id for row in reader.news()] == ["train-0-0"]
        assert list(reader.news()) == []
        another.write(played(1))
        writer.write(played(2))
        assert [row.id for row in reader.news()] == ["train-1-0", "train-2-0"]
        with path.open("ab") as file:
            file.write(b'{"half')
        assert list(reader.news()) == []
        another.write(played(3))
        assert [row.id for row in reader.news()] == ["train-3-0"]
    assert not reader.begun_anew
    assert reader.covered == path.stat().st_size


def test_what_is_no_record_has_a_row_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"id": 1}\n\xff\xfe\n[]\n' + b'"' * 100_000 + b"\n")
    with TrajectoryWriter(path) as writer:
        writer.write(played(0))
    found = rows(path)
    assert [row.outcome for row in found] == ["unreadable"] * 4 + ["ended"]
    assert "KeyError" in found[0].why
    assert [row.length for row in found[:3]] == [10, 3, 3]


def test_figures_that_are_none_are_read_back_as_such(tmp_path: Path) -> None:
    with TrajectoryWriter(tmp_path / "a.jsonl") as writer:
        writer.write(played(0, reward=math.inf, metrics={"solved": math.nan, "speed": 2.0}))
    (row,) = rows(tmp_path / "a.jsonl")
    assert math.isnan(row.reward)
    assert row.metrics == {"speed": 2}
    assert None in json.loads(index_path(tmp_path / "a.jsonl").read_bytes())


def test_a_full_disk_holds_rows_with_their_records(tmp_path: Path) -> None:
    room = True

    def disk(file: int, content: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "no room")
        return os.write(file, content)

    path = tmp_path / "a.jsonl"
    with TrajectoryWriter(path, write=disk, most_held=3_000) as writer:
        writer.write(played(0))
        room = False
        for number in range(1, 6):
            writer.write(played(number))
        assert writer.dropped
        assert len(rows(path)) == 1
        room = True
        writer.write(played(9))
        writer.dropped = 0  # they are known to be lost
    assert [row.id for row in rows(path)] == [item.id for item in read_trajectories(path)]
    assert rows(path) == list(scan(path))


def test_the_index_goes_with_its_file(tmp_path: Path) -> None:
    for kind, host in (("eval-00010", ""), ("eval-00010.7.partial", ""), ("eval-00010.7.partial", "1-b")):
        files = TrajectoryFiles(tmp_path, pytest.fail, pytest.fail, host)
        files.write(played(len(kind)), kind)
        files.close()
    rename(tmp_path, "eval-00010.7.partial", "eval-00010")
    names = ["eval-00010-1-b.index.jsonl", "eval-00010-1-b.jsonl", "eval-00010.index.jsonl", "eval-00010.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert [row.group for row in rows(tmp_path / "eval-00010.jsonl")] == [20]
    assert sorted(path.name for path in recorded(tmp_path, "eval-00010")) == [names[1], names[3]]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("0/2 passed\nf(3) returned 4", "0/n passed"),
        ("2/2 passed", "n/n passed"),
        ("1/2 passed", "k/n passed"),
        ("\n  exit code 17 after 3.5 s", "exit code # after # s"),
        ("", ""),
        ("no number", "no number"),
    ],
)
def test_texts_that_differ_in_numbers_alone_are_alike(text: str, shown: str) -> None:
    assert masked(text) == shown


@given(st.text(max_size=400))
def test_a_mask_is_short_and_one_line(text: str) -> None:
    assert len(masked(text)) <= 64
    assert "\n" not in masked(text)


def test_an_agent_that_crashed_is_an_outcome_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    with TrajectoryWriter(path) as writer:
        crashed = played(1, 0)
        crashed.crash(AgentError("half raised KeyError: 'x' [half, agents.py:30]"))
        writer.write(crashed)
        writer.write(played(1, 1, reason="failed hidden tests", failures=["f(2) returned 3, expected 4"]))
    one, two = rows(path)
    assert (one.outcome, one.reward, two.outcome, two.reason) == ("crashed", 0, "ended", "failed hidden tests")
