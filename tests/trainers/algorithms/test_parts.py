"""Advantage estimators, masks, filters: what they give, and how it reaches the tokens."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_env.config.recipe import PartSection
from forge_env.errors import NotRegisteredError, PluginError, UsageError
from forge_env.plugins import installed
from forge_env.policy import Reply
from forge_env.trajectory import Trajectory, Turn
from forge_env.types import Message
from trainers.algorithms.parts import (
    AdvantageEstimator,
    ByConversation,
    Group,
    GroupMean,
    GroupNormalized,
    LeaveOneOut,
    MaskTruncated,
    ReinforcePlusPlus,
    RewardRange,
    TurnReturns,
    WithSignal,
    learned,
    make_advantage,
    make_filter,
    make_mask,
    token_advantages,
)
from trainers.buffer.packed import pack


def episode(reward: float, turns: tuple[int, ...] = (3,), rewards: tuple[float, ...] = (), **fields: Any) -> Trajectory:
    """An episode of turns with so many sampled tokens; what the environment gave for each of them."""
    played, before = [], 0
    for number, tokens in enumerate(turns):
        reply = Reply(
            Message(role="assistant", content="x"),
            prompt_ids=[1, 2],
            token_ids=list(range(10, 10 + tokens)),
            logprobs=[-0.5] * tokens,
            versions=[0] * tokens,
            continues=before,
        )
        before += 2 + tokens
        played.append(Turn([], reply, reward=rewards[number] if rewards else 0.0))
    return Trajectory("e", "t", "t", turns=played, reward=reward, **fields)


def per_episode(estimator: AdvantageEstimator, rewards: list[float]) -> list[float]:
    return [float(np.asarray(weight)) for weight in estimator(Group([episode(reward) for reward in rewards]))]


def test_formulas() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0]
    assert per_episode(GroupMean(), rewards) == [0.5, -0.5, -0.5, 0.5]
    assert per_episode(GroupNormalized(), rewards) == pytest.approx([1, -1, -1, 1], abs=1e-3)
    assert per_episode(LeaveOneOut(), rewards) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert per_episode(LeaveOneOut(), [0.7]) == [0.0]


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=12))
def test_baselines_leave_no_sum(rewards: list[float]) -> None:
    for estimator in (GroupMean(), GroupNormalized(), LeaveOneOut(), ReinforcePlusPlus()):
        assert sum(per_episode(estimator, rewards)) == pytest.approx(0, abs=1e-3)


def test_reinforce_plus_plus_divides_by_the_deviation_of_many_groups_and_remembers_it() -> None:
    estimator = ReinforcePlusPlus(half_life=1e9)
    per_episode(estimator, [0.0, 0.0])
    assert per_episode(estimator, [2.0, -2.0]) == pytest.approx([2**0.5, -(2**0.5)], rel=1e-3)
    again = ReinforcePlusPlus(half_life=1e9)
    again.load_state_dict(estimator.state_dict())
    assert per_episode(again, [1.0, -1.0]) == per_episode(estimator, [1.0, -1.0])


def test_returns_give_credit_by_turn() -> None:
    first = episode(1.5, (2, 1), (0.5, 0.0))  # a rubric's 1.0 on top counts for the last turn
    second = episode(0.0, (1, 3), (0.0, 0.0))
    assert TurnReturns()(Group([first, second])) == [[1.5, 1.0], [-1.5, -1.0]]
    advantages = token_advantages(TurnReturns(gamma=0.5), Group([first, second]))
    assert [values.tolist() for values in advantages] == [[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0, -1.0]]
    third = episode(3.0, (1, 1, 1))
    assert TurnReturns()(Group([first, second, third])) == [[0.0, -0.5], [-2.25, -2.0], [2.25, 2.5, 2.25]]
    longer = TurnReturns()(Group([episode(1.0, (1,)), episode(0.0, (1, 1, 1))]))
    assert longer == [[1.0], [-1.0, -1.0, -1.0]], "without others at a turn: their mean return"
    assert TurnReturns()(Group([episode(1.0, (1, 2))])) == [[0.0, 0.0]]


Play = tuple[tuple[float, ...], tuple[bool | None, ...], float]
"""Rewards by turn, choices by turn (None: the last turn allowed, which is no choice), probability."""


def plays(go_on: float, turns: int, step: float, end: float) -> list[Play]:
    """All episodes of a task in which the policy goes on with probability `go_on` after each turn, else stops."""
    result: list[Play] = []
    for length in range(1, turns + 1):
        last = length == turns
        probability = go_on ** (length - 1) * (1.0 if last else 1 - go_on)
        rewards = (*[step] * (length - 1), step + (0.0 if last else end))
        result.append((rewards, (*[True] * (length - 1), None if last else False), probability))
    return result


def expected_gradient(estimator: AdvantageEstimator, options: list[Play], go_on: float, size: int) -> float:
    """E of 1/n sum_i sum_t A_{i,t} d log pi(a_{i,t}) / d theta over all groups, pi(go on) = sigmoid(theta)."""
    total = 0.0
    for group in itertools.product(options, repeat=size):
        episodes = [episode(sum(rewards), (1,) * len(rewards), rewards) for rewards, _, _ in group]
        weights = estimator(Group(episodes))
        gradient = 0.0
        for weight, (rewards, choices, _) in zip(weights, group, strict=True):
            by_turn = np.broadcast_to(np.asarray(weight, np.float64), len(rewards))
            for advantage, goes_on in zip(by_turn, choices, strict=True):
                if goes_on is not None:
                    gradient += advantage * ((1 - go_on) if goes_on else -go_on)
        total += float(np.prod([probability for _, _, probability in group])) * gradient / size
    return total


@settings(max_examples=12, deadline=None)
@given(
    go_on=st.floats(0.1, 0.9),
    turns=st.integers(2, 4),
    step=st.floats(-1, 1),
    end=st.floats(-1, 1),
    size=st.integers(2, 3),
)
def test_leave_one_out_baseline_is_exact(go_on: float, turns: int, step: float, end: float, size: int) -> None:
    """Over all groups of a task that can be enumerated; a baseline that an action decides would show."""
    options = plays(go_on, turns, step, end)
    values = [sum(rewards) for rewards, _, _ in options]
    exact = 0.0
    for (_, choices, probability), value in zip(options, values, strict=True):
        score = sum(0.0 if choice is None else (1 - go_on) if choice else -go_on for choice in choices)
        exact += probability * value * score  # the score-function identity, without any baseline
    for estimator in (TurnReturns(), LeaveOneOut()):
        assert expected_gradient(estimator, options, go_on, size) == pytest.approx(exact, abs=1e-9)
    shrunk = expected_gradient(GroupMean(), options, go_on, size)
    assert shrunk == pytest.approx(exact * (1 - 1 / size), abs=1e-9)


def test_conversations_have_their_own_credit() -> None:
    def talked(reward: float, seats: str, **credits: float) -> Trajectory:
        found = episode(reward, (1,) * len(seats), info={"credits": credits} if credits else {})
        for turn, seat in zip(found.turns, seats, strict=True):
            turn.seat = seat
        return found

    one, two = talked(1.0, "aab", b=0.0), talked(0.0, "a")
    assert ByConversation()(Group([one, two])) == [[0.75, 0.75, -0.25], [-0.25]], "the mean is that of 0.5 and 0"
    told = [talked(1.0, "aab"), talked(0.0, "abc")]
    assert [set(weights) for weights in ByConversation()(Group(told))] == [{0.5}, {-0.5}], "as `group_mean`"
    made = make_advantage(PartSection(name="by_conversation"))
    assert [values.tolist() for values in token_advantages(made, Group([one, two]))] == [[0.75, 0.75, -0.25], [-0.25]]


class ByToken(AdvantageEstimator):
    """Every token its place."""

    def __call__(self, group: Group) -> list[Any]:
        return [np.arange(item.num_sampled_tokens, dtype=np.float32) for item in group.valid]


class Wrong(AdvantageEstimator):
    def __init__(self, answer: str = "count") -> None:
        self.answer = answer

    def __call__(self, group: Group) -> list[Any]:
        return {"count": [1.0], "shape": [[1.0, 2.0]] * 2, "nan": [float("nan"), 0.0]}[self.answer]


def test_weights_reach_their_tokens() -> None:
    group = Group([episode(1.0, (2, 3)), episode(0.0, (1,), valid=False), episode(0.0, (1,))])
    first, second = token_advantages(ByToken(), group)
    assert (first.tolist(), second.tolist()) == ([0, 1, 2, 3, 4], [0])
    (one, two) = pack(group.valid, [first, second]).segments()
    assert one.advantages.tolist() == [0, 0, 0, 1, 0, 0, 2, 3, 4]
    assert (one.token_ids[one.mask].tolist(), two.advantages.tolist()) == ([10, 11, 10, 11, 12], [0, 0, 0])


def test_episodes_that_infrastructure_spoiled_leave_the_baseline_alone() -> None:
    group = Group([episode(1.0), episode(0.0), episode(0.0, valid=False), episode(0.0, turns=())])
    assert group.mean_reward == 0.5
    assert [values[0] for values in token_advantages(GroupMean(), group)] == [0.5, -0.5]


@pytest.mark.parametrize(
    ("answer", "said"), [("count", "1 weights for 2"), ("shape", "2 values.*1 turns and 3"), ("nan", "not finite")]
)
def test_an_estimator_that_errs_is_named(answer: str, said: str) -> None:
    with pytest.raises(PluginError, match=f"Wrong returned.*{said}"):
        token_advantages(Wrong(answer), Group([episode(1.0), episode(0.0)]))


def test_what_is_masked_stays_context() -> None:
    cut = episode(0.0, truncated=True, truncation="reply_tokens")
    late = episode(0.0, truncated=True, truncation="turns")
    assert [MaskTruncated()(item) for item in (episode(1.0), cut, late)] == [True, False, False]
    assert [MaskTruncated(["reply_tokens", "context"])(item) for item in (cut, late)] == [False, True]
    group = Group([episode(1.0, (2, 1)), cut])
    masks = [learned([False, True], group.valid[0]), learned(MaskTruncated()(cut), cut)]
    packed = pack(group.valid, token_advantages(GroupMean(), group), masks)
    first, second = packed.segments()
    assert first.token_ids[first.mask].tolist() == [10]
    assert not second.mask.any()
    assert packed.num_tokens == 6  # sampled all the same


def test_filters() -> None:
    alike, mixed = Group([episode(1.0), episode(1.0)]), Group([episode(1.0), episode(0.0)])
    assert [WithSignal()(group) for group in (alike, mixed)] == [False, True]
    assert [RewardRange(0.2, 0.8)(group) for group in (alike, mixed)] == [False, True]


def test_a_recipe_names_its_parts() -> None:
    assert isinstance(make_advantage(PartSection(name=f"{__name__}:ByToken")), ByToken)
    made = make_filter(PartSection(name="reward_range", options={"low": 0.1}))
    assert (made.low, made.high) == (0.1, 1.0)
    for name in installed("forge_env.advantages"):
        assert make_advantage(PartSection(name=name)).state_dict() is not None
    for name in installed("forge_env.masks"):
        assert make_mask(PartSection(name=name))(episode(1.0)) is True


@pytest.mark.parametrize(
    ("section", "error", "said"),
    [
        (PartSection(name="group_means"), NotRegisteredError, "no advantage 'group_means'.*did you mean 'group_mean'"),
        (PartSection(name="turn_returns", options={"gama": 1}), UsageError, "options.gama: unknown key .did you mean"),
        (PartSection(name="turn_returns", options={"gamma": 2}), UsageError, "gamma=2 is not within"),
        (PartSection(name=f"{__name__}:episode", options={"reward": 1.0}), PluginError, "can't be called"),
        (PartSection(name="forge_env.masks:nothing"), PluginError, "can't be loaded"),
        (PartSection(name="trainers.algorithms.parts:KeepAll"), PluginError, "derive its class from"),
    ],
)
def test_mistakes_in_a_recipe(section: PartSection, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make_advantage(section)
