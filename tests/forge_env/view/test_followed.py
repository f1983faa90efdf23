"""The memory for what is read from files is bounded, for each file and in total."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from forge_env.view import runs, timeline
from forge_env.view.runs import Runs, RunView
from tests.forge_env.view.made import training_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    training_run(root / "a", steps=3)
    for name in "bcd":
        shutil.copytree(root / "a", root / name)
    return root


def test_only_the_latest_runs_are_in_memory(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Runs(folder, tmp_path)
    for limit, expected in ((10**9, 4), (1, 1)):
        monkeypatch.setattr(runs, "MOST_HELD", limit)
        for name in "abcd":
            view = shown.get(name)
            assert view is not None
            assert view.config
            assert view.metrics
            assert view.trained.trained.steps
            assert view.size > (folder / name / "trained.jsonl").stat().st_size
        assert len(shown._open) == expected


@pytest.mark.parametrize(
    "event",
    [
        '"ph": "X", "ts": 1, "dur": 1NUMBER, "tid": 1, "name": "y"',
        '"ph": "X", "ts": 1NUMBER, "dur": 1, "tid": 1, "name": "y"',
        '"ph": "C", "ts": 1, "name": "y", "args": {"z": 1NUMBER}',
    ],
)
@pytest.mark.parametrize("zeros", ["0" * 400, "e999", "e300"])
def test_endless_numbers_of_a_timeline_are_damage(tmp_path: Path, event: str, zeros: str) -> None:
    (tmp_path / "timeline.json").write_text(f"{{{event.replace('NUMBER', zeros)}}},\n")
    shown = RunView(tmp_path).timeline
    assert (shown.damaged, shown.spans, shown.counters) == (1, {}, {})


def test_events_of_a_timeline_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MOST_EVENTS", 5)
    lines = [f'{{"ph": "b", "ts": 1, "cat": "x", "id": "{number}", "name": "y"}},' for number in range(50)]
    (tmp_path / "timeline.json").write_text("\n".join(lines) + "\n")
    shown = RunView(tmp_path).timeline
    assert len(shown._open) == 5


def test_only_changed_runs_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("")
    read: list[str] = []
    stat, start = os.stat, time.time()

    def counted(path: Any, **more: Any) -> os.stat_result:
        if Path(path).name != "metrics.jsonl":
            read.append(Path(path).parent.name)
        return stat(path, **more)

    def listing() -> tuple[list[str], set[str]]:
        read.clear()
        return shown.names()[0], set(read)

    monkeypatch.setattr(os, "stat", counted)
    monkeypatch.setattr(time, "time", lambda: start + 2 * runs.LIVE_S)
    shown = Runs(tmp_path, tmp_path)
    names, folders = listing()
    assert (set(names), folders) == ({"a", "b", "c"}, {"a", "b", "c"})
    assert listing()[1] == set()
    while not (again := listing())[1]:  # until the file system's clock ticks
        (tmp_path / "b" / "new").touch()
        os.utime(tmp_path / "b" / "new", (start + 5, start + 5))
        (tmp_path / "b" / "new").replace(tmp_path / "b" / "summary.json")
    assert again[1] == {"b"}
    assert again[0][0] == "b", "the newest is first"
    (tmp_path / "b").rename(tmp_path / "d")
    names, folders = listing()
    assert (names[0], set(names), folders) == ("d", {"a", "c", "d"}, {"d"})
    os.utime(tmp_path / "c" / "metrics.jsonl", (start + 7, start + 7))
    names, folders = listing()
    assert (names[0], folders) == ("c", {"c"}), "a run that was resumed after hours"
    monkeypatch.setattr(time, "time", lambda: start)
    os.utime(tmp_path / "a" / "metrics.jsonl", (start + 9, start + 9))
    assert listing() == (["a", *(name for name in names if name != "a")], {"a", "c", "d"}), (
        "files of live runs may grow"
    )
