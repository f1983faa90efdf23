"""Clients of the trainer and of the reference model, each for any number of processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from forge_env.config.recipe import OptimizerSection, ReferenceSection
from forge_env.run.account import Account, Since
from forge_env.run.clock import RemoteClock, read_clock
from forge_env.run.fingerprint import Fingerprint
from forge_env.run.timeline import Timeline
from forge_env.trajectory import Segment
from trainers.actors.remote import agreed, result
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.sequences import Computed
from trainers.buffer.types import Reservation

if TYPE_CHECKING:
    from trainers.losses.types import Loss
    from trainers.weights.checksum import Sums
    from trainers.weights.transport import Published


class TrainerHandle:
    """Client with the trainer's endpoints as methods; `uploads`: published weights can be read after an upload."""

    def __init__(self, actor: Any, folder: Path, *, uploads: bool = False) -> None:
        self.actor = actor
        self.folder = folder
        self._uploads = uploads
        self.reference: Reference | BaseReference | None = None
        self._computed: Computed = "all"

    async def configure(self, optimizer: OptimizerSection, *, loss: Loss, **options: Any) -> None:
        """Start a phase of training (see `TitanTrainer.configure`)."""
        from trainers.losses.types import needs  # takes seconds: torch

        self._computed = needs(loss).computed
        await result(self.actor.configure.call(optimizer, loss=loss, **options))

    async def train_step(self, sequences: list[Segment]) -> dict[str, float]:
        """Update the weights from one batch, training on all its sequences, and return metrics."""
        metrics: dict[str, float] = await agreed(self.actor.train.call(sequences))
        return metrics

    async def train_on(
        self, buffer: LocalReplayBuffer[Any], reservation: Reservation, account: Account | None = None
    ) -> dict[str, float]:
        """Update the weights from a step's groups, which the trainer fetches from the buffer, and return metrics.

        A reference model, if any, scores the batch first. A step without signal counts too: the schedule counts steps.
        """
        metrics: dict[str, float] = {}
        if self.reference is not None:
            if account is not None:
                account.enter("wait for the reference")
            metrics = await self.reference.score(buffer, reservation.step, self._computed)
        if account is not None:
            account.enter("train")
        trained: dict[str, float] = await agreed(self.actor.train_on.call(buffer, reservation.step))
        return metrics | trained

    async def release_memory(self) -> None:
        """Release unused GPU memory."""
        await result(self.actor.release_memory.call())

    async def score_base(self, buffer: LocalReplayBuffer[Any], step: int) -> None:
        """Set `ref_logprobs` of the segments of `step` that the loss needs, computed by the model without adapters."""
        await result(self.actor.score_base.call(buffer, step))

    async def push_weights(self, version: int) -> Published:
        """Publish the weights, wait until they can be read, and return their location."""
        published, _ = await (await self.begin_push(version))
        await self.update_reference(version, published)
        return published

    async def begin_push(self, version: int) -> Coroutine[Any, Any, tuple[Published, dict[str, float]]]:
        """Take a snapshot of the current weights and start to publish it. Training may continue at once.

        Returns:
            A coroutine that returns the weights' location, and seconds and bytes, once they can be read.
        """
        published, begun = await agreed(self.actor.begin_push.call(version))
        uploading = self.actor.uploaded.call() if self._uploads else None  # sent now, ahead of later calls

        async def readable() -> tuple[Published, dict[str, float]]:
            return published, begun if uploading is None else begun | await agreed(uploading)

        return readable()

    async def update_reference(self, version: int, published: Published) -> None:
        """Load published weights into a lagging reference model, if it is due."""
        if self.reference is not None:
            await self.reference.follow(version, published)

    async def checksums(self) -> Sums:
        """Return checksums of the current weights by tensor, over all ranks (`trainers.weights.checksum`)."""
        from trainers.weights.checksum import together

        return together((await result(self.actor.checksums.call())).values())

    async def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the last step, over all ranks."""
        from trainers.weights.checksum import MODULUS, together

        ranks: list[Fingerprint] = list((await result(self.actor.fingerprint.call())).values())
        return replace(
            ranks[0],
            logprobs=sum(rank.logprobs for rank in ranks) % MODULUS,
            gradients=together(rank.gradients for rank in ranks),
            weights=together(rank.weights for rank in ranks),
        )

    async def begin_save(self, folder: str) -> asyncio.Future[dict[str, float]]:
        """Start to write weights and training state; return a future of metrics. Training may continue at once."""
        begun = await agreed(self.actor.begin_save.call(folder))
        writing = self.actor.saved.call()  # sent now, as in `begin_push`

        async def written() -> dict[str, float]:
            metrics: dict[str, float] = begun | await agreed(writing)
            return metrics

        return asyncio.ensure_future(written())

    async def load(self, folder: str) -> None:
        """Load weights and training state that `begin_save` wrote."""
        await result(self.actor.load.call(folder))

    async def save_model(self, folder: str, dtype: str = "float32") -> None:
        """Write the model as a Hugging Face folder."""
        await result(self.actor.save_model.call(folder, dtype))

    async def logprobs(self, sequences: list[Segment]) -> list[NDArray[np.float32]]:
        """Return log-probabilities of each sequence's target tokens under the current weights."""
        values: list[NDArray[np.float32]] = await agreed(self.actor.logprobs.call(sequences))
        return values


