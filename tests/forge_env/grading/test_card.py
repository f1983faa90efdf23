"""The card of a grade, and what a recorded run adds to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_env.cli.grade import lines, too_low
from forge_env.cli.main import main
from forge_env.grading.recorded import recorded
from forge_env.grading.results import Grade, TaskGrade, Tried
from forge_env.validation.checks import Check
from forge_env.view.card import card

HOSTILE = "<script>alert(1)</script>\x1b[2J"


def made() -> Grade:
    weak = Tried("t-1", "train", "a.py", "boundary", 3, HOSTILE, "accepted", 1.0, test=f"assert f({HOSTILE!r})")
    doubt = Tried("t-2", "train", "answer", "off by one", 1, "1 -> 2", "undecided", 1.0, note="few inputs")
    good = [Tried("t-1", "train", "a.py", "operator", line, "a -> b", "rejected", 0.0) for line in range(18)]
    tasks = [TaskGrade("t-1", "train", [1.0] * 3), TaskGrade("t-2", "train", [1.0, 0.0], problem=f"flaky {HOSTILE}")]
    checks = [Check("failed", "cheats earn nothing", HOSTILE)]
    return Grade("my_env", {}, 1.0, checks=checks, tasks=tasks, tried=[weak, doubt, *good], seconds=61.0)


def test_the_page_holds_every_weak_task_and_escapes_texts() -> None:
    text = card(made())
    assert "my_env: 90.0 % rejected" in text
    assert "<script>alert" not in text
    assert "\x1b" not in text
    for part in ("t-1", "t-2", "boundary", "few inputs", "flaky", "cheats earn nothing", "assert f("):
        assert part in text


def test_terminals_get_no_control_characters() -> None:
    grade = made()
    grade.tried[0].task = grade.tried[0].piece = HOSTILE
    text = "\n".join(lines(grade))
    assert "\x1b" not in text
    assert "undecided: few inputs" in text


@pytest.mark.parametrize(("fail_under", "why"), [(None, ""), (0.0, "a check failed: cheats earn nothing")])
def test_a_failed_check_is_too_low(fail_under: float | None, why: str) -> None:
    assert too_low(made(), fail_under) == why


def test_a_task_with_a_problem_is_too_low() -> None:
    grade = made()
    grade.checks = []
    assert too_low(grade, 0.0).startswith("t-2: flaky <script>")
    assert "\x1b" not in too_low(grade, 0.0)


def test_without_wrong_versions_a_grade_is_too_low() -> None:
    assert too_low(Grade("my_env", {}, 1.0), 0.0) == "there are no wrong versions"


def episodes(tmp_path: Path) -> Path:
    rewards = {"t-1": [1.0, 0.0, 1.0, 1.0], "t-2": [0.0] * 4}
    rows = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}], "reward": reward}
        | {"id": f"{task}-{number}", "task_id": task}
        for task, scores in rewards.items()
        for number, reward in enumerate(scores)
    ]
    path = tmp_path / "episodes.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_a_recorded_run_has_difficulty_and_signal(tmp_path: Path) -> None:
    run = recorded(episodes(tmp_path), 1.0)
    assert (run.episodes, run.solved) == (8, {"t-1": (3, 4), "t-2": (0, 4)})
    assert [round(run.pass_at[k].value, 3) for k in (1, 2, 4)] == [0.375, 0.5, 0.5]
    assert run.signal.value == 0.5
    grade = made()
    grade.recorded = run
    assert "pass@4" in card(grade)
    assert "groups with signal" in "\n".join(lines(grade))
    assert grade.as_json()["recorded"]["solved"]["t-1"] == (3, 4)


def test_run_is_read_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("forge_env.cli.grade._grade", lambda *args: pytest.fail("graded"))
    (tmp_path / "run").mkdir()
    assert main(["grade", "calculator", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 2
    assert "  -> " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_judge_without_a_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grade", "calculator", "--judge", "a:b"]) == 2
    assert "--run" in capsys.readouterr().err
