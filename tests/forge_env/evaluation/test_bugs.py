"""What the environment's own code fails on is told apart from what infrastructure loses, and can't raise a score."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any, ClassVar

import pytest

import forge_env as fe
from forge_env.evaluation.progress import EnvironmentProgress, EvaluationProgress
from forge_env.evaluation.rescoring import rescore
from forge_env.evaluation.tables import markdown, tables


class Fragile(fe.SingleTurnEnvironment):
    """Its reward function fails on what is no number."""

    api_version = 1
    mended: ClassVar[bool] = False

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", split=split, prompt=str(index), gold=str(index))

    def num_tasks(self, split: str) -> int:
        return 40

    def reward(self, task: fe.Task, answer: str) -> float:
        if self.mended and not answer.isdigit():
            return 0.0
        return float(int(answer) == int(task.gold or ""))


def sometimes_wrong(messages: list[fe.Message], tools: Any) -> str:
    number = int(messages[-1].content)
    return "no idea" if number % 8 == 0 else str(number)


def mostly_wrong(messages: list[fe.Message], tools: Any) -> str:
    return "no idea" if int(messages[-1].content) % 4 else messages[-1].content


def test_both_scores_are_shown_and_the_bug_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = fe.evaluate(Fragile, sometimes_wrong, out=tmp_path / "out", show=True)
    item = result.summary.environments["Fragile"]
    assert (item.samples, item.bugs, item.invalid, item.missing) == (35, 5, {}, 0)
    assert (item.score.value, item.score_with_bugs.value) == (1.0, 0.875)
    assert (result.summary.status, result.error) == ("lossy", None)
    (scores, *_) = tables(result.summary)
    assert scores.columns[-2:] == ["bugs", "bugs as 0"]
    assert scores.rows[0][-2:] == ["5", "0.875 ± 0.053"]
    said = capsys.readouterr().err
    assert said.count("reward function 'reward' raised ValueError") == 1
    assert "[reward, " in said
    assert "test_bugs.py:" in said
    assert "environment bugs on 5 samples" in markdown(result.summary)


def test_bugs_are_shown_apart_while_it_goes_on() -> None:
    progress = EvaluationProgress("name", "model", environments={"Fragile": EnvironmentProgress(9, done=2, bugs=2)})
    assert progress.line().endswith("bugs in the environment: 2 Fragile")


def test_without_bugs_there_is_no_such_column(tmp_path: Path) -> None:
    result = fe.evaluate(Fragile, "gold", out=tmp_path / "out")
    item = result.summary.environments["Fragile"]
    assert (item.bugs, item.first_bug, item.score_with_bugs) == (0, None, None)
    assert "bugs" not in markdown(result.summary)


def test_frequent_bugs_end_the_run(tmp_path: Path) -> None:
    result = fe.evaluate(Fragile, mostly_wrong, out=tmp_path / "out", max_samples=1)
    assert result.error is not None
    assert "the environment's own code failed on 75% of the last 20 samples, the last time: " in str(result.error)
    assert "raised ValueError on task 'eval-19'" in str(result.error)
    assert result.summary.environments["Fragile"].missing == 20
    allowed = fe.evaluate(Fragile, mostly_wrong, out=tmp_path / "out", max_samples=1, max_bug_rate=1.0, resume=True)
    assert (allowed.error, allowed.summary.environments["Fragile"].bugs) == (None, 30)


def test_a_mended_scorer_scores_what_the_bug_had_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fe.evaluate(Fragile, sometimes_wrong, out=tmp_path / "out")
    same = asyncio.run(rescore(tmp_path / "out", tmp_path / "same", stream=io.StringIO()))
    assert same.result.summary.environments["Fragile"].bugs == 5
    monkeypatch.setattr(Fragile, "mended", True)
    mended = asyncio.run(rescore(tmp_path / "out", tmp_path / "mended"))
    item = mended.result.summary.environments["Fragile"]
    assert (item.samples, item.bugs, item.score.value, mended.unscored) == (40, 0, 0.875, {})