class Reference:
    """Client of the `ReferenceModel` actor. A lagging copy loads the policy when it is `section.every` versions behind.

    After a resume, a lagging copy starts from the policy of the checkpoint. This equals its earlier weights if
    checkpoints are saved at multiples of `every`.
    """

    def __init__(self, actor: Any, section: ReferenceSection) -> None:
        self.actor = actor
        self._every = section.every
        self.version = 0
        self._seconds: dict[str, float] = {}
        self._since_taken = Since()
        self._clock = RemoteClock()

    async def score(self, buffer: LocalReplayBuffer[Any], step: int, computed: Computed = "all") -> dict[str, float]:
        """Set `ref_logprobs` of the segments of `step` that `computed` selects; return the seconds it took."""
        started = time.perf_counter()
        await result(self.actor.score.call(buffer, step, computed))
        return {"reference_s": time.perf_counter() - started}

    async def follow(self, version: int, published: Published) -> None:
        """Load policy `version` if it is due. Published weights can be read until the next ones are published."""
        if self._every is not None and version - self.version >= self._every:
            await result(self.actor.load_weights.call(published))
            self.version = version

    async def look(self, timeline: Timeline | None) -> None:
        """Fetch the actor's time account and add its spans to the timeline, if any."""
        asked = read_clock()
        self._seconds, spans, remote = await result(self.actor.get_account.call_one())
        self._clock.heard(asked, remote, read_clock())
        if timeline is not None:
            for doing, start, end in spans:
                timeline.span("reference", doing, self._clock.here(start), self._clock.here(end))

    def take_times(self) -> dict[str, float]:
        """Return seconds by activity since the last call, as of the last `look`."""
        return self._since_taken(self._seconds)


class BaseReference:
    """Reference for training with adapters: the policy before RL, computed by the trainer without adapters."""

    actor = None
    version = 0

    def __init__(self, trainer: TrainerHandle) -> None:
        self._trainer = trainer

    async def score(self, buffer: LocalReplayBuffer[Any], step: int, computed: Computed = "all") -> dict[str, float]:
        """Set `ref_logprobs` like `Reference.score`, for the segments that the trainer's loss needs."""
        started = time.perf_counter()
        await self._trainer.score_base(buffer, step)
        return {"reference_s": time.perf_counter() - started}

    async def follow(self, version: int, published: Published) -> None:
        """Do nothing: the reference never changes."""

    async def look(self, timeline: Timeline | None) -> None:
        """Do nothing: the trainer's account includes its time."""

    def take_times(self) -> dict[str, float]:
        """Return nothing, for the same reason."""
        return {}
