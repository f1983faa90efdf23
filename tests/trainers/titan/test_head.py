"""The head: log-probabilities, entropies and gradients, tile by tile."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from trainers.titan.head import EAGER, logprobs_and_entropy, tile_shape

pytestmark = pytest.mark.stack


def plain(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """By the definition, from all scores at once."""
    scores = hidden @ weight.t()
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    logprobs = torch.log_softmax(scores / temperature, -1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def inputs(
    count: int, vocabulary: int, seed: int, *, scale: float = 1.0, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, 6, generator=generator, dtype=dtype) * scale
    weight = torch.randn(vocabulary, 6, generator=generator, dtype=dtype)
    return (
        hidden.requires_grad_(),
        weight.requires_grad_(),
        torch.randint(vocabulary, (count,), generator=generator),
    )


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 9),
    vocabulary=st.integers(1, 30),
    tile=st.tuples(st.integers(1, 12), st.integers(1, 40)),
    temperature=st.sampled_from([1.0, 0.3, 2.0]),
    softcap=st.sampled_from([None, 0.5, 30.0]),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    used=st.sampled_from(["logprobs", "entropy", "both"]),
    seed=st.integers(0, 1000),
)
def test_tiles_of_any_size_give_what_all_scores_give(
    count: int,
    vocabulary: int,
    tile: tuple[int, int],
    temperature: float,
    softcap: float | None,
    scale: float,
    used: str,
    seed: int,
) -> None:
    hidden, weight, targets = inputs(count, vocabulary, seed, scale=scale)
    factors = torch.linspace(-1, 2, count, dtype=torch.float64)

    def observe(values: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        logprobs, entropy = values
        total = {"logprobs": logprobs, "entropy": entropy, "both": logprobs + entropy.square()}[used]
        return [*values, *torch.autograd.grad((factors * total).sum(), (hidden, weight))]

    expected = observe(plain(hidden, weight, targets, temperature, softcap))
    found = observe(logprobs_and_entropy(hidden, weight, targets, temperature, softcap=softcap, tile=tile))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("tile", [None, (2, 3)])
def test_gradients_are_those_of_finite_differences(tile: tuple[int, int] | None, softcap: float | None) -> None:
    hidden, weight, targets = inputs(4, 7, 0)

    def call(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return logprobs_and_entropy(hidden, weight, targets, 0.8, softcap=softcap, tile=tile)

    assert torch.autograd.gradcheck(call, (hidden, weight))


def test_compiled_kernels_give_the_same() -> None:
    kernels = EAGER.compiled(backend="aot_eager")
    for count, vocabulary, softcap in ((7, 13, None), (9, 20, None), (8, 17, 2.0)):
        hidden, weight, targets = inputs(count, vocabulary, seed=count)
        results = []
        for each in (EAGER, kernels):
            logprobs, entropy = logprobs_and_entropy(
                hidden, weight, targets, 0.8, softcap=softcap, tile=(4, 6), kernels=each
            )
            gradients = torch.autograd.grad((logprobs + entropy.square()).sum(), (hidden, weight))
            results.append([logprobs, entropy, *gradients])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)


def test_even_and_certain_distributions() -> None:
    weight = torch.eye(4)
    hidden = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1000.0, 0.0, 0.0, 0.0]])
    for tile in ((2, 4), (1, 3)):
        logprobs, entropy = logprobs_and_entropy(hidden, weight, torch.tensor([2, 0]), tile=tile)
        assert logprobs.tolist() == pytest.approx([-math.log(4), 0.0])
        assert entropy.tolist() == pytest.approx([math.log(4), 0.0], abs=1e-6)


def test_a_weight_that_is_not_finite_shows() -> None:
    hidden, weight, targets = inputs(3, 9, 0)
    with torch.no_grad():
        weight[5] = float("nan")
    for values in logprobs_and_entropy(hidden, weight, targets, tile=(2, 2)):
        assert values.isnan().all()


@pytest.mark.parametrize("tile", [(8, 64), (3, 10)])
def test_bfloat16_is_summed_up_in_float32(tile: tuple[int, int]) -> None:
    hidden, weight, targets = inputs(8, 64, 0)
    rough = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, weight)]
    found = logprobs_and_entropy(rough[0], rough[1], targets, tile=tile)
    exact = plain(rough[0].float(), rough[1].float(), targets)
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, atol=0.03, rtol=0.03)  # the product's own rounding
    gradients = torch.autograd.grad(found[0].sum(), rough)
    assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}
    for one, other in zip(gradients, torch.autograd.grad(exact[0].sum(), rough), strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=0.1, rtol=0.05)


def test_a_frozen_head_has_no_gradient_and_hidden_states_have_theirs() -> None:
    hidden, weight, targets = inputs(5, 9, 0)
    expected = torch.autograd.grad(plain(hidden, weight, targets)[0].sum(), hidden)
    for tile in ((5, 9), (2, 4)):
        logprobs, _ = logprobs_and_entropy(hidden, weight.detach(), targets, tile=tile)
        torch.testing.assert_close(torch.autograd.grad(logprobs.sum(), hidden), expected)


class Largest(TorchDispatchMode):
    """Watches how large the largest tensor is that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_the_scores_of_a_whole_vocabulary_are_never_held() -> None:
    hidden, weight, targets = inputs(64, 500, 0)
    with Largest() as watching:
        logprobs, entropy = logprobs_and_entropy(hidden, weight, targets, tile=(16, 20))
        (logprobs + entropy).sum().backward()
    assert watching.elements == weight.numel(), "of its gradient, and of no scores"


@pytest.mark.parametrize("count", [0, 1, 100, 10**6])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tiles_are_bounded(count: int, device: str) -> None:
    rows, columns = tile_shape(count, device)
    assert 1 <= rows <= max(count, 1)
    assert 1 <= rows * columns <= 2**26
