"""What the trainer gives a loss: proximal and reference log-probs, entropy with a gradient, totals, metrics."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from forge_env.config.recipe import (  # noqa: E402
    LossSection,
    ModelSection,
    OptimizerSection,
    ReferenceSection,
    TinyModel,
)
from forge_env.trajectory import Segment  # noqa: E402
from trainers.buffer.sequences import BatchSizes, at_targets, targets  # noqa: E402
from trainers.loop.record import named  # noqa: E402
from trainers.loop.trainer import Reference  # noqa: E402
from trainers.losses import Loss, LossOutput, Needs, TokenBatch  # noqa: E402
from trainers.losses.load import make_loss  # noqa: E402
from trainers.losses.primitives import largest  # noqa: E402
from trainers.losses.types import needs  # noqa: E402
from trainers.model.tiny import hf_config  # noqa: E402
from trainers.titan.device import use_device  # noqa: E402
from trainers.titan.engine import TitanEngine  # noqa: E402
from trainers.titan.model import TitanModel  # noqa: E402
from trainers.titan.score import Scorer  # noqa: E402

pytestmark = pytest.mark.stack
VOCABULARY = 320


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    shape = TinyModel(layers=2, dim=64, heads=2, kv_heads=1, hidden_dim=96, vocab_size=VOCABULARY)
    (path / "config.json").write_text(json.dumps(hf_config(ModelSection(tiny=shape), VOCABULARY, 2)))
    return path


def engine(folder: Path, *, threads: int = 1, microbatch_tokens: int = 256, lr: float = 1e-2) -> TitanEngine:
    device = use_device(with_gpus=False)
    model = TitanModel(folder, max_length=128, device=device.torch)
    section = OptimizerSection(lr=lr, warmup_steps=0, decay_start=1.0)
    return TitanEngine(
        model, section, device=device, steps=20, microbatch_tokens=microbatch_tokens, temperature=0.7, threads=threads
    )


def sequences(scored_by: TitanEngine, count: int = 10, seed: int = 0, noise: float = 0.3) -> list[Segment]:
    """Random tokens with the engine's own log-probs and some noise, as a generator a few updates behind has them."""
    rng = random.Random(seed)
    result = []
    for _ in range(count):
        length = rng.randrange(8, 60)
        ids = np.array([rng.randrange(VOCABULARY) for _ in range(length)])
        mask = np.arange(length) >= 4
        result.append(Segment(ids, mask, advantages=mask * np.float32(rng.gauss(0, 1))))
    for segment, values in zip(result, scored_by.logprobs(result), strict=True):
        noisy = values + np.array([rng.gauss(0, noise) for _ in values], np.float32)
        segment.logprobs, segment.ref_logprobs = at_targets(segment, noisy), at_targets(segment, values - 0.5)
    return result


class Watching:
    """Trains with a real loss and keeps the batches it was given."""

    def __init__(self, loss: Loss, needs: Needs | None = None) -> None:
        self.loss = loss
        self.needs = needs or getattr(loss, "needs", Needs())
        self.seen: list[TokenBatch] = []

    def __call__(self, batch: TokenBatch) -> LossOutput:
        self.seen.append(batch)
        return self.loss(batch)


def loss(name: str = "grpo", **options: Any) -> Loss:
    return make_loss(LossSection(name=name, options=options))


@pytest.mark.parametrize("threads", [1, 3])
def test_the_proximal_policy_is_the_one_before_the_first_update(folder: Path, threads: int) -> None:
    trained = engine(folder, threads=threads)
    data = sequences(trained)
    before = sorted(value for values in trained.logprobs(data) for value in values)
    watching = Watching(loss(correction="decoupled"))
    metrics = trained.train(data, watching, minibatches=3)
    first = [batch for batch in watching.seen if batch.proximal_logprobs is None]
    proximal = sorted(torch.cat([batch.proximal for batch in watching.seen]).tolist())
    assert first
    assert len(first) < len(watching.seen)
    assert proximal == pytest.approx(before, abs=1e-5)
    assert metrics["loss/ratio_max"] > 1.001, "the later minibatches are trained on by a policy that has moved"


def test_nothing_is_computed_that_no_loss_asks_for(folder: Path) -> None:
    trained = engine(folder)
    watching = Watching(loss())
    trained.train(sequences(trained), watching, minibatches=3)
    assert all(batch.proximal_logprobs is None for batch in watching.seen)


def test_an_entropy_bonus_keeps_entropy_up(folder: Path) -> None:
    plain, bonus = engine(folder), engine(folder)
    data = sequences(plain)
    for _ in range(6):
        without, with_bonus = plain.train(data, loss()), bonus.train(data, loss(entropy_coef=3.0))
    assert with_bonus["entropy"] > without["entropy"] + 0.01


def test_reference_logprobs_arrive_beside_their_tokens(folder: Path) -> None:
    trained = engine(folder)
    watching = Watching(loss(beta=0.1))
    metrics = trained.train(sequences(trained, noise=0.0), watching)
    for batch in watching.seen:
        assert batch.ref_logprobs is not None
        assert torch.allclose(batch.ref_logprobs, batch.logprobs.detach() - 0.5, atol=1e-5)
    assert metrics["loss/kl_ref"] == pytest.approx(2.718281828**-0.5 - 1 + 0.5, abs=1e-4)


