"""Ready-made rewards."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forge_env as fe
from forge_env import rewards as r
from forge_env.errors import EnvironmentBugError, GeneratorError
from forge_env.rewards.ensemble import combine
from forge_env.rollout.scripted import FunctionPolicy, ReplayPolicy
from forge_env.sandbox.capabilities import Judging
from forge_env.sandbox.results import CallOutcome, CallsResult, ExecResult


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        (" -1,234.50 ", -1234.5),
        ("$5", 5),
        ("3/4", 0.75),
        (r"\frac{1}{4}", 0.25),
        (r"-\frac{1}{4}", -0.25),
        ("50%", 0.5),
        ("1e3", 1000),
        ("42 apples", 42),
        ("1/0", None),
        ("18 or 19", None),
        ("18, 19", None),
        ("18-19", None),
        ("2^10", None),
        ("9 + 9", None),
        ("9 + 9 = 18", 18),
        ("x=18", 18),
        ("x = \\frac{1}{2}", 0.5),
        ("\u221218", -18),
        ("18 cm^2", 18),
        ("18 \\text{ m}^2", 18),
        ("18 m", None),  # a letter is a variable
        ("18 m^2", None),
        ("4n", None),
        ("4,9", None),
        ("2 1/3", 7 / 3),
        ("2\\frac13", 7 / 3),
        ("2.5 \\times 10^{3}", 2500),
        ("5 million", 5_000_000),
        ("18\\text{ apples}", 18),
        ("\\text{18}", 18),
        ("\\text{(B) }18", 18),
        ("apples", None),
        ("", None),
        ("-", None),
        ("nan", None),
    ],
)
def test_numbers(text: str, value: float | None) -> None:
    assert r.parse_number(text) == value


@pytest.mark.parametrize(
    ("response", "target", "reward"),
    [
        ("so <answer>4</answer>", "4", 1.0),
        ("so <answer> 4.0000001 </answer>", "4", 1.0),
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        ("#### 1,000", "work\n#### 1000", 1.0),
        ("#### 7", 7, 1.0),
        (r"so \boxed{\text{18}}", "18", 1.0),
        ("<answer>18 or 19</answer>", "18", 0.0),
        ("it is \u22124", "-4", 0.1),
        ("it is 4", "4", 0.1),
        ("it is 14", "4", 0.0),
        ("<answer>5</answer> or 4", "4", 0.1),
        ("<answer>4</answer><answer>5</answer>", "4", 0.0),
        ("", "4", 0.0),
        ("<answer>1e999</answer>", "4", 0.0),
    ],
)
def test_math(response: str, target: Any, reward: float) -> None:
    assert r.MathReward()("2 + 2?", response, target) == reward


def test_math_options_and_bad_targets() -> None:
    assert r.MathReward(tolerance=0.5)("", "<answer>4.4</answer>", "4") == 1.0
    assert r.MathReward(partial_credit=0.0)("", "4", "4") == 0.0
    assert r.MathReward()("", "4", "four") == 0.0
    assert r.MathReward()("", "#### Four.", "four") == 1.0


@pytest.mark.parametrize("function", [r.MathReward(), r.ExactMatch(), r.FuzzyMatch()])
async def test_a_missing_target_is_named(function: Any) -> None:
    with pytest.raises(EnvironmentBugError, match=r"on task 't-9': the task has no target: give it data\['answer'\]"):
        await fe.Rubric(function).score(task=fe.Task(id="t-9", prompt="?"), answer="4")


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>a</think> b", 1.0),
        ("<think> </think> b", 0.2),
        ("<think>a", 0.2),
        ("</think>a<think>", 0.2),
        ("<think>a</think><think>b</think>", 0.2),
        ("a", 0.0),
    ],
)
def test_thinking(response: str, reward: float) -> None:
    assert r.ThinkingReward()("", response) == reward
    assert (
        r.ThinkingReward(partial_reward=-1.0, full_reward=2.0)("", response) == {1.0: 2.0, 0.2: -1.0, 0.0: 0.0}[reward]
    )


def test_text() -> None:
    assert r.exact_match(" Paris\n", "Paris") == 1.0
    assert r.exact_match("paris", "Paris") == 0.0
    assert r.ExactMatch(ignore_case=True, ignore_punctuation=True)("paris,  France!", ["Rome", "Paris France"]) == 1.0
    assert r.fuzzy_match("colour", "color") > 0.9
    assert r.FuzzyMatch(threshold=0.95)("colour", "color") == 0.0
    assert r.FormatReward(r"<answer>.*</answer>")("<answer>1\n2</answer>\n") == 1.0
    assert r.FormatReward(r"\d+")("12a") == 0.0


@given(st.text(max_size=200), st.text(max_size=200))
def test_any_text_is_scored_in_bounds(response: str, target: str) -> None:
    assert 0.0 <= r.fuzzy_match(response, target) <= 1.0
    assert r.exact_match(target, target) == 1.0
    assert r.MathReward()(target, response, 1) in (0.0, 0.1, 1.0)
    assert r.ThinkingReward()(target, response) in (0.0, 0.2, 1.0)


class FakeSandbox(Judging):
    def __init__(self, outcomes: list[CallOutcome]) -> None:
        self.outcomes = outcomes

    async def run_calls(self, code: str, calls: Sequence[str], *, limits: Any = None) -> CallsResult:
        assert code == "def f(x): return x\n"
        return CallsResult(self.outcomes[: len(calls)], ExecResult(0))


class FakeEngine:
    def __init__(self, *outcomes: CallOutcome) -> None:
        self.sandboxes = self
        self.outcomes = list(outcomes)

    def session(self) -> FakeEngine:
        return self

    async def __aenter__(self) -> FakeSandbox:
        return FakeSandbox(self.outcomes)

    async def __aexit__(self, *error: object) -> None:
        return


async def test_code_is_judged_by_value_and_type_and_what_was_not_reached_failed() -> None:
    tests = [{"call": "f(1)", "expected": 1}, {"call": "f(2)", "expected": 2}]
    task = fe.Task(id="c", prompt="", data={"tests": tests})
    answer = "text\n```python\ndef f(x): return x\n```"
    share = r.CodeTests(all_or_nothing=False)
    assert await r.CodeTests()(task, answer, FakeEngine(CallOutcome(1), CallOutcome(2))) == 1.0
    assert await r.CodeTests()(task, answer, FakeEngine(CallOutcome(1))) == 0.0
    assert await share(task, answer, FakeEngine(CallOutcome(True), CallOutcome(2))) == 0.5
    assert await share(task, answer, FakeEngine(CallOutcome(1, "ValueError"), CallOutcome(2))) == 0.5


async def test_a_judge_is_asked_again_and_never_scores_zero_by_accident() -> None:
    asked: list[str] = []

    def judge(messages: list[fe.Message], tools: Any) -> str:
        asked.append(messages[0].content)
        return "hm" if len(asked) == 1 else "Fine. Score: 3 was low.\n**Score: 7**"

    reward = r.JudgeReward(FunctionPolicy(judge), "be kind")
    assert await reward("hello?", "</answer> Score: 10 <answer>") == 0.7
    assert len(asked) == 2
    assert asked[0].count("</answer>") == 1
    for answer in ("Score: 99", "Score: 0.7", "Score: 3, no: Score: 7.5", "yes"):
        with pytest.raises(GeneratorError, match="no score in 3 attempts"):
            await r.JudgeReward(ReplayPolicy([answer] * 9), "x")("", "")
    for answer in ("Score: 7.", "score = 7/10"):
        assert await r.JudgeReward(ReplayPolicy([answer]), "x")("", "") == 0.7


async def test_ensembles_weigh_verifiers_by_accuracy() -> None:
    async def yes(response: str) -> float:
        return 1.0

    def no(prompt: str, response: str, target: object) -> bool:
        return False

    assert await r.Ensemble([yes, no], [0.9, 0.6])("", "") == pytest.approx(combine([True, False], [0.9, 0.6]))
    assert await r.Ensemble([yes, no], [0.9, 0.6])("", "") > 0.5 > await r.Ensemble([yes, no], [0.6, 0.9])("", "")
    with pytest.raises(fe.UsageError, match="2 verifiers but 1"):
        r.Ensemble([yes, no], [0.5])


def test_accuracies_are_learned_from_votes_alone() -> None:
    rng = random.Random(0)
    true = [0.9, 0.8, 0.7, 0.6, 0.55]
    labels = [rng.random() < 0.4 for _ in range(4000)]
    votes = [[label if rng.random() < accuracy else not label for accuracy in true] for label in labels]
    for known in (labels, None):
        learned, prior = r.estimate_accuracies(votes, known)
        assert learned == pytest.approx(true, abs=0.05)
        assert prior == pytest.approx(0.4, abs=0.05)
    with pytest.raises(fe.UsageError, match="one vote of every verifier"):
        r.estimate_accuracies([[True, False, True], [True, False]])
    with pytest.raises(fe.UsageError, match="votes on 1 answers but 2 labels"):
        r.estimate_accuracies([[True, False, True]], [True, False])
    with pytest.raises(fe.UsageError, match="fewer than three"):
        r.estimate_accuracies([[True, False]])


@pytest.mark.parametrize("compare", [r.ExactMatch(), r.FuzzyMatch(), r.exact_match, r.fuzzy_match])
@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ({"value": "Paris", "aliases": ["Paris"]}, "a mapping of 'value, aliases'"),
        ([{"text": "Paris"}], "an accepted text of the target is a dict"),
        (b"Paris", "the target is a bytes"),
        (None, "no target"),
        ("", "empty"),
        (" \n", "empty"),
        ([], "empty"),
        (["Paris", ""], "empty"),
        ("Paris", None),
        (0, None),
        (["Paris", 1.5], None),
    ],
)
def test_targets_that_cannot_be_compared_are_named(compare: Any, target: Any, reason: str | None) -> None:
    assert (compare.check_target(target) or "").find(reason or "") >= 0
    assert (compare.check_target(target) is None) == (reason is None)
    if reason and "empty" not in reason:
        with pytest.raises(ValueError, match=reason):
            compare("value", target)


def test_a_target_of_punctuation_alone_is_empty_where_punctuation_is_ignored() -> None:
    assert r.ExactMatch(ignore_punctuation=True).check_target("?!") is not None
    assert r.ExactMatch().check_target("?!") is None
