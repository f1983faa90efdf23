"""Episodes: the tool's report, the final answer, the reward, what is never shown."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import pytest

import forge_env as fe
from environments.coding_rlvr import CodingRLVR, CodingRLVRConfig
from environments.coding_rlvr.conversation import as_answer, code_of
from environments.coding_rlvr.judging import wrong_codes
from environments.coding_rlvr.tasks import program_of
from forge_env.environment.optional import demonstrate
from forge_env.errors import ConfigError, SandboxError, UsageError
from forge_env.rollout.scripted import ReplayPolicy
from forge_env.types import Message
from tests.environments.coding_rlvr.fake_engine import FakeEngine


def call(code: str) -> Message:
    return fe.call_tool("python", code=code)


async def start(index: int = 0, engine: FakeEngine | None = None, **options: Any) -> tuple[CodingRLVR, FakeEngine]:
    engine = engine or FakeEngine()
    env = CodingRLVR(CodingRLVRConfig(**options), sandboxes=engine)
    await env.reset(options={"split": "train", "index": index})
    return env, engine


def wrong_answer(env: CodingRLVR) -> str:
    return as_answer("def f(*arguments):\n    return None")


def test_it_is_found_by_name() -> None:
    env = fe.make("coding_rlvr", levels=[1])
    assert isinstance(env, CodingRLVR)
    assert [tool.name for tool in env.tools] == ["python"]
    with pytest.raises(ConfigError, match="level"):
        fe.make("coding_rlvr", levels=[9])
    with pytest.raises(UsageError, match="no family"):
        fe.make("coding_rlvr", families=["nothing/"])


async def test_gold_scores_full_marks_and_wrong_and_empty_answers_none() -> None:
    for index in range(20):
        env, engine = await start(index)
        gold = env.current_task.gold
        assert gold is not None
        _, reward, terminated, truncated, info = await env.step(gold)
        assert (reward, terminated, truncated) == (1.0, True, False)
        assert info["metrics"]["solved"] == 1.0
        for answer in (wrong_answer(env), "", "I don't know.", "```python\nreturn (\n```"):
            await env.reset(options={"task": env.current_task})
            _, reward, terminated, _, info = await env.step(answer)
            assert (reward, terminated, info["metrics"]["solved"]) == (0.0, True, 0.0)
        assert engine.open == 0


async def test_the_tool_reports_public_tests_and_the_episode_goes_on() -> None:
    env, _ = await start()
    assert env.current_task.gold is not None
    observation, reward, terminated, truncated, _ = await env.step(call("def f(*arguments):\n    return None"))
    test = env.current_task.data["public"][0]
    assert observation[0].role == "tool"
    assert observation[0].content == f"0/2 passed\n{test['call']} returned None, expected {test['expected']}"
    assert (reward, terminated, truncated) == (0.0, False, False)
    code = code_of(env.current_task.gold)
    assert code is not None
    observation, *_ = await env.step(call(code))
    assert observation[0].content == "2/2 passed"
    _, reward, terminated, _, _ = await env.step(env.current_task.gold)
    assert (reward, terminated) == (1.0, True)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("def f(*arguments):\n    raise ValueError('no')", "raised ValueError: no"),
        ("def f(:", "failed: SyntaxError"),
        ("def g():\n    pass", "raised NameError"),
        ("print('hello')\ndef f(*arguments):\n    return 0.5", "printed: hello"),
    ],
)
async def test_what_goes_wrong_is_told(code: str, told: str) -> None:
    env, _ = await start()
    observation, *_ = await env.step(call(code))
    assert told in observation[0].content
    assert "0/2 passed" in observation[0].content


async def test_hidden_tests_are_never_shown_and_never_share_a_sandbox() -> None:
    for index in range(30):
        env, engine = await start(index)
        task = env.current_task
        seen, _ = await env.reset(options={"task": task})
        for code in wrong_codes(program_of(task))[:2]:
            observation, *_ = await env.step(call(code))
            seen += observation
        observation, *_ = await env.step(task.gold or "")
        seen += observation
        text = "\n".join(message.model_dump_json() for message in seen)
        hidden = [test["call"] for test in task.data["hidden"]]
        assert not any(json.dumps(test)[1:-1] in text for test in hidden)
        judging = [box for box in engine.handed_out if box.seen and box.seen[0][1] == hidden]
        assert len(judging) == 1
        assert len(judging[0].seen) == 1
        sent = {code_of(task.gold or ""), *wrong_codes(program_of(task))}
        assert {code for box in engine.handed_out for code, _ in box.seen} <= sent  # the code alone, nothing added


async def test_public_tests_alone_earn_nothing() -> None:
    env, _ = await start(levels=[1])
    table = {test["call"]: test["expected"] for test in env.current_task.data["public"]}
    lookup = ", ".join(f"{name!r}: {value}" for name, value in table.items())
    cheat = f"def f(*a):\n    return {{{lookup}}}.get('f(' + ', '.join(map(repr, a)) + ')')"
    observation, *_ = await env.step(call(cheat))
    assert observation[0].content == "2/2 passed"
    _, reward, *_ = await env.step(as_answer(cheat))
    assert reward == 0.0


async def test_a_share_of_the_reward_for_using_the_tool() -> None:
    env, _ = await start(tool_share=0.1)
    gold = env.current_task.gold or ""
    assert (await env.step(gold))[1] == pytest.approx(0.9)
    await env.reset(options={"task": env.current_task})
    await env.step(call("x = 1"))
    assert (await env.step(gold))[1] == pytest.approx(1.0)
    await env.reset(options={"task": env.current_task})
    assert (await env.step("no code, and nothing tried"))[1] == 0.0


async def test_an_answer_without_code_submits_what_was_tried_last() -> None:
    env, _ = await start()
    gold = code_of(env.current_task.gold or "")
    assert gold is not None
    await env.step(call("def f(*a): return None"))
    await env.step(call(gold))
    assert (await env.step("Done"))[1] == 1.0
    await env.reset(options={"task": env.current_task})
    assert (await env.step("Done"))[1] == 0.0, "the episode before has left its code behind"


async def test_code_in_the_answer_counts_rather_than_what_was_tried() -> None:
    env, _ = await start()
    gold = code_of(env.current_task.gold or "")
    assert gold is not None
    await env.step(call(gold))
    assert (await env.step(as_answer("def f(*a): return None")))[1] == 0.0


async def test_a_lost_sandbox_is_an_infrastructure_error_and_not_a_zero() -> None:
    env, engine = await start(engine=FakeEngine(lose=[1]))
    with pytest.raises(SandboxError):
        await env.step(env.current_task.gold or "")
    assert engine.open == 0


@pytest.mark.parametrize(
    ("returned", "written"),
    [
        ("10**5000", "<an integer of about 5001 digits>"),
        ("[10**5000] * 9", "[<an integer of about 5001 digits>"),
        ("'x' * 10**7", "'xxxxxxxxxx"),
        ("{10**9999: 'x'}", "{<an integer of about"),
    ],
)
async def test_whatever_code_returns_is_reported_in_a_line(returned: str, written: str) -> None:
    env, _ = await start()
    test = env.current_task.data["public"][0]
    observation, *_ = await env.step(call(f"def f(*arguments):\n    return {returned}"))
    assert observation[0].content.startswith(f"0/2 passed\n{test['call']} returned {written}")
    assert len(observation[0].content) < 200
    _, reward, *_ = await env.step("Done")
    assert reward == 0.0


async def test_code_is_never_run_without_sandboxes() -> None:
    env = CodingRLVR()
    await env.reset(options={"split": "train", "index": 0})
    with pytest.raises(UsageError, match="needs sandboxes"):
        await env.step(as_answer("def f(x):\n    return x"))


def test_the_last_block_is_the_answer() -> None:
    assert code_of("First:\n```python\na = 1\n```\nbetter:\n```py\nb = 2\n```\nDone.") == "b = 2"
    assert code_of("```\nc = 3\n```") == "c = 3"
    assert code_of("no code") is None


async def test_demonstrations_follow_the_format_and_are_often_wrong() -> None:
    env, _ = await start(demo_slip=0.6, demo_repair=0.5)
    solved, tools, count = 0, 0, 150
    for index in range(count):
        task = env.task("train", index)
        messages = demonstrate(env, task, Random(index))
        assert messages == demonstrate(env, task, Random(index))
        observation, _ = await env.reset(options={"task": task})
        assert messages[: len(observation)] == observation
        reward = 0.0
        rest = messages[len(observation) :]
        for place, message in enumerate(rest):
            if message.role == "assistant":
                observation, reward, terminated, *_ = await env.step(message)
                assert terminated == (place == len(rest) - 1)
            else:  # the demonstrator's report is what the tool says
                assert observation[0].content == message.content
        solved += reward == 1.0
        tools += len(rest) > 1
    assert 0.4 < solved / count < 0.9
    assert 0.7 < tools / count < 1.0


def test_held_out_tasks_are_not_demonstrated() -> None:
    env = CodingRLVR()
    for split in ("eval", "unseen"):
        with pytest.raises(UsageError, match="held out"):
            demonstrate(env, env.task(split, 0), Random(0))


def test_a_perfect_demonstrator_submits_gold() -> None:
    env = CodingRLVR(CodingRLVRConfig(demo_slip=0.0, demo_tool=0.0))
    task = env.task("train", 4)
    assert demonstrate(env, task, Random(0))[-1].content == task.gold


async def test_a_failure_says_what_was_handed_in_and_what_failed() -> None:
    wrong, engine = "def f(*arguments):\n    return None", FakeEngine()
    task = CodingRLVR(sandboxes=engine).task("eval", 0)

    async def played(*actions: Message | str) -> fe.Trajectory:
        return await fe.run_episode(lambda: CodingRLVR(sandboxes=engine), ReplayPolicy(actions), task=task)

    tried = await played(call(wrong), "Done")
    assert (tried.reason, len(tried.failures)) == ("handed in with failing visible tests", 6)
    assert all(re.fullmatch(r"f\(.*\) returned None, expected .+", failure) for failure in tried.failures)
    assert (await played(as_answer(wrong))).reason == "failed hidden tests"
    assert (await played("no code")).reason == "no code was handed in"
    assert (await played(call(code_of(task.gold or "") or ""), "Done")).reason == ""