def test_a_maximum_is_one_over_microbatches_and_minibatches(folder: Path) -> None:
    trained = engine(folder, microbatch_tokens=64, lr=1e-9)
    data = sequences(trained)
    watching = Watching(loss())
    metrics = trained.train(data, watching, minibatches=2)
    mismatches = [largest((batch.logprobs - batch.behavior_logprobs).abs()).item() for batch in watching.seen]
    assert metrics["loss/mismatch_max"] == pytest.approx(max(mismatches))
    assert metrics["loss/mismatch_mean"] < metrics["loss/mismatch_max"]
    names = named(metrics)
    assert names["mismatch/max"] == metrics["loss/mismatch_max"]
    assert names["grpo_loss/kl_divergence_mean"] == metrics["loss/kl_ref"]
    assert {"grpo_loss/total_loss", "grpo_loss/entropy", "grpo_loss/ratio_mean", "mismatch/mean"} <= set(names)
    assert {"grpo_loss/clip_fraction_low", "grpo_loss/clip_fraction_high", "trainer/grad_norm"} <= set(names)


def test_without_a_reference_the_divergence_is_from_the_policy_that_sampled() -> None:
    names = named({"loss/kl_k3": 0.25})
    assert names == {"grpo_loss/kl_k3": 0.25, "grpo_loss/kl_divergence_mean": 0.25}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", {"beta": 0.1}),
        ("grpo", {"entropy_coef": 0.1}),
        ("gspo", {"beta": 0.1, "kl": "k1"}),
        ("simple_grpo", {}),
        ("grpo", {}),
        ("grpo", {"aggregation": "sequence"}),
        ("grpo", {"aggregation": "fixed_horizon", "horizon": 50}),
    ],
    ids=str,
)
def test_no_mean_and_no_term_loses_what_is_not_computed(folder: Path, name: str, options: dict[str, Any]) -> None:
    trained, chosen = engine(folder), loss(name, **options)
    data = sequences(trained, count=12)
    for segment in data[3:]:
        segment.advantages[:] = 0
    expected = gradients(trained, data, chosen)
    computed = BatchSizes.of(data, needs(chosen).computed)
    assert len(computed.numbers) == (12 if needs(chosen).zero_advantage else 3)
    [minibatch] = trained.share(computed).minibatches
    trained._add_gradients(minibatch, computed.pick(data), chosen, None)
    for key, gradient in taken(trained).items():
        assert torch.allclose(gradient, expected[key], atol=1e-7), key


def gradients(trained: TitanEngine, data: list[Segment], chosen: Loss) -> dict[str, torch.Tensor]:
    """Of a batch of which everything is computed."""
    trained.forward_backward(data, chosen)
    return taken(trained)


def taken(trained: TitanEngine) -> dict[str, torch.Tensor]:
    """The gradients that were added up, which are then cleared."""
    found = {name: p.grad.clone() for name, p in trained.model.module.named_parameters()}
    trained.clear_gradients()
    return found


def forked(trained: TitanEngine, cuts: list[int]) -> list[Segment]:
    """Segments of episodes of so many each, with an advantage an episode, not next to each other."""
    data = sequences(trained, count=sum(cuts), noise=0.02)
    owners = [episode for episode, count in enumerate(cuts) for _ in range(count)]
    advantages = np.random.default_rng(0).normal(size=len(cuts))
    for segment, episode in zip(data, owners, strict=True):
        segment.episode = episode
        segment.advantages = segment.mask * np.float32(advantages[episode])
    return [data[place] for place in np.random.default_rng(1).permutation(len(data))]


def by_hand(trained: TitanEngine, data: list[Segment], name: str) -> dict[str, torch.Tensor]:
    """Gradients of a loss written out, episode by episode, from each segment's own log-probabilities."""
    by_episode: dict[Any, list[Segment]] = {}
    for segment in data:
        by_episode.setdefault(segment.episode, []).append(segment)
    total = torch.zeros((), dtype=torch.float64)
    for segments in by_episode.values():
        scored = [trained.forward(trained.collate([0], [segment]))[0].double() for segment in segments]
        now = torch.cat(scored)
        sampled = torch.from_numpy(np.concatenate([each.logprobs[targets(each)] for each in segments])).double()
        advantage = float(segments[0].advantages[targets(segments[0])][0])
        if name == "gspo":
            ratio = (now - sampled).mean().exp()
            clipped = ratio.clamp(1 - 3e-4, 1 + 4e-4)
            total = total + torch.maximum(-ratio * advantage, -clipped * advantage)
        else:
            ratio = (now - sampled).exp()
            each = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage)
            total = total + (each.mean() if name == "grpo" else each.sum() / 512)
    (total / len(by_episode)).backward()
    return taken(trained)


