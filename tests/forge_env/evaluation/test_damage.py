"""Records that something has damaged: each costs its own sample only."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forge_env as fe
from forge_env.evaluation.comparison import load
from tests.forge_env.evaluation.toys import Counted, Sums

N = 4
HIT = 1
"""The line that is damaged."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("damage") / "whole"
    fe.evaluate(Sums, Counted(2), num_tasks=N, out=out, max_samples=1)
    return out


def damaged(whole: Path, change: dict[bytes, bytes] | None = None, *, at: int = 0, byte: int = 0) -> Path:
    """A copy in which the line HIT has other words, or another byte."""
    out = whole.with_name("copy")
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(whole, out)
    path = out / "trajectories" / "eval.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    line = bytearray(lines[HIT])
    if change is None:
        line[at % (len(line) - 1)] = byte  # not the line feed, whose loss joins two records
    for old, new in (change or {}).items():
        assert old in line
        line = line.replace(old, new, 1)
    path.write_bytes(b"".join([*lines[:HIT], bytes(line), *lines[HIT + 1 :]]))
    return out


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(at=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_any_byte_costs_at_most_its_own_sample(whole: Path, at: int, byte: int) -> None:
    out = damaged(whole, at=at, byte=byte)
    again = fe.evaluate(Sums, Counted(2), num_tasks=N, out=out, score="exact_match", resume=True)
    assert again.summary.status == "complete"
    assert [sample.score for sample in again.samples if not sample.id.endswith(f"/{HIT}/0")] == [1.0] * (N - 1)
    load(out)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"completion":', b'"compleuion":'),
        (b'"usage":{"prompt"', b'"usagf":{"prompt"'),
        (b'"environment":"Sums"', b'"environment":"Rums"'),
        (b'"id":"Sums/eval/1/0"', b'"id":"Sums/eval/3/0"'),
        (b'"index":1', b'"index":2'),
        (b'"exact_match"', b'"exact_mbtch"'),
        (b'"tags":["all"', b'"tags":["\\ud83d"'),
        (b'"retries":0', b'"retries":1' + b"0" * 400),
        (b'"wall_s":', b'"wall_s":1' + b"0" * 400),
        (b'"reward":1.0', b'"reward":1e200'),
        (b'"usage":{"prompt":', b'"usage":{"prompt":1e999,"cost":'),
        (b'"difficulty":', b'"difficulty":9223372036854775808'),
    ],
)
def test_what_still_reads_as_a_trajectory_is_noted_as_damage(old: bytes, new: bytes, whole: Path) -> None:
    out = damaged(whole, {old: new})
    before = (out / "trajectories" / "eval.jsonl").read_bytes()
    again = fe.evaluate(Sums, Counted(2), num_tasks=N, out=out, score="exact_match", resume=True)
    assert (again.summary.status, len(again.samples)) == ("complete", N)
    added = (out / "trajectories" / "eval.jsonl").read_bytes().removeprefix(before)
    assert added.count(b"\n") == 1
    assert b"Sums/eval/1/0" in added
    assert "eval.jsonl" in (out / "run.log").read_text()
