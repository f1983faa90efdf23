"""Why an episode scored less than all: from what judges it to the record."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forge_env as fe
from forge_env.errors import AgentError, EnvironmentBugError
from forge_env.rewards import explain
from forge_env.rewards.reasons import (
    LONGEST_FAILURE,
    LONGEST_PART,
    LONGEST_REASON,
    MOST_FAILURES,
    explanation,
    score_lines,
)
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


async def test_a_single_failure_may_be_a_string() -> None:
    def wrong(completion: str) -> float:
        explain("wrong answer", "expected 42")
        return 0.0

    assert (await play(wrong, "41")).failures == ["expected 42"]


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


async def test_a_score_records_what_was_read_and_why() -> None:
    async def correct(completion: str, target: str, state: dict[str, Any]) -> fe.Score:
        state["read"] = completion[-2:]
        return fe.Score(
            float(completion[-2:] == target), completion[-2:], "the last two digits", {"digits": 2, "of": [1]}
        )

    def noted(state: dict[str, Any], info: dict[str, Any]) -> fe.Score:
        return fe.Score(float(state == info == {"read": "42"}))

    played = await play([correct, noted], "It is 42")
    metadata = {"digits": 2, "of": "[1]"}
    assert (played.reward, played.metrics["correct"]) == (2.0, 1.0)
    assert played.scores["correct"] == {"answer": "42", "explanation": "the last two digits", "metadata": metadata}
    assert fe.Trajectory.from_dict(played.to_dict()).scores == played.scores
    assert score_lines(played.scores)[0] == "correct: answer '42'; the last two digits; digits 2, of [1]"
    assert "scores" not in (await play(fe.rewards.exact_match, "42")).to_dict()
    damaged = {**played.to_dict(), "scores": {"correct": "42"}}
    with pytest.raises(TypeError, match="scores"):
        fe.Trajectory.from_dict(damaged)


async def test_a_score_without_a_finite_value_is_a_bug() -> None:
    with pytest.raises(EnvironmentBugError, match="'<lambda>' returned"):
        await play(lambda completion: fe.Score(float("nan")), "42")


async def test_group_functions_record_scores_too() -> None:
    def ranked(completions: list[str]) -> list[fe.Score]:
        return [fe.Score(0.5, explanation=f"one of {len(completions)}") for _ in completions]

    played = [await play(fe.rewards.exact_match, answer) for answer in ("41", "42")]
    await fe.Rubric(fe.rewards.exact_match, group=[ranked]).score_group(TASK, played)
    assert [episode.reward for episode in played] == [0.5, 1.5]
    assert played[0].scores == {"ranked": {"explanation": "one of 2"}}


@given(st.text(), st.text(), st.dictionaries(st.text(), st.recursive(st.none() | st.text() | st.floats(), st.lists)))
def test_a_recorded_score_is_bounded_and_json(answer: str, explanation: str, metadata: dict[str, Any]) -> None:
    huge = {**metadata, "x" * 9_000: 10**5_000, "nan": float("nan")}
    recorded = fe.Score(0.0, 50 * answer, explanation, huge).bounded()
    assert len(json.dumps(recorded, allow_nan=False)) < 12 * 20 * 2 * LONGEST_PART
    assert all(len(line) < 20 * 2 * LONGEST_PART for line in score_lines({"f": recorded}))


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
