"""Answers are right by two ways; the tools answer whatever they are given."""

from __future__ import annotations

import sqlite3
from random import Random
from typing import Any

import pytest

import forge_env as fe
from environments.data_analysis import DataAnalysis
from environments.data_analysis.environment import final_answer
from environments.data_analysis.questions import KINDS
from environments.data_analysis.shop import draw_shop
from forge_env.errors import ConfigError
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import GoldPolicy
from forge_env.sandbox import SandboxEngine
from forge_env.validation.checks import Validator
from tests.sandboxes.conftest import WITH_SLOW_DOCKER, engine_fixture

pytestmark = pytest.mark.asyncio(loop_scope="module")


engine = engine_fixture(*WITH_SLOW_DOCKER, concurrency=4, warm=2)


async def start(engine: SandboxEngine, **options: Any) -> DataAnalysis:
    env = fe.make("data_analysis", sandboxes=engine, **options)
    assert isinstance(env, DataAnalysis)
    await env.reset(options={"split": "train", "index": 0})
    return env


@pytest.mark.parametrize("kind", list(KINDS))
async def test_python_and_sql_agree_on_the_answer(kind: str) -> None:
    asked = 0
    for seed in range(16):
        shop = draw_shop(str(seed))
        question = KINDS[kind](Random(seed), shop)
        if question is None:
            continue
        asked += 1
        connection = sqlite3.connect(":memory:")
        connection.deserialize(shop.database())
        [(value,)] = connection.execute(question.query).fetchall()
        connection.close()
        if isinstance(value, str):
            assert value == question.answer
        else:
            assert float(value) == pytest.approx(float(question.answer), abs=0.005)
    assert asked > 4


async def test_an_episode_with_both_tools(engine: SandboxEngine) -> None:
    env = await start(engine, kinds=["customers_of_city"])
    task = env.current_task
    observation, *_ = await env.step(fe.call_tool("sql", query=task.data["query"]))
    assert observation[0].content == f"COUNT(*)\n{task.data['answer']}\n"
    code = f"import sqlite3\nprint(sqlite3.connect('shop.db').execute({task.data['query']!r}).fetchone()[0])"
    observation, *_ = await env.step(fe.call_tool("python", code=code))
    assert observation[0].content == f"{task.data['answer']}\n"
    _, reward, terminated, _, info = await env.step(f"<answer> {task.data['answer']}.0 </answer>")
    assert (reward, terminated, info["metrics"]["answered"]) == (1.0, True, 1.0)
    await env.close()


async def test_what_the_tools_say_when_it_goes_wrong(engine: SandboxEngine) -> None:
    env = await start(engine, max_turns=20, wall_s=60.0, cpu_s=1.0)
    for tool, text, said in [
        ("sql", "SELECT * FROM nowhere", "OperationalError: no such table: nowhere"),
        ("sql", "DELETE FROM orders", "OperationalError: attempt to write a readonly database"),
        ("sql", "SELECT 1; SELECT 2", "can only execute one statement at a time"),
        ("sql", "", "the statement returned no rows"),
        ("sql", "SELECT NULL AS gap", "gap\nNULL\n"),
        ("sql", "SELECT id FROM orders", "[only the first 40 rows are shown]"),
        ("sql", "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT MAX(i) FROM n", "too long"),
        ("python", "x = 1", "[no output]"),
        ("python", "print(1)\n1 / 0", "1\n"),
        ("python", "1 / 0", "ZeroDivisionError"),
        ("python", "import os; os._exit(3)", "[exit code 3]"),
    ]:
        argument = {"sql": "query", "python": "code"}[tool]
        observation, _, terminated, truncated, _ = await env.step(fe.call_tool(tool, **{argument: text}))
        assert said in observation[0].content, text
        assert (terminated, truncated) == (False, False)
    await env.close()


async def test_gold_scores_and_other_answers_do_not(engine: SandboxEngine) -> None:
    for index in range(3):
        env = fe.make("data_analysis", sandboxes=engine)
        task = env.task("eval", index)
        make = lambda: fe.make("data_analysis", sandboxes=engine)  # noqa: E731
        assert (await run_episode(make, GoldPolicy(), task=task)).reward == 1.0
        for text in ("", str(task.data["answer"]), "<answer>-1</answer>", "<answer>nobody</answer>"):
            await env.reset(options={"task": task})
            assert (await env.step(text))[1] == 0.0
        await env.close()


@pytest.mark.slow
async def test_it_is_sound(engine: SandboxEngine) -> None:
    checks = [check async for check in Validator(lambda: fe.make("data_analysis", sandboxes=engine), num_tasks=5).run()]
    assert {check.status for check in checks} <= {"ok", "note"}, checks


async def test_reading_answers_and_options() -> None:
    assert final_answer("no <answer>1</answer> but <answer> 2 </answer>") == "2"
    assert final_answer("2") is None
    with pytest.raises(ConfigError, match="'guess' is not a valid kind"):
        fe.make("data_analysis", kinds=["guess"])
