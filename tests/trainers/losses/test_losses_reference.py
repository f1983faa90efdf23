"""The reference model as a process of its own, beside a trainer."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
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
from forge_env.trajectory import Segment  # noqa: E402
from trainers.buffer.local import LocalReplayBuffer  # noqa: E402
from trainers.loop.stack import Stack, TrainerHandle, prepare_controller  # noqa: E402
from trainers.losses.load import make_loss  # noqa: E402
from trainers.model.tiny import build_tiny_folder  # noqa: E402

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(600)]


def sequences() -> list[Segment]:
    rng = random.Random(0)
    result = []
    for length, advantage in zip([12, 30, 7], (1.0, -1.0, 0.5), strict=True):
        mask = np.arange(length) >= 1
        ids = np.array([rng.randrange(10, 300) for _ in range(length)])
        result.append(Segment(ids, mask, mask * np.float32(-5), advantages=mask * np.float32(advantage)))
    return result


@dataclass(frozen=True)
class Sequences:
    """The sequences as the group of a step."""

    oldest_version: int
    num_tokens: int = 46
    priority: float = 1.0
    record: str = "the group without its tokens"

    def segments(self) -> list[Segment]:
        return sequences()


Buffer = LocalReplayBuffer[Sequences]


async def policy_logprobs(trainer: TrainerHandle) -> list[float]:
    return np.concatenate(await trainer.logprobs(sequences())).tolist()


async def step(trainer: TrainerHandle, buffer: Buffer, version: int) -> tuple[dict[str, float], list[float]]:
    """One training step as the loop makes it; its metrics, and the reference's log-probabilities."""
    await buffer.add(Sequences(version))
    reservation = await buffer.reserve(version)
    assert reservation.groups == ["the group without its tokens"]
    metrics = await trainer.train_on(buffer, reservation)
    found = [segment.ref_logprobs for segment in await buffer.sequences(version, range(3))]
    await trainer.push_weights(version + 1)
    await buffer.release(version + 1)
    return metrics, np.concatenate([values[1:] for values in found if values is not None]).tolist()


async def test_a_reference_is_the_policy_of_the_start_or_of_its_last_renewal(tmp_path: Path) -> None:
    prepare_controller()
    section = GRPOSection(
        groups_per_step=1,
        loss=LossSection(options={"beta": 0.1}),
        reference=ReferenceSection(source="lagging", every=2, procs=2),
    )
    config = RunConfig(environment=EnvironmentSection(name="coding_rlvr"), grpo=section)
    folder = build_tiny_folder(config.model, fe.make("coding_rlvr"), 0, tmp_path / "tiny")
    async with Stack(config) as stack:
        trainer = await stack.start_trainer(folder)
        buffer: Buffer = await stack.start_buffer()
        await trainer.save_model(str(tmp_path / "start"))
        trainer.reference = await stack.start_reference(tmp_path / "start", trainer)
        await trainer.configure(OptimizerSection(lr=1e-2), loss=make_loss(section.loss), steps=10, microbatch_tokens=64)

        start = await policy_logprobs(trainer)
        metrics, reference = await step(trainer, buffer, 0)
        assert reference == pytest.approx(start, abs=1e-5)
        assert metrics["loss/kl_ref"] == pytest.approx(0, abs=1e-6)
        assert metrics["reference_s"] > 0

        metrics, reference = await step(trainer, buffer, 1)
        assert reference == pytest.approx(start, abs=1e-5)
        assert metrics["loss/kl_ref"] > 1e-4
        moved = await policy_logprobs(trainer)
        assert max(abs(a - b) for a, b in zip(moved, start, strict=True)) > 0.01

        _, reference = await step(trainer, buffer, 2)
        assert reference == pytest.approx(moved, abs=1e-5)

        tokens = torch.from_numpy(sequences()[0].token_ids)[None]
        actor = trainer.reference.actor
        direct = await actor.forward.call_one(tokens)
        assert direct[0].tolist() == pytest.approx(moved[: tokens.shape[1] - 1], abs=1e-5)

        # its processes do what several callers want in one order
        found = await asyncio.gather(*(actor.logprobs.call_one(sequences()[:count]) for count in (3, 1, 2, 3, 1)))
        assert [len(each) for each in found] == [3, 1, 2, 3, 1]
        for each in found:
            assert np.concatenate(each).tolist() == pytest.approx(moved[: sum(map(len, each))], abs=1e-5)
