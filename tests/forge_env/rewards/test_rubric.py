"""Rubrics: weights, injection, failures."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forge_env as fe
from forge_env import registry
from forge_env.environment.optional import score_group
from forge_env.errors import EnvironmentBugError, InfrastructureError, UsageError
from forge_env.policy import Reply
from forge_env.rewards.rubric import reward_definition
from forge_env.rollout.scripted import ReplayPolicy
from forge_env.trajectory import Trajectory, Turn

TASK = fe.Task(id="t-1", prompt="1 + 1?", data={"answer": "2", "secret": 5}, gold="two")


def length(answer: str) -> int:
    return len(answer)


async def same(response: str, target: str, prompt: str) -> bool:
    return response == target and prompt == "1 + 1?"


def test_another_frameworks_argument_is_named() -> None:
    others: Any = {"funcs": [same]}
    with pytest.raises(UsageError, match="no argument 'funcs'") as refused:
        fe.Rubric(**others)
    assert "fe.Rubric([f, g], weights=" in str(refused.value.fix)


async def test_reward_is_the_weighted_sum_and_metrics_are_free() -> None:
    result = await fe.Rubric([same, length], [1.0, 0.5], metrics=[secret]).score(task=TASK, answer="2")
    assert result.reward == 1.5
    assert result.metrics == {"same": 1.0, "length": 1.0, "secret": 5.0}


def secret(task: fe.Task, **rest: Any) -> int:
    names = {"completion", "target", "prompt", "messages", "env", "state"}
    assert set(rest) == names | {"answer", "response", "info"}
    return int(task.data["secret"])


class Judge:
    async def __call__(self, prompt: str, response: str, target: str) -> float:
        return 0.5


async def test_a_callable_object_and_a_default_are_fine() -> None:
    def tolerant(answer: str, tolerance: float = 0.25) -> float:
        return tolerance

    assert (await fe.Rubric([Judge(), tolerant]).score(task=TASK, answer="")).reward == 0.75


async def test_functions_and_metrics_can_be_named() -> None:
    rubric = fe.Rubric({"right": same, "half": Judge()}, [1.0, 0.5], metrics={"letters": length})
    assert rubric.weights == {"right": 1.0, "half": 0.5, "letters": 0.0}
    result = await rubric.score(task=TASK, answer="2")
    assert (result.reward, result.metrics) == (1.25, {"right": 1.0, "half": 0.5, "letters": 1.0})
    with pytest.raises(UsageError, match=r"'judged' is a class \(write Judge\(\)\)"):
        fe.Rubric({"judged": Judge})
    with pytest.raises(UsageError, match=r"two reward functions are named 'length' .*give names: fe\.Rubric\(\{"):
        fe.Rubric({"length": same}, metrics=[length])


@pytest.mark.parametrize("bad", [None, "one", math.nan, math.inf, 10**400])
async def test_anything_but_a_finite_number_is_a_bug(bad: Any) -> None:
    def broken() -> Any:
        return bad

    with pytest.raises(EnvironmentBugError, match=r"'broken' returned .* on task 't-1'"):
        await fe.Rubric(broken).score(task=TASK, answer="")


async def test_an_exception_names_function_task_and_place() -> None:
    def broken(answer: str) -> float:
        return 1 / 0

    with pytest.raises(
        EnvironmentBugError, match=r"'broken' raised ZeroDivisionError on task 't-1'.*test_rubric.py:\d+"
    ):
        await fe.Rubric([same, broken]).score(task=TASK, answer="")


async def test_infrastructure_passes_and_stops_the_others() -> None:
    cancelled = asyncio.Event()

    async def lost() -> float:
        raise fe.SandboxError("gone")

    async def slow() -> float:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return 1.0

    with pytest.raises(InfrastructureError, match="gone"):
        await fe.Rubric([slow, lost]).score(task=TASK, answer="")
    assert cancelled.is_set()


def test_wrong_rubrics_are_refused_early() -> None:
    def asks(reference: str) -> float:
        return 1.0

    def both(response: str, answer: str) -> float:
        return float(answer in response)

    def habit(completion: str, answer: str) -> float:
        return float(answer in completion)

    with pytest.raises(UsageError, match=r"'asks' has an unknown parameter 'reference'.*completion, target"):
        fe.Rubric(asks)
    with pytest.raises(UsageError, match=r"'both' takes `response` and `answer`.*use `target`"):
        fe.Rubric(both)
    with pytest.raises(UsageError, match=r"'habit' takes `completion` and `answer`.*use `target`"):
        fe.Rubric(habit)
    with pytest.raises(UsageError, match="1 reward functions but 2 weights"):
        fe.Rubric([length], [1, 2])
    for weight in (math.nan, math.inf, "much", None):
        with pytest.raises(UsageError, match=f"the weight {weight!r} of 'length'"):
            fe.Rubric([length], [weight])
    with pytest.raises(UsageError, match=r"'Judge' is a class \(write Judge\(\)\)"):
        fe.Rubric(Judge)
    with pytest.raises(UsageError, match="3 is not a reward function"):
        fe.Rubric([3])
    with pytest.raises(UsageError, match="two reward functions are named 'length'"):
        fe.Rubric([length], metrics=[length])
    empty: list[dict[str, Any]] = [{}, {"functions": []}, {"functions": {}}, {"metrics": [length]}, {"weights": []}]
    for options in empty:
        with pytest.raises(UsageError, match=r"without a reward function gives every episode 0 \(give it one"):
            fe.Rubric(**options)
    assert fe.Rubric(group=[as_short_as_possible]).scores_groups, "which alone decide"


def positional(response: str, /) -> float:
    return 1.0


def variadic(*response: str) -> float:
    return 1.0


def mixed(response: str, /, **rest: Any) -> float:
    return 1.0


@pytest.mark.parametrize("make", [fe.Rubric, fe.rewards.Ensemble])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (positional, r"'positional' takes `response` by position only \(remove the `/`: inputs are passed by name\)"),
        (mixed, "'mixed' takes `response` by position only"),
        ([len], "'len' has an unknown parameter 'obj'"),
        (max, "'max' have no names .*wrap it in a function with named parameters"),
        ("rewards:exact", "'rewards:exact' is a string, not a .*from rewards import exact, and pass the function"),
        (["exact"], "'exact' is a string, not a .*pass the function exact, without quotes"),
        (None, "None is not a "),
    ],
)
def test_values_that_are_not_callable_by_name_are_refused_early(make: Any, given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(given)


def test_each_argument_of_a_rubric_is_checked_and_may_be_a_single_function() -> None:
    with pytest.raises(UsageError, match=r"'variadic' takes `response` by position only \(remove the `\*`"):
        fe.Rubric(variadic)
    with pytest.raises(UsageError, match="'rewards:exact' is a string, not a reward function"):
        fe.Rubric(length, metrics="rewards:exact")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'rewards:exact' is a string, not a reward function"):
        fe.Rubric(length, group="rewards:exact")  # type: ignore[arg-type]
    rubric = fe.Rubric(length, 0.5, metrics=secret, group=as_short_as_possible)
    assert rubric.weights == {"length": 0.5, "secret": 0.0, "as_short_as_possible": 1.0}
    several = fe.Rubric({length}, metrics={"secret": secret}.values(), group=iter([as_short_as_possible]))
    assert several.weights == {"length": 1.0, "secret": 0.0, "as_short_as_possible": 1.0}


@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), min_size=1, max_size=8))
async def test_any_weights_add_up(pairs: list[tuple[float, float]]) -> None:
    def constant(value: float) -> Callable[[], float]:
        return lambda: value

    functions = {f"f{number}": constant(value) for number, (_, value) in enumerate(pairs)}
    rubric = fe.Rubric(functions, [weight for weight, _ in pairs])
    result = await rubric.score(task=TASK, answer="")
    assert result.reward == pytest.approx(math.fsum(weight * value for weight, value in pairs), abs=1e-9)


def same_answer(answer: str) -> float:
    assert answer in ("x", "long")
    return 1.0


def as_short_as_possible(answers: list[str]) -> list[float]:
    return [-float(len(answer)) for answer in answers]


def trajectory(answer: str, reward: float = 0.0, *, valid: bool = True) -> Trajectory:
    turn = Turn([], Reply(fe.Message(role="assistant", content=answer)), reward=reward)
    return Trajectory(id=answer, environment="e", task_id="t-1", turns=[turn], reward=reward, valid=valid)


async def test_group_functions_see_the_valid_episodes_of_a_task_together() -> None:
    async def rarity(answers: list[str], rewards: list[float]) -> list[float]:
        assert rewards == [1.0, 1.0, 0.0]
        return [1 / answers.count(answer) for answer in answers]

    rubric = fe.Rubric(same, group={rarity: 0.5})
    assert rubric.scores_groups
    group = [trajectory("a", 1.0), trajectory("a", 1.0), trajectory("lost", valid=False), trajectory("b")]
    await rubric.score_group(TASK, group)
    assert [item.reward for item in group] == [1.25, 1.25, 0.0, 0.5]
    assert [item.metrics for item in group] == [{"rarity": 0.5}, {"rarity": 0.5}, {}, {"rarity": 1.0}]
    assert group[0].turns[-1].reward == 1.25
    with pytest.raises(UsageError, match="'length' has an unknown parameter 'answer'"):
        fe.Rubric(group=[length])
    with pytest.raises(EnvironmentBugError, match=r"returned .* on task 't-1'.*each of the 3"):
        await fe.Rubric(group=[rewardless]).score_group(TASK, group)


class Finishing(fe.ToolEnvironment):
    """Answers are submitted by a tool."""

    rubric = fe.Rubric(same_answer, group={as_short_as_possible: 1.0})

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", prompt="hi", split=split)

    @fe.tool
    async def finish(self, answer: str) -> str:
        """Finish."""
        self.submit(answer)
        return "done"


async def test_group_functions_are_given_what_was_submitted() -> None:
    fe.register("test_finishing", Finishing)
    try:
        mixture = fe.make("mixture", environments={"test_finishing": {}})
        for env, make_env in ((Finishing(), Finishing), (mixture, lambda: mixture)):
            task = env.task("train", 0)
            policies = [ReplayPolicy([fe.call_tool("finish", answer=answer)]) for answer in ("x", "long")]
            group = [await fe.run_episode(make_env, policy, task=task) for policy in policies]
            assert [item.answer for item in group] == ["x", "long"]
            await score_group(env, task, [Trajectory.from_dict(item.to_dict()) for item in group])
            await score_group(env, task, group)
            assert [item.reward for item in group] == [0.0, -3.0]
    finally:
        registry.unregister("test_finishing")


def rewardless(task: fe.Task) -> list[float]:
    return [1.0]


def test_a_run_records_how_its_reward_is_made() -> None:
    class Sums(fe.SingleTurnEnvironment):
        """Adds numbers."""

        api_version = 1
        rubric = fe.Rubric([same, length], [1.0, 0.5], metrics=[secret])

        def task(self, split: str, index: int) -> fe.Task:
            return TASK

    found = reward_definition(Sums())
    assert (found["about"], found["max_reward"]) == ("Adds numbers.", 1.0)
    assert [(item["name"], item["weight"]) for item in found["functions"]] == [
        ("same", 1.0),
        ("length", 0.5),
        ("secret", 0.0),
    ]
    assert found["functions"][1]["source"] == "def length(answer: str) -> int:\n    return len(answer)\n"
    assert json.loads(json.dumps(found)) == found
