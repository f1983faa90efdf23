"""Microbatches: nothing is lost, padded tokens are bounded, targets line up with their predictions."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from trainers.titan.batch import TokenSequence, collate, microbatches, split  # noqa: E402
from trainers.weights.flat import Layout  # noqa: E402

pytestmark = pytest.mark.stack
CPU = torch.device("cpu")

lengths = st.lists(st.integers(2, 60), min_size=1, max_size=40)


def sequence(length: int, first: int = 0) -> TokenSequence:
    ids = list(range(first, first + length))
    return TokenSequence(ids, [False] + [True] * (length - 1), [-float(token) for token in ids], advantage=float(first))


@settings(max_examples=60, deadline=None)
@given(lengths=lengths, budget=st.integers(16, 400))
def test_microbatches_keep_every_target_and_the_budget(lengths: list[int], budget: int) -> None:
    sequences = [sequence(length, 100 * index) for index, length in enumerate(lengths)]
    batches = list(microbatches(sequences, budget, CPU))
    assert sum(len(batch.target_ids) for batch in batches) == sum(item.num_targets for item in sequences)
    for batch in batches:
        assert batch.tokens.numel() <= budget or batch.tokens.shape[0] == 1
        # Token ids were chosen so that log-prob and advantage can be told from the id.
        assert torch.equal(batch.behavior_logprobs, -batch.target_ids.float())
        assert torch.equal(batch.advantages, (batch.target_ids // 100 * 100).float())


def test_a_first_token_is_never_a_target() -> None:
    batch = collate([TokenSequence([5, 6], [True, True])], CPU)
    assert batch.target_ids.tolist() == [6]


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 30), parts=st.integers(1, 6))
def test_a_split_is_a_partition(count: int, parts: int) -> None:
    sequences = [sequence(2, index) for index in range(count)]
    pieces = split(sequences, parts, random.Random(0))
    assert all(pieces)
    assert sorted(id(item) for piece in pieces for item in piece) == sorted(map(id, sequences))


def test_flat_buffers_give_back_every_tensor() -> None:
    state = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.randn(2)}
    layout = Layout.of(state)
    buffers = layout.pack(state)
    assert len(buffers) == 2
    for name, tensor in layout.unpack(buffers):
        assert torch.equal(tensor, state[name])
