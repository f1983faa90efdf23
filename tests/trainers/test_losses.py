"""Losses against independent formulas and finite differences, in float64."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from trainers.losses.grpo import GRPOLoss  # noqa: E402
from trainers.losses.primitives import token_logprobs_and_entropy  # noqa: E402
from trainers.losses.sft import SFTLoss  # noqa: E402
from trainers.losses.types import TokenBatch  # noqa: E402

pytestmark = pytest.mark.stack


def batch(logprobs: object, behavior: object, advantages: object) -> TokenBatch:
    now = torch.as_tensor(logprobs, dtype=torch.float64)
    count = len(now)
    return TokenBatch(
        logprobs=now,
        entropy=torch.zeros(count, dtype=torch.float64),
        behavior_logprobs=torch.as_tensor(behavior, dtype=torch.float64),
        advantages=torch.as_tensor(advantages, dtype=torch.float64),
        sequence_ids=torch.zeros(count, dtype=torch.long),
        total_tokens=count,
        total_sequences=1,
    )


def grpo_reference(now: list[float], then: list[float], advantage: list[float], low: float, high: float) -> float:
    """The formula of the docstring with plain Python floats."""
    total = 0.0
    for l, m, a in zip(now, then, advantage, strict=True):  # noqa: E741
        r = math.exp(l - m)
        total += max(-r * a, -min(max(r, 1 - low), 1 + high) * a)
    return total / len(now)


def random_case(seed: int, count: int = 40) -> tuple[list[float], list[float], list[float]]:
    generator = torch.Generator().manual_seed(seed)
    now = (-3 * torch.rand(count, generator=generator, dtype=torch.float64)).tolist()
    then = [value + 0.5 * float(torch.randn(1, generator=generator)) for value in now]
    advantage = torch.randn(count, generator=generator, dtype=torch.float64).tolist()
    return now, then, advantage


@pytest.mark.parametrize("seed", range(5))
def test_grpo_equals_its_formula(seed: int) -> None:
    now, then, advantage = random_case(seed)
    loss = GRPOLoss(0.2, 0.28)(batch(now, then, advantage)).loss
    assert loss.item() == pytest.approx(grpo_reference(now, then, advantage, 0.2, 0.28), abs=1e-12)


def test_grpo_gradient_equals_finite_differences() -> None:
    now, then, advantage = random_case(7, 12)
    tensor = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    GRPOLoss()(batch(tensor, then, advantage)).loss.backward()
    step = 1e-6
    for index in range(len(now)):
        up, down = list(now), list(now)
        up[index] += step
        down[index] -= step
        slope = (grpo_reference(up, then, advantage, 0.2, 0.28) - grpo_reference(down, then, advantage, 0.2, 0.28)) / (
            2 * step
        )
        assert tensor.grad[index].item() == pytest.approx(slope, abs=1e-6)


def test_on_policy_grpo_is_the_policy_gradient() -> None:
    now, _, advantage = random_case(3)
    tensor = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    output = GRPOLoss()(batch(tensor, now, advantage))
    output.loss.backward()
    assert torch.allclose(tensor.grad, -torch.tensor(advantage, dtype=torch.float64) / len(now))
    assert output.metrics["clip_fraction"].item() == 0
    assert output.metrics["ratio_mean"].item() == pytest.approx(1)


def test_shares_of_microbatches_add_up_to_the_minibatch() -> None:
    now, then, advantage = random_case(11, 30)
    whole = GRPOLoss()(batch(now, then, advantage)).loss.item()
    parts = 0.0
    for part in (slice(0, 7), slice(7, 30)):
        piece = batch(now[part], then[part], advantage[part])
        piece.total_tokens = 30
        parts += GRPOLoss()(piece).loss.item()
    assert parts == pytest.approx(whole, abs=1e-12)


def test_a_negative_clip_is_refused() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        GRPOLoss(clip_low=-0.1)


def test_sft_is_the_mean_negative_log_likelihood() -> None:
    assert SFTLoss()(batch([-1.0, -3.0], [0, 0], [0, 0])).loss.item() == pytest.approx(2.0)


def test_logprobs_and_entropy_of_logits() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [100.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    logprobs, entropy = token_logprobs_and_entropy(logits, torch.tensor([2, 0]))
    assert logprobs.tolist() == pytest.approx([-math.log(4), 0.0])
    assert entropy.tolist() == pytest.approx([math.log(4), 0.0], abs=1e-9)
