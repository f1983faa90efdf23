"""Comparing keeps to the plan of both evaluations and refuses what played other tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import Field

import forge_env as fe
from forge_env.environment.base import EnvironmentConfig
from forge_env.environment.tool_environment import ToolEnvironmentConfig
from forge_env.errors import UsageError
from forge_env.evaluation.comparison import compare_folders
from tests.forge_env.evaluation.toys import Sums

NAME = f"{__name__}:Levels"


class LevelsConfig(ToolEnvironmentConfig):
    """Which sums."""

    levels: list[int] = Field(default_factory=lambda: [1])


class Levels(Sums):
    """Task ids alike at every level."""

    config_class: ClassVar[type[EnvironmentConfig]] = LevelsConfig
    splits = ("eval", "other")

    def task(self, split: str, index: int) -> fe.Task:
        task = super().task(split, index + 100 * (self.config.levels[0] - 1))
        return task.model_copy(update={"id": f"task-{index}"})


def played(out: Path, *, options: dict[str, Any] | None = None, **settings: Any) -> Path:
    fe.evaluate({"name": NAME, "label": "levels", "options": options or {}}, "gold", out=out, **settings)
    return out


@pytest.mark.parametrize(
    ("settings", "difference"),
    [
        ({"options": {"levels": [6]}}, r"levels \[1\] against \[6\]"),
        ({"split": "other"}, "split eval against other"),
        ({"seed": 7}, "seed 0 against 7"),
    ],
)
def test_other_tasks_are_refused(settings: dict[str, Any], difference: str, tmp_path: Path) -> None:
    a, b = played(tmp_path / "a"), played(tmp_path / "b", **settings)
    with pytest.raises(UsageError, match=f"not play the same tasks of levels: .*{difference}"):
        compare_folders(a, b)


@pytest.mark.parametrize("options", [{"levels": [1]}, {"max_turns": 3}, {"max_turns": 2, "levels": [1]}])
def test_options_that_change_no_task_may_differ(options: dict[str, Any], tmp_path: Path) -> None:
    found = compare_folders(played(tmp_path / "a"), played(tmp_path / "b", options=options)).environments["levels"]
    assert found.tasks == 12


def test_what_was_asked_for_last_is_compared(tmp_path: Path) -> None:
    a, b = played(tmp_path / "a", epochs=2), played(tmp_path / "b")
    played(tmp_path / "a", num_tasks=5, resume=True)
    found = compare_folders(a, b)
    difference = found.environments["levels"]
    assert (difference.tasks, found.only_b["levels"]) == (5, 7)


def test_comparing_imports_no_code_that_only_a_recipe_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = played(tmp_path / "a"), played(tmp_path / "b", options={"max_turns": 3})
    (tmp_path / "gift.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\nclass Levels: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    for folder in (a, b):
        config = folder / "config.yaml"
        config.write_text(config.read_text().replace(NAME, "gift:Levels" if folder == a else "gift:Other"))
    with pytest.raises(UsageError, match="gift:Levels against gift:Other"):
        compare_folders(a, b)
    config.write_text(config.read_text().replace("gift:Other", "gift:Levels"))
    with pytest.raises(UsageError, match="max_turns"):
        compare_folders(a, b)
    assert not (tmp_path / "imported").exists()
