"""Log-probabilities of tokens under a model, for the trainer, the reference model and a proximal policy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from forge_env.trajectory import Segment
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.sequences import BatchSizes, Computed, in_order, shared_with_previous, targets
from trainers.titan.batch import Microbatch, collate
from trainers.titan.device import Device
from trainers.titan.model import TitanModel
from trainers.titan.packing import Run, Sizes, plan

Segments = Sequence[Segment] | Mapping[int, Segment]
"""Token sequences by index; a rank may have only those that it computes."""


class Scorer:
    """Computes log-probabilities under a model, over packed microbatches, threads and ranks.

    Args:
        microbatch_tokens: maximum tokens in one pass.
        temperature: temperature that the tokens were sampled at.
        threads: number of parallel passes, on a CPU and with one rank.
        share_prefixes: compute what sequences of a microbatch begin with once.
    """

    def __init__(
        self,
        model: TitanModel,
        *,
        device: Device,
        microbatch_tokens: int,
        temperature: float = 1.0,
        threads: int = 1,
        share_prefixes: bool = True,
    ) -> None:
        self.model = model
        self.device = device
        self.microbatch_tokens = microbatch_tokens
        self.temperature = temperature
        self.threads = threads
        self.share_prefixes = share_prefixes

    @property
    def side_by_side(self) -> bool:
        """Whether threads run microbatches in parallel; never with several ranks, whose passes are collectives."""
        return self.threads > 1 and self.device.is_cpu and self.model.ranks.alone

    def sizes(self, lengths: NDArray[np.int64], shared: NDArray[np.int64]) -> Sizes:
        """Sizes of segments in lexicographic order, as microbatches are planned with them."""
        return Sizes(lengths.tolist(), shared.tolist()) if self.share_prefixes else Sizes.alone(lengths.tolist())

    def plan(self, sizes: Sizes) -> list[list[Run]]:
        """Plan each rank's microbatches of segments of these sizes; deterministic.

        If threads run in parallel, there is at least one microbatch for each, given enough segments. A rank with fewer
        segments than others have microbatches gets empty ones, so that the counts are equal.
        """
        at_least = self.threads if self.side_by_side else 1
        ranks, quadratic = self.model.ranks.data_degree, self.model.quadratic_cost
        return plan(sizes, self.microbatch_tokens, ranks=ranks, at_least=at_least, quadratic=quadratic)

    def microbatches(self, lengths: NDArray[np.int64], shared: NDArray[np.int64]) -> list[Run]:
        """This rank's microbatches of segments in lexicographic order; see `plan`."""
        return self.plan(self.sizes(lengths, shared))[self.model.ranks.data_rank]

    def collate(self, run: Run, segments: Segments) -> Microbatch:
        """Build the tensors of a microbatch; an empty one gets a sequence without targets."""
        rows = [segments[number] for number in run] or [Segment(np.zeros(2, np.int32), np.zeros(2, np.bool_))]
        return collate(
            rows,
            self.device.torch,
            multiple=self.model.ranks.row_multiple,
            share_prefixes=self.share_prefixes,
            padded=self.model.has_sinks,
        )

    def forward(self, batch: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of a microbatch's target tokens, [N] each, with gradients."""
        context = self.model.ranks.context
        if context is None:
            return self.model.score(batch, self.temperature)
        logprobs, entropy = (
            context.whole(values, batch) for values in self.model.score(context.part(batch), self.temperature)
        )
        return logprobs, entropy

    def score(self, runs: Sequence[Run], segments: Segments) -> dict[int, NDArray[np.float32]]:
        """Log-probabilities of the target tokens of each sequence in these microbatches, by sequence index.

        A collective: every rank scores the same number of microbatches.
        """

        @torch.no_grad()  # gradient mode is local to a thread
        def one(run: Run) -> dict[int, NDArray[np.float32]]:
            logprobs, _ = self.forward(self.collate(run, segments))
            ends = np.cumsum([len(targets(segments[number])) for number in run], dtype=np.int64)[:-1]
            return dict(zip(run, np.split(logprobs.cpu().numpy(), ends), strict=False))

        if not self.side_by_side:
            results = [one(run) for run in runs]
        else:
            with ThreadPoolExecutor(self.threads) as pool:
                results = list(pool.map(one, runs))
        return {number: values for part in results for number, values in part.items()}

    def logprobs(self, segments: Sequence[Segment]) -> list[NDArray[np.float32]]:
        """Log-probabilities of each sequence's target tokens, in order.

        A collective with the same arguments and the same result on all ranks.
        """
        order = in_order(segments)
        ordered = [segments[number] for number in order]
        lengths = np.array([len(segment.token_ids) for segment in ordered], np.int64)
        local = self.score(self.microbatches(lengths, shared_with_previous(ordered)), ordered)
        scored = {order[index]: values for part in self.model.ranks.gather(local) for index, values in part.items()}
        return [scored[number] for number in range(len(segments))]


async def fetch(
    buffer: LocalReplayBuffer[Any], step: int, sizes: BatchSizes, runs: Sequence[Run]
) -> dict[int, Segment]:
    """Fetch the sequences of `runs` from the buffer, each once, by index among those that are computed."""
    places = sorted({index for run in runs for index in run})
    segments = await buffer.sequences(step, sizes.numbers[places].tolist())
    return dict(zip(places, segments, strict=True))


async def score(scorer: Scorer, buffer: LocalReplayBuffer[Any], step: int, computed: Computed = "all") -> None:
    """Set `ref_logprobs` of the `computed` segments of `step` from this model; all ranks must call it."""
    sizes = await buffer.batch_sizes(step, computed)
    runs = scorer.microbatches(sizes.lengths, sizes.shared)
    segments = await fetch(buffer, step, sizes, runs)
    logprobs = await asyncio.to_thread(scorer.score, runs, segments)
    if scorer.model.ranks.counts:
        await buffer.set_reference(step, {int(sizes.numbers[index]): values for index, values in logprobs.items()})
