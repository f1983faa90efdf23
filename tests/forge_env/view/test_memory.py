"""What is read from files is dropped again when other files need the memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from forge_env.view import memory, runs, timeline
from forge_env.view.memory import SMALLEST, Memory
from forge_env.view.runs import Runs, RunView
from tests.forge_env.view.made import training_run


def test_the_least_recently_used_file_is_dropped(tmp_path: Path) -> None:
    held = Memory(3 * SMALLEST)
    dropped: list[str] = []
    for name in ("a", "b", "c", "a", "d"):
        (tmp_path / name).touch()
        held.use(name, tmp_path / name, lambda name=name: dropped.append(name))  # type: ignore[misc]
    assert dropped == ["b"]
    with (tmp_path / "large").open("wb") as file:
        file.truncate(100 * SMALLEST)
    held.use("large", tmp_path / "large", lambda: dropped.append("large"))
    assert dropped == ["b", "c", "a", "d"]
    held.use("large", tmp_path / "large", lambda: None, most=SMALLEST)
    held.use("none", tmp_path / "none", lambda: None)
    held.use("a", tmp_path / "a", lambda: None)
    assert dropped == ["b", "c", "a", "d"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    training_run(root / "a", steps=3)
    for name in "bcd":
        shutil.copytree(root / "a", root / name)
    return root


def test_only_the_latest_runs_are_in_memory(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Memory(3 * SMALLEST)
    for module in (memory, runs):
        monkeypatch.setattr(module, "TABLES", small)
    shown = Runs(folder, tmp_path)
    views = [view for name in "abcd" if (view := shown.get(name)) is not None]
    before = [(view.metrics, view.trained.trained.steps) for view in views]
    assert all(metrics and steps for metrics, steps in before)
    held = [view for view in views if view._metrics._rows or view._trained.trained.steps]
    assert views[-1] in held
    assert len(held) <= 2
    assert [(view.metrics, view.trained.trained.steps) for view in views] == before, "they are read again"


def test_documents_of_many_runs_are_not_all_in_memory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "DOCUMENTS", Memory(2 * SMALLEST))
    monkeypatch.setattr(runs, "_read", {})
    shown = Runs(folder, tmp_path)
    for name in "abcd":
        view = shown.get(name)
        assert view is not None
        assert view.config
        assert view.summary
    assert len(runs._read) <= 2


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
