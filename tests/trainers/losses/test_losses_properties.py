"""What holds for every loss, whatever the batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from forge_env.config.recipe import LossSection  # noqa: E402
from trainers.losses import LossOutput, TokenBatch  # noqa: E402
from trainers.losses import metrics as figures  # noqa: E402
from trainers.losses.load import make_loss  # noqa: E402
from trainers.losses.types import needs  # noqa: E402

pytestmark = pytest.mark.stack
torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other

LOSSES = st.sampled_from(["grpo", "dr_grpo", "dapo", "simple_grpo", "gspo", "reinforce", "cispo", "sapo"])
CORRECTIONS = st.sampled_from(
    [None, "tis", "icepop", "decoupled", {"name": "tis", "level": "sequence"}, {"name": "icepop", "level": "geometric"}]
)
LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=5)
SEEDS = st.integers(0, 2**32 - 1)
few = settings(max_examples=60, deadline=None)


def section(name: str, correction: Any, **options: Any) -> LossSection:
    return LossSection(name=name, options={"beta": 0.1, "correction": correction, **options})


def rows(seed: int, lengths: list[int], spread: float = 0.5) -> TokenBatch:
    """A whole minibatch of sequences of these lengths, with random tokens."""
    rng = np.random.default_rng(seed)
    sequence_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    values: dict[str, Any] = {
        name: torch.tensor(-1 + spread * rng.normal(size=len(sequence_ids)))
        for name in ("logprobs", "behavior_logprobs", "ref_logprobs", "proximal_logprobs", "entropy")
    }
    values["advantages"] = torch.tensor(rng.normal(size=len(lengths)))[sequence_ids]
    sizes: dict[str, Any] = {"total_tokens": sum(lengths), "total_sequences": len(lengths)}
    return TokenBatch(**values, sequence_ids=sequence_ids, **sizes)


def select(batch: TokenBatch, chosen: torch.Tensor) -> TokenBatch:
    """A part of a batch, with its own sequence ids; totals stay those of the whole."""
    parts = {
        field.name: value[chosen]
        for field in dataclasses.fields(batch)
        if isinstance(value := getattr(batch, field.name), torch.Tensor)
    }
    _, parts["sequence_ids"] = torch.unique(parts["sequence_ids"], return_inverse=True)
    return dataclasses.replace(batch, **parts)


def run(settings: LossSection, batch: TokenBatch) -> tuple[LossOutput, torch.Tensor]:
    """The output, and the gradient in the batch's log-probs."""
    leaf = batch.logprobs.detach().requires_grad_()
    output = make_loss(settings)(dataclasses.replace(batch, logprobs=leaf))
    return output, torch.autograd.grad(output.loss, leaf)[0]


@few
@given(LOSSES, CORRECTIONS, LENGTHS, SEEDS, st.data())
def test_microbatches_add_up(name: str, correction: Any, lengths: list[int], seed: int, data: st.DataObject) -> None:
    batch = rows(seed, lengths)
    whole, slopes = run(section(name, correction), batch)
    of_sequence = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths))))
    loss, gradient, metrics = 0.0, torch.zeros_like(slopes), dict[str, float]()
    for part in of_sequence.unique():
        chosen = of_sequence[batch.sequence_ids] == part
        output, gradient[chosen] = run(section(name, correction), select(batch, chosen))
        loss += output.loss.item()
        share = int(chosen.sum()) / len(chosen)
        figures.add(metrics, *figures.to_floats([figures.share_of(output.metrics, share)]))
    assert loss == pytest.approx(whole.loss.item(), abs=1e-12)
    assert torch.allclose(gradient, slopes, atol=1e-14)
    assert metrics == pytest.approx(figures.to_floats([whole.metrics])[0], abs=1e-6)


