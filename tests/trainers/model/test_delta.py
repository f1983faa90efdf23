"""The gated delta rule in chunks is the rule token by token, and no sequence of a row sees another."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.model.delta import causal_convolution, delta_step, gated_delta_rule

pytestmark = pytest.mark.stack
HEADS, KEYS, VALUES = 2, 4, 3


def tokens(count: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(count, HEADS, size, generator=generator) for size in (KEYS, KEYS, VALUES))
    decay, strength = (torch.rand(count, HEADS, generator=generator) for _ in range(2))
    return [query, key, value, -decay, strength]


def token_by_token(each: list[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    outs = []
    for at in range(len(each[0])):
        out, state = delta_step(*(part[at : at + 1] for part in each), state)
        outs.append(out)
    return torch.cat(outs), state


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 150), min_size=1, max_size=5), seed=st.integers(0, 100))
def test_packed_sequences_are_computed_as_token_by_token(lengths: list[int], seed: int) -> None:
    each = tokens(sum(lengths), seed)
    states = torch.randn(len(lengths), HEADS, KEYS, VALUES, generator=torch.Generator().manual_seed(seed))
    outs, final = gated_delta_rule(*each, lengths, states)
    for number, parts in enumerate(zip(*(part.split(lengths) for part in each), strict=True)):
        start = sum(lengths[:number])
        expected, state = token_by_token(list(parts), states[number : number + 1])
        torch.testing.assert_close(outs[start : start + lengths[number]], expected, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(final[number : number + 1], state, atol=1e-9, rtol=1e-9)


def test_no_gradient_reaches_another_sequence() -> None:
    each = [part.requires_grad_() for part in tokens(90, 0)]
    rows, weight = torch.randn(90, 5, requires_grad=True), torch.randn(5, 4)
    positions = torch.cat([torch.arange(20), torch.arange(70)])
    outs, _ = gated_delta_rule(*each, [20, 70])
    (outs[20:].sum() + causal_convolution(rows, weight, positions)[20:].sum()).backward()
    for part in (*each, rows):
        assert not part.grad[:20].any()
        assert part.grad[20:].any()


def test_a_convolution_covers_the_last_tokens_of_its_sequence() -> None:
    rows, weight = torch.randn(9, 5), torch.randn(5, 4)
    found = causal_convolution(rows, weight, torch.cat([torch.arange(2), torch.arange(7)]))
    for part, out in zip(rows.split([2, 7]), found.split([2, 7]), strict=True):
        expected = torch.nn.functional.conv1d(part.T, weight[:, None], padding=3, groups=5)[:, : len(part)].T
        torch.testing.assert_close(out.float(), torch.nn.functional.silu(expected), atol=1e-6, rtol=1e-5)
