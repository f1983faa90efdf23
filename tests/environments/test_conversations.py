"""Rows of a dataset as conversations: what is shown, what is learned, what is no conversation."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

import forge_env as fe
from forge_env.environment.optional import demonstrate
from forge_env.errors import UsageError
from forge_env.validation.checks import Validator

SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi", "name": None},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Thanks"},
    ]
}
ALPACA = {"instruction": "Add.", "input": "2 and 2", "output": "4"}
QUESTION = {"columns": {"prompt": "instruction", "gold": "output"}}


def make(folder: Path, row: dict[str, Any], dataset: dict[str, Any] | None = None, **options: Any) -> fe.Environment:
    (folder / "rows.jsonl").write_text(json.dumps(row))
    source = {"path": str(folder / "rows.jsonl"), "eval_fraction": 0.0, **(dataset or {})}
    return fe.make("conversations", dataset=source, **options)


def said(env: fe.Environment) -> list[tuple[str, str]]:
    messages = demonstrate(env, env.task("train", 0), Random(0))
    return [(message.role, message.content) for message in messages or []]


def test_conversations_of_either_format(tmp_path: Path) -> None:
    env = make(tmp_path, CHAT)
    assert said(env) == [
        ("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "2 + 2?"), ("assistant", "4")
    ]  # fmt: skip
    task = env.task("train", 0)
    assert (task.prompt, task.gold, len(task.history)) == ("2 + 2?", "4", 3)
    (tmp_path / "other").mkdir()
    env = make(tmp_path / "other", SHAREGPT, {"columns": {"messages": "conversations"}}, system="Be kind.")
    assert said(env) == [("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello")]


def test_questions_and_answers(tmp_path: Path) -> None:
    for row in (ALPACA, ALPACA | {"messages": None}):
        env = make(tmp_path, row, QUESTION, context="input")
        assert said(env) == [("user", "Add.\n\n2 and 2"), ("assistant", "4")]
    assert said(make(tmp_path, ALPACA, QUESTION)) == [("user", "Add."), ("assistant", "4")]


@pytest.mark.parametrize(
    ("row", "dataset", "problem"),
    [
        ({"instruction": "Add."}, {"columns": {"prompt": "instruction"}}, "there is no answer to learn"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, {}, "there is no answer to learn"),
        (
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "pope", "content": "x"}]},
            {},
            "not a message: role",
        ),
        ({"messages": []}, {}, "no column 'prompt'"),
    ],
)
def test_rows_that_hold_none(tmp_path: Path, row: dict[str, Any], dataset: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        said(make(tmp_path, row, dataset))


async def test_the_last_answer_scores_full_marks(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"{n}?", "gold": f"It is {n}."}) for n in range(9))
    )

    def env() -> fe.Environment:
        return fe.make("conversations", dataset={"path": str(tmp_path / "rows.jsonl"), "eval_fraction": 0.4})

    checks = [check async for check in Validator(env, num_tasks=3).run()]
    assert "failed" not in [check.status for check in checks], checks
