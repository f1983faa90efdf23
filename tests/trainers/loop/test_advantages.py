"""Group baselines over valid members only, and what has no signal."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from forge_env.policy import Reply
from forge_env.trajectory import Trajectory, Turn
from forge_env.types import Message
from trainers.buffer.sequences import BatchSizes
from trainers.loop.advantages import Group, advantages, packed

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
    sequences = packed(group, normalize_std=False).segments()
    assert [sequence.advantages[-1] for sequence in sequences] == [0.5, -0.5]


@pytest.mark.parametrize("members", [(episode(1.0), episode(1.0)), (episode(1.0), episode(0.0, valid=False))])
def test_groups_without_signal_are_not_computed(members: tuple[Trajectory, ...]) -> None:
    sizes = BatchSizes.with_signal(packed(Group(list(members)), normalize_std=False).segments())
    assert len(sizes.numbers) == 0
    assert sizes.total_tokens > 0


def test_only_sampled_tokens_are_learned() -> None:
    (first, _) = packed(Group([episode(1.0), episode(0.0)]), normalize_std=False).segments()
    assert first.token_ids.tolist() == [1, 2, 10, 11, 12]
    assert first.mask.tolist() == [False, False, True, True, True]
    assert first.logprobs.tolist() == [0, 0, -0.5, -0.5, -0.5]
    assert first.advantages.tolist() == [0, 0, 0.5, 0.5, 0.5]