@few
@given(LOSSES, CORRECTIONS, LENGTHS, SEEDS, st.randoms())
def test_sequences_in_any_order(name: str, correction: Any, lengths: list[int], seed: int, random: Any) -> None:
    batch = rows(seed, lengths)
    order = torch.tensor(random.sample(range(len(lengths)), len(lengths)))
    places = order[batch.sequence_ids].argsort(stable=True)
    shuffled = _at(batch, places)
    (one, slopes), (other, others) = run(section(name, correction), batch), run(section(name, correction), shuffled)
    assert one.loss.item() == pytest.approx(other.loss.item(), abs=1e-12)
    assert torch.allclose(others, slopes[places], atol=1e-14)


@few
@given(LOSSES, CORRECTIONS, st.sampled_from(["token", "sequence"]), LENGTHS, SEEDS, st.data())
def test_an_episode_weighs_the_same_however_it_is_cut(
    name: str, correction: Any, aggregation: str, lengths: list[int], seed: int, data: st.DataObject
) -> None:
    """Its segments in microbatches of their own, if the loss can have that; else together, in any order."""
    options = section(name, correction, aggregation=aggregation, horizon=None)
    batch = rows(seed, lengths)
    _, slopes = run(options, batch)
    lengths_of = torch.tensor([float(lengths[row]) for row in batch.sequence_ids])
    batch = dataclasses.replace(batch, sequence_targets=lengths_of)
    count = len(batch.logprobs)
    if needs(make_loss(options)).whole_sequences:
        order = torch.tensor(data.draw(st.permutations(range(count))))
        _, shuffled = run(options, _at(batch, order))
        assert torch.allclose(shuffled, slopes[order], atol=1e-14)
        return
    part_of = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
    for part in part_of.unique():
        _, own = run(options, _at(batch, part_of == part))
        assert torch.allclose(own, slopes[part_of == part], atol=1e-14)


def _at(batch: TokenBatch, chosen: torch.Tensor) -> TokenBatch:
    """Some tokens of a batch, with the sequence ids that they have."""
    return dataclasses.replace(
        batch,
        **{
            field.name: value[chosen]
            for field in dataclasses.fields(batch)
            if isinstance(value := getattr(batch, field.name), torch.Tensor)
        },
    )


@few
@given(LOSSES, LENGTHS, SEEDS)
def test_icepop_drops_tokens_that_policies_disagree_on(name: str, lengths: list[int], seed: int) -> None:
    batch = rows(seed, lengths, spread=1.5)
    _, slopes = run(section(name, {"name": "icepop", "low": 0.5, "high": 2.0}, beta=0.0), batch)
    ratio = (batch.proximal - batch.behavior_logprobs).exp()
    assert (slopes[(ratio < 0.5) | (ratio > 2)] == 0).all()


@few
@given(
    LOSSES, CORRECTIONS, LENGTHS, SEEDS, st.sampled_from(["k1", "k2", "k3"]), st.sampled_from([1.0, 50.0, 1e4, 1e30])
)
def test_finite_extremes(name: str, correction: Any, lengths: list[int], seed: int, kl: str, spread: float) -> None:
    batch = rows(seed, lengths, spread=spread)
    parts = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    floats = {name: part.float() for name, part in parts.items() if torch.is_tensor(part) and part.is_floating_point()}
    batch = dataclasses.replace(batch, **floats)
    output, slopes = run(section(name, correction, kl=kl, entropy_coef=0.0, dual_clip=None), batch)
    assert output.loss.dtype == torch.float32
    assert output.loss.isfinite()
    assert slopes.isfinite().all()
    assert all(value.isfinite() for value in output.metrics.values())


@given(LOSSES, CORRECTIONS)
@few
def test_a_microbatch_without_tokens_is_nothing(name: str, correction: Any) -> None:
    whole = rows(0, [2, 3])
    output, _ = run(section(name, correction), select(whole, torch.zeros(5, dtype=torch.bool)))
    assert output.loss == 0
    assert set(figures.to_floats([output.metrics])[0].values()) == {0.0}
