"""Microbatches: nothing is lost, padded tokens are bounded, targets line up with their predictions."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from forge_env.trajectory import Segment  # noqa: E402
from trainers.buffer.sequences import targets  # noqa: E402
from trainers.titan.batch import collate  # noqa: E402
from trainers.titan.layout import GRID, PackedLayout  # noqa: E402
from trainers.titan.packing import Sizes, families, plan, shares, split  # noqa: E402

pytestmark = pytest.mark.stack
CPU = torch.device("cpu")

lengths = st.lists(st.integers(2, 60), min_size=1, max_size=40)


def sequence(length: int, first: int = 0) -> Segment:
    ids = np.arange(first, first + length)
    return Segment(ids, np.arange(length) > 0, -ids.astype(np.float32), advantages=np.full(length, first, np.float32))


@settings(max_examples=80, deadline=None)
@given(lengths=lengths, budget=st.integers(16, 400), ranks=st.integers(1, 4))
def test_a_plan_keeps_every_target_and_the_budget(lengths: list[int], budget: int, ranks: int) -> None:
    sequences = [sequence(length, 100 * index) for index, length in enumerate(lengths)]
    planned = plan(Sizes.alone(lengths), budget, ranks=ranks)
    assert len({len(share) for share in planned}) == 1, "ranks must make the same number of passes"
    assert sorted(number for share in planned for run in share for number in run) == list(range(len(lengths)))
    for run in (run for share in planned for run in share if run):
        chunk = [sequences[number] for number in run]
        batch = collate(chunk, CPU)
        assert batch.tokens.numel() <= budget or len(chunk) == 1
        assert len(batch.target_ids) == sum(len(targets(item)) for item in chunk)
        # Token ids were chosen so that log-prob and advantage can be told from the id.
        assert torch.equal(batch.behavior_logprobs, -batch.target_ids.float())
        assert torch.equal(batch.advantages, (batch.target_ids // 100 * 100).float())
        assert torch.equal(batch.tokens.flatten()[batch.predictors] + 1, batch.target_ids)
        assert torch.equal(batch.positions.flatten()[batch.predictors] + 1, batch.target_ids % 100)


@settings(max_examples=50, deadline=None)
@given(lengths=lengths, ranks=st.integers(1, 5), quadratic=st.sampled_from([0.0, 0.01, 1.0]))
def test_shares_differ_by_no_more_than_one_family(lengths: list[int], ranks: int, quadratic: float) -> None:
    def cost(run: list[int], sizes: Sizes) -> float:
        pairs = zip(run, sizes.joins(run), strict=True)
        return sum(sizes.cost(number, joined, quadratic) for number, joined in pairs)

    sizes = Sizes.alone(lengths)
    costs = [cost(sorted(share), sizes) for share in shares(sizes, ranks, quadratic)]
    assert max(costs) - min(costs) <= cost([lengths.index(max(lengths))], sizes) + 1e-9
    together = Sizes(lengths, [0, *(min(pair) * 2 // 3 for pair in itertools.pairwise(lengths))])
    most = cost(list(range(len(lengths))), together) / (4 * ranks)
    runs = families(together, most, quadratic)
    assert [number for run in runs for number in run] == list(range(len(lengths)))
    assert all(len(run) == 1 or cost(run, together) <= most + 1e-9 for run in runs)


@settings(max_examples=30, deadline=None)
@given(lengths=lengths, multiple=st.integers(1, 8))
def test_a_packed_row_has_no_padding_but_to_its_multiple(lengths: list[int], multiple: int) -> None:
    batch = collate([sequence(length) for length in lengths], CPU, multiple=multiple)
    assert batch.tokens.shape[0] == 1
    assert batch.tokens.shape[1] % multiple == 0
    assert batch.tokens.shape[1] - sum(lengths) < multiple
    assert isinstance(batch.layout, PackedLayout)
    filler = -sum(lengths) % multiple
    rows = [positions for grid in batch.layout.grids for positions in batch.positions[0][grid.keys].view(grid.rows, -1)]
    for row, length in zip(rows, sorted([*lengths, *([filler] if filler else [])], reverse=True), strict=True):
        assert row[:length].tolist() == list(range(length))
    for grid in batch.layout.grids:
        real = int((grid.keys.view(grid.rows, -1).diff() != 0).sum()) + grid.rows
        assert len(grid.keys) <= GRID * real


def test_a_first_token_is_never_a_target() -> None:
    batch = collate([Segment(np.array([5, 6]), np.array([True, True]))], CPU)
    assert batch.target_ids.tolist() == [6]


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 30), parts=st.integers(1, 6))
def test_a_split_is_a_partition(count: int, parts: int) -> None:
    pieces = split(count, parts, random.Random(0))
    assert all(pieces)
    assert sorted(number for piece in pieces for number in piece) == list(range(count))