@pytest.mark.parametrize("tokens", [4096, 64])
@pytest.mark.parametrize(
    ("name", "options"),
    [("gspo", {"clip_high": 4e-4}), ("grpo", {"aggregation": "sequence", "clip_high": 0.2}), ("dr_grpo", {})],
    ids=["gspo", "grpo by sequence", "dr_grpo"],
)
def test_forked_episode_is_one_sequence(folder: Path, name: str, options: dict[str, Any], tokens: int) -> None:
    trained = engine(folder, microbatch_tokens=tokens)
    data = forked(trained, [1, 4, 2, 1, 3])
    expected = by_hand(trained, data, name)
    found = gradients(trained, data, loss(name, **options))
    for key, gradient in found.items():
        assert torch.allclose(gradient, expected[key], atol=1e-6), key
    assert max(float(gradient.abs().max()) for gradient in found.values()) > 1e-4


@pytest.mark.parametrize("threads", [1, 2])
def test_forks_give_the_same_metrics_and_updates_in_microbatches_of_any_size(folder: Path, threads: int) -> None:
    few, many = engine(folder, microbatch_tokens=4096), engine(folder, microbatch_tokens=64, threads=threads)
    data = forked(few, [1, 4, 2, 1, 3])
    chosen = loss("gspo", beta=0.1, entropy_coef=0.1, correction={"name": "tis", "level": "geometric"})
    for minibatches in (1, 2):
        one, other = (trained.train(data, chosen, minibatches=minibatches) for trained in (few, many))
        shown = [key for key in one if key.startswith(("loss", "entropy", "grad_norm"))]
        assert len(shown) > 15
        for key in shown:
            assert other[key] == pytest.approx(one[key], rel=2e-3, abs=1e-5), key


def test_the_segments_of_an_episode_are_in_one_minibatch(folder: Path) -> None:
    trained = engine(folder, microbatch_tokens=64)
    data = forked(trained, [1, 4, 2, 1, 3, 2])
    sizes = BatchSizes.of(data)
    assert (sizes.total_sequences, sizes.total_segments) == (6, 13)
    shares = trained.share(sizes, 3).minibatches
    assert [minibatch.total_sequences for minibatch in shares] == [2, 2, 2]
    computed = sizes.pick(data)
    owners = [{computed[place].episode for run in minibatch.runs for place in run} for minibatch in shares]
    assert sorted(episode for own in owners for episode in own) == [0, 1, 2, 3, 4, 5]


def test_minibatches_share_what_is_not_computed_evenly(folder: Path) -> None:
    trained = engine(folder)
    data = sequences(trained, count=12)
    for segment in data[3:]:
        segment.advantages[:] = 0
    sizes = BatchSizes.of(data, "segments")
    shares = trained.share(sizes, 3).minibatches
    assert sum(minibatch.targets for minibatch in shares) == sum(len(targets(segment)) for segment in data[:3])
    assert sum(minibatch.total_tokens for minibatch in shares) == pytest.approx(sizes.total_tokens)
    assert {minibatch.total_sequences for minibatch in shares} == {4}


def test_a_sequence_with_nothing_to_learn_spoils_no_metric(folder: Path) -> None:
    trained = engine(folder, microbatch_tokens=32)
    data = [*sequences(trained), Segment(np.ones(100, np.int32), np.zeros(100, np.bool_))]
    data[-1].ref_logprobs = np.zeros(100, np.float32)
    metrics = trained.train(data, loss(beta=0.1, correction="tis"))
    assert all(value == value for value in metrics.values())


@pytest.mark.parametrize("threads", [1, 2])
def test_scores_are_those_of_a_sequence_alone(folder: Path, threads: int) -> None:
    trained = engine(folder, microbatch_tokens=100)
    data = sequences(trained)
    scorer = Scorer(trained.model, device=trained.device, microbatch_tokens=256, temperature=0.7, threads=threads)
    for segment, scored in zip(data, scorer.logprobs(data), strict=True):
        [alone] = trained.logprobs([segment])
        assert scored.tolist() == pytest.approx(alone.tolist(), abs=1e-5)
        assert len(scored) == len(targets(segment))


class Endpoint:
    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.calls: list[Any] = []

    async def call(self, argument: Any) -> Any:
        self.calls.append(argument)
        return self.answer


class FakeActor:
    def __init__(self) -> None:
        self.load_weights = Endpoint(None)


@pytest.mark.parametrize(
    ("section", "published", "loaded"),
    [
        (ReferenceSection(source="initial"), [1, 2, 3, 4], []),
        (ReferenceSection(source="lagging", every=1), [1, 2, 3], [1, 2, 3]),
        (ReferenceSection(source="lagging", every=3), [1, 2, 3, 4, 5, 6, 7], [3, 6]),
        (ReferenceSection(source="lagging", every=3), [6, 7, 8, 9], [6, 9]),  # resumed after step 6
        (ReferenceSection(source="lagging", every=3), [2, 3], [3]),  # resumed before it was ever renewed
    ],
)
async def test_lagging_reference_is_renewed(section: ReferenceSection, published: list[int], loaded: list[int]) -> None:
    actor = FakeActor()
    reference = Reference(actor, section)
    for version in published:
        await reference.follow(version, version)
    assert actor.load_weights.calls == loaded
