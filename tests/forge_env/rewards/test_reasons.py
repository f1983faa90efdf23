"""Why an episode scored less than all: from what judges it to the record."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forge_env as fe
from forge_env.errors import AgentError, EnvironmentBugError
from forge_env.rewards import explain
from forge_env.rewards.reasons import LONGEST_FAILURE, LONGEST_REASON, MOST_FAILURES, explanation
from forge_env.rollout.scripted import ReplayPolicy

TASK = fe.Task(id="0", prompt="What is 6 * 7?", gold="42")


def one_turn(function: Any, **options: Any) -> type[fe.SingleTurnEnvironment]:
    class Asked(fe.SingleTurnEnvironment):
        rubric = fe.Rubric(function, **options)

        def task(self, split: str, index: int) -> fe.Task:
            return TASK

    return Asked


async def play(function: Any, answer: str, **options: Any) -> fe.Trajectory:
    return await fe.run_episode(one_turn(function, **options), ReplayPolicy([answer]), task=TASK)


async def test_a_judges_reason_is_in_the_record_unless_the_reward_is_full() -> None:
    wrong, right = [await play(fe.rewards.exact_match, answer) for answer in ("41", "42")]
    assert (wrong.reason, wrong.failures) == ("wrong answer", ["expected '42', got '41'"])
    assert (right.reason, right.failures) == ("", [])
    assert fe.Trajectory.from_dict(wrong.to_dict()).failures == wrong.failures
    assert "failures" not in right.to_dict()
    assert (await play(fe.rewards.exact_match, " ")).reason == "no answer"


async def test_the_first_weighted_function_names_the_reason_and_metrics_none() -> None:
    def first(answer: str) -> float:
        explain("too short", ["3 of 5 words"])
        return 0.5

    async def second(answer: str) -> float:
        explain("impolite", ["no please"])
        return 0.0

    def measured(answer: str) -> float:
        explain("a metric's")
        return 0.0

    played = await play([first, second], "x", metrics=[measured])
    assert (played.reason, played.failures) == ("too short", ["3 of 5 words", "no please"])


@given(st.text(), st.lists(st.text(max_size=2_000), max_size=30))
def test_what_is_kept_is_bounded(reason: str, failures: list[str]) -> None:
    explain(reason, failures)  # outside an episode: nothing happens
    with explanation() as kept:
        explain(reason, iter(failures))
    assert len(kept.reason) <= LONGEST_REASON
    assert len(kept.failures) <= MOST_FAILURES
    assert all(len(line) <= LONGEST_FAILURE + 60 for line in kept.failures)
    "".join([kept.reason, *kept.failures]).encode()


async def test_a_judge_whose_own_policy_crashes_is_a_bug_and_no_crash_of_the_agent() -> None:
    def judged(answer: str) -> float:
        raise AgentError("the judge's function raised")

    with pytest.raises(EnvironmentBugError, match="the judge's function raised"):
        await play(judged, "42")


@pytest.mark.parametrize(
    ("answer", "reason", "failure"),
    [
        ("<answer>41</answer>", "wrong answer", "expected '42', got '41'"),
        ("<answer>\\sqrt{2}</answer>", "wrong answer", "expected '42', got '\\\\sqrt{2}'"),
        ("It may be 42.", "no answer is marked", "expected '42'"),
        ("", "no answer", "expected '42'"),
    ],
)
async def test_mathematics_says_what_was_expected(answer: str, reason: str, failure: str) -> None:
    played = await play(fe.rewards.MathReward(), answer)
    assert (played.reason, played.failures) == (reason, [failure])
