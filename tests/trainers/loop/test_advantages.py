"""Group baselines over valid members only, and what has no signal."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from forge_env.policy import Reply
from forge_env.trajectory import Trajectory, Turn
from forge_env.types import Message
from trainers.loop.advantages import Group, advantages, packed, training_sequences

pytestmark = pytest.mark.stack


def episode(reward: float, *, valid: bool = True, tokens: int = 3) -> Trajectory:
    message = Message(role="assistant", content="x")
    turn = Turn([], Reply(message, [1, 2], range(10, 10 + tokens), [-0.5] * tokens, [0] * tokens))
    return Trajectory(id="e", environment="t", task_id="t", turns=[turn], reward=reward, valid=valid)


def test_advantages_sum_to_zero() -> None:
    assert advantages([1.0, 0.0, 0.0, 1.0], normalize_std=False) == [0.5, -0.5, -0.5, 0.5]
    assert sum(advantages([1.0, 0.0, 0.3], normalize_std=True)) == pytest.approx(0)


def test_infrastructure_failures_leave_the_baseline_alone() -> None:
    group = Group([episode(1.0), episode(0.0), episode(0.0, valid=False), episode(0.0, valid=False)])
    assert group.mean_reward == 0.5
    sequences = training_sequences([packed(group, normalize_std=False)])
    assert [sequence.advantage for sequence in sequences] == [0.5, -0.5]


def test_groups_without_signal_are_left_out() -> None:
    assert training_sequences([packed(Group([episode(1.0), episode(1.0)]), normalize_std=False)]) == []
    assert training_sequences([packed(Group([episode(1.0), episode(0.0, valid=False)]), normalize_std=False)]) == []


def test_only_sampled_tokens_are_learned() -> None:
    (first, _) = training_sequences([packed(Group([episode(1.0), episode(0.0)]), normalize_std=False)])
    assert first.token_ids == [1, 2, 10, 11, 12]
    assert first.mask == [False, False, True, True, True]
    assert first.logprobs == [0, 0, -0.5, -0.5, -0.5]
