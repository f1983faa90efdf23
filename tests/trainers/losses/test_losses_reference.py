"""The reference model as a process of its own, beside a trainer and the weight store."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import forge_env as fe  # noqa: E402
from forge_env.config import RunConfig  # noqa: E402
from forge_env.config.recipe import (  # noqa: E402
    EnvironmentSection,
    GRPOSection,
    LossSection,
    OptimizerSection,
    ReferenceSection,
)
from forge_env.run.account import Account  # noqa: E402
from trainers.loop.stack import Stack, TrainerHandle, prepare_controller  # noqa: E402
from trainers.losses.load import make_loss  # noqa: E402
from trainers.model.tiny import build_tiny_folder  # noqa: E402
from trainers.titan.batch import TokenSequence  # noqa: E402

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(600)]


def sequences() -> list[TokenSequence]:
    rng = random.Random(0)
    lengths = [12, 30, 7]
    return [
        TokenSequence(
            [rng.randrange(10, 300) for _ in range(length)], [False] + [True] * (length - 1), [-5.0] * length, advantage
        )
        for length, advantage in zip(lengths, (1.0, -1.0, 0.5), strict=True)
    ]


async def policy_logprobs(trainer: TrainerHandle) -> list[float]:
    return [value for values in await trainer.logprobs(sequences()) for value in values]


async def reference_logprobs(trainer: TrainerHandle) -> list[float]:
    assert trainer.reference is not None
    data = sequences()
    await trainer.reference.attach(data)
    return [value for sequence in data for value in (sequence.ref_logprobs or [])[1:]]


async def step(trainer: TrainerHandle) -> dict[str, float]:
    """One training step as the loop makes it."""
    assert trainer.reference is not None
    data = sequences()
    metrics = await trainer.reference.attach(data)
    return metrics | await trainer.train_step(data)


async def test_a_reference_is_the_policy_of_the_start_or_of_its_last_renewal(tmp_path: Path) -> None:
    prepare_controller()
    section = GRPOSection(
        loss=LossSection(options={"beta": 0.1}), reference=ReferenceSection(source="lagging", every=2)
    )
    config = RunConfig(environment=EnvironmentSection(name="coding_rlvr"), grpo=section)
    folder = build_tiny_folder(config.model, fe.make("coding_rlvr"), 0, tmp_path / "tiny")
    async with Stack(config) as stack:
        await stack.open_store()
        trainer = await stack.start_trainer(folder)
        await trainer.save_model(str(tmp_path / "start"))
        trainer.reference = await stack.start_reference(tmp_path / "start", Account("reference", "wait for calls"))
        await trainer.configure(OptimizerSection(lr=1e-2), loss=make_loss(section.loss), steps=10, microbatch_tokens=64)

        start = await policy_logprobs(trainer)
        assert await reference_logprobs(trainer) == pytest.approx(start, abs=1e-5)

        metrics = await step(trainer)
        assert metrics["loss/kl_ref"] == pytest.approx(0, abs=1e-6)
        assert metrics["reference_s"] > 0
        await trainer.push_weights(1)
        assert await reference_logprobs(trainer) == pytest.approx(start, abs=1e-5)

        metrics = await step(trainer)
        assert metrics["loss/kl_ref"] > 1e-4
        await trainer.push_weights(2)
        moved = await policy_logprobs(trainer)
        assert max(abs(a - b) for a, b in zip(moved, start, strict=True)) > 0.01
        assert await reference_logprobs(trainer) == pytest.approx(moved, abs=1e-5)

        tokens = torch.tensor([sequences()[0].token_ids])
        direct = await trainer.reference._actor.forward.call_one(tokens)
        assert direct[0].tolist() == pytest.approx(moved[: tokens.shape[1] - 1], abs=1e-5)
