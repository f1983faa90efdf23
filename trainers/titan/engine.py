"""One rank of the trainer, without any actor around it: forward, backward, update, save."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torchtitan.distributed.utils import clip_grad_norm_

from forge_env.config.recipe import OptimizerSection
from forge_env.errors import ForgeError
from forge_env.trajectory import Segment
from trainers.buffer.sequences import BatchSizes
from trainers.losses import metrics as figures
from trainers.losses.primitives import mean
from trainers.losses.types import Loss, LossOutput, TokenBatch, needs
from trainers.titan import checkpoint
from trainers.titan.batch import Microbatch
from trainers.titan.device import Device
from trainers.titan.flops import Throughput
from trainers.titan.model import TitanModel
from trainers.titan.optimizer import build_optimizer, build_schedule
from trainers.titan.packing import Run, split
from trainers.titan.score import Scorer, Segments

Value = tuple[torch.Tensor, dict[str, float]]
"""A microbatch's share of the loss and of the metrics."""
ValueOf = Callable[[int, Microbatch, torch.Tensor, torch.Tensor], Value]
"""Maps a microbatch and its number to its targets' log-probabilities and entropies, [N] each."""
TokensOf = Callable[[int, Microbatch, torch.Tensor, torch.Tensor], TokenBatch]
"""Likewise."""
MAX_SKIPPED_UPDATES = 5
"""Updates in a row whose loss or gradient is not finite. One is a bad batch; so many are the model or the loss."""


@dataclass(slots=True)
class Minibatch:
    """What this rank computes of one update, and what all ranks do together.

    Attributes:
        sizes: of the batch it is a part of.
        runs: this rank's microbatches, of segments by number.
        targets: tokens to be learned that are computed, over all ranks.
        total_tokens: tokens that the loss divides by: those computed, and an even share of those that are not.
        total_sequences: sequences likewise.
        split: whether the segments of some sequence are in different microbatches, of this rank or another.
    """

    sizes: BatchSizes
    runs: list[Run]
    targets: int
    total_tokens: float
    total_sequences: float
    split: bool = False


@dataclass(slots=True)
class Share:
    """What this rank computes of a training step."""

    sizes: BatchSizes
    minibatches: list[Minibatch]

    @property
    def runs(self) -> list[Run]:
        """All microbatches of this rank."""
        return [run for minibatch in self.minibatches for run in minibatch.runs]


class TitanEngine(Scorer):
    """A model with its optimizer and schedule; `train` makes one or more updates from a batch of sequences.

    With several ranks each has an engine and works on its own share of the batch: every method is a collective.
    Gradients, metrics and weights come out as those of one rank.
    """

    def __init__(
        self,
        model: TitanModel,
        section: OptimizerSection,
        *,
        device: Device,
        steps: int,
        microbatch_tokens: int,
        temperature: float = 1.0,
        threads: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(
            model, device=device, microbatch_tokens=microbatch_tokens, temperature=temperature, threads=threads
        )
        self.section = section
        self.optimizer = build_optimizer(model.module, section, device, threads=threads if self.side_by_side else 1)
        self.schedule = build_schedule(self.optimizer, section, steps)
        self.throughput = Throughput(model, device)
        self.stager = checkpoint.Stager(pinned=device.torch.type == "cuda")
        self.rng = random.Random(seed)
        self.updates = 0
        self.accumulated = 0
        self.skipped_in_a_row = 0

    def train(self, segments: Sequence[Segment], loss: Loss, *, minibatches: int = 1) -> dict[str, float]:
        """Update the weights from a batch of which every rank has all sequences; see `train_share`."""
        sizes = BatchSizes.of(segments)
        return self.train_share(self.share(sizes, minibatches), sizes.pick(segments), loss)

    def share(self, sizes: BatchSizes, minibatches: int = 1) -> Share:
        """A random partition of the sequences into `minibatches`, with this rank's part of each.

        Segments that are not computed still count in every mean: the minibatches share them evenly.
        """
        members: dict[int, list[int]] = {}
        for place, sequence in enumerate(sizes.sequences.tolist()):
            members.setdefault(sequence, []).append(place)
        whole = list(members.values())
        parts = split(len(whole), minibatches, self.rng)
        silent_tokens = sizes.total_tokens - int(sizes.targets.sum())
        silent_sequences = sizes.total_sequences - len(whole)
        found = []
        for part in parts:
            minibatch = self._minibatch(sizes, [place for number in part for place in whole[number]])
            minibatch.total_tokens += silent_tokens / len(parts)
            minibatch.total_sequences = len(part) + silent_sequences / len(parts)
            found.append(minibatch)
        return Share(sizes, found)

    def _minibatch(self, sizes: BatchSizes, places: Sequence[int]) -> Minibatch:
        """The minibatch of these segments of a batch, as if there were no others."""
        planned = self.plan(sizes.lengths[places].tolist())
        runs = [[[places[number] for number in run] for run in rank] for rank in planned]
        pieces = sum(len(np.unique(sizes.sequences[run])) for rank in runs for run in rank)
        sequences, targets = len(np.unique(sizes.sequences[places])), int(sizes.targets[places].sum())
        return Minibatch(sizes, runs[self.model.ranks.data_rank], targets, targets, sequences, pieces > sequences)

    def train_share(self, share: Share, segments: Segments, loss: Loss) -> dict[str, float]:
        """Update the weights once for each minibatch; returns means over the target tokens that were computed.

        A batch without sequences leaves the weights as they are, and is a step of the schedule like any other. So does
        an update whose loss or gradient is not finite: it is left out of the means, and counted (`skipped_updates`).

        Args:
            segments: by their place in `share.sizes`; at least those of `share.runs`.

        Raises:
            ForgeError: no finite update for a long time.
        """
        started = time.perf_counter()
        done = []
        proximal = self._proximal(share.minibatches, segments, loss)
        for minibatch, logprobs in zip(share.minibatches, proximal, strict=True):
            metrics = self._add_gradients(minibatch, segments, loss, logprobs)
            if self._update(metrics):
                done.append(metrics)
        totals: dict[str, float] = {}
        for metrics in done:
            figures.add(totals, figures.share_of(metrics, 1 / len(done)))
        self.schedule.step()
        elapsed = time.perf_counter() - started
        return {
            **totals,
            **self.throughput.metrics(share.sizes, elapsed),
            "sequences_not_finite": float(share.sizes.not_finite),
            "skipped_updates": float(len(share.minibatches) - len(done)),
            "train_s": elapsed,
            **self.learning_rate(),
        }

    def _update(self, metrics: dict[str, float]) -> bool:
        """Update the weights if loss and gradient are finite; whether they were. All ranks see the same figures."""
        loss = metrics["loss"]
        if math.isfinite(loss):
            metrics["grad_norm"] = self.optim_step()
            if math.isfinite(metrics["grad_norm"]):
                self.skipped_in_a_row = 0
                return True
        self.clear_gradients()
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= MAX_SKIPPED_UPDATES:
            raise ForgeError(
                f"{self.skipped_in_a_row} updates in a row had no finite gradient (the last: loss {loss:g}, gradient "
                f"norm {metrics.get('grad_norm', math.nan):g}); the weights are those before the first of them",
                fix="lower trainer.optimizer.lr and resume, or look for a division by zero in the loss",
            )
        return False

    def _proximal(
        self, minibatches: Sequence[Minibatch], segments: Segments, loss: Loss
    ) -> list[list[torch.Tensor] | None]:
        """For each minibatch, what its microbatches' target tokens had as log-probabilities before the first update.

        None where nobody asks, and for the first minibatch, which is trained on by that very policy.
        """
        if not minibatches or not needs(loss).proximal:
            return [None] * len(minibatches)
        with torch.no_grad():
            later = [
                [self.forward(self.collate(run, segments))[0] for run in minibatch.runs]
                for minibatch in minibatches[1:]
            ]
        return [None, *later]

    def forward_backward(self, segments: Sequence[Segment], loss: Loss) -> dict[str, float]:
        """Add the gradients of one minibatch, microbatch by microbatch; returns means over its target tokens."""
        sizes = BatchSizes.of(segments)
        whole = self._minibatch(sizes, range(len(sizes.numbers)))
        return self._add_gradients(whole, sizes.pick(segments), loss, None)

    def _add_gradients(
        self, minibatch: Minibatch, segments: Segments, loss: Loss, proximal: Sequence[torch.Tensor] | None
    ) -> dict[str, float]:
        def tokens(number: int, batch: Microbatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> TokenBatch:
            before = None if proximal is None else proximal[number]
            return _token_batch(minibatch, minibatch.runs[number], batch, logprobs, entropy, before)

        if minibatch.split and needs(loss).whole_sequences:
            value = self._value_of_whole_sequences(minibatch, segments, loss, tokens)
        else:

            def value(number: int, batch: Microbatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> Value:
                output = loss(tokens(number, batch, logprobs, entropy))
                share = len(batch.target_ids) / max(minibatch.targets, 1)
                return output.loss, _metrics(output, entropy, share)

        totals: dict[str, float] = {}
        for metrics in self._passes(minibatch, segments, value):
            figures.add(totals, metrics)
            self.accumulated += 1
        return self.model.ranks.together(totals)

    def _value_of_whole_sequences(
        self, minibatch: Minibatch, segments: Segments, loss: Loss, tokens: TokensOf
    ) -> ValueOf:
        """Implements `_passes` for a loss that combines tokens of sequences in several microbatches.

        The chain rule in two steps: dL/dl, of the loss of all ranks' tokens with respect to their log-probabilities and
        entropies, which are computed here without gradients; then sum_t dL/dl_t l_t, whose gradient in the weights is
        that of L, one microbatch at a time. Costs a forward pass.
        """
        own: list[TokenBatch] = []
        with torch.no_grad():
            for number, run in enumerate(minibatch.runs):
                batch = self.collate(run, segments)
                own.append(tokens(number, batch, *self.forward(batch)))
        ranks = self.model.ranks
        by_rank = ranks.gather([part.to("cpu") for part in own] if ranks.counts else [])
        parts = [part for rank in by_rank for part in rank]
        filled = [part for part in parts if len(part.logprobs)]
        whole = TokenBatch.of(filled).to(self.device.torch)
        scores = whole.logprobs.requires_grad_(), whole.entropy.requires_grad_()
        output = loss(whole)
        slopes = torch.autograd.grad(output.loss, scores, allow_unused=True, materialize_grads=True)
        counts = [len(part.logprobs) for part in parts]
        first = ranks.data_rank * len(own)  # all ranks make the same number of passes
        mine = list(zip(*(torch.split(slope, counts) for slope in slopes), strict=True))[first : first + len(own)]
        metrics = figures.share_of(_metrics(output, whole.entropy, 1.0), 1 / len(filled))

        def value(number: int, batch: Microbatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> Value:
            by_logprob, by_entropy = mine[number]
            return (by_logprob * logprobs).sum() + (by_entropy * entropy).sum(), metrics

        return value

    def _passes(self, minibatch: Minibatch, segments: Segments, value_of: ValueOf) -> Iterator[dict[str, float]]:
        """Forward and backward over the microbatches; yields each one's share of the metrics.

        On a CPU, microbatches run side by side, one a thread: threads inside an operation wait for each other at
        its end, hundreds of times a step, and stand still together when another process takes one's core.
        """

        def forward(number: int) -> Value:
            batch = self.collate(minibatch.runs[number], segments)
            logprobs, entropy = self.forward(batch)
            if not len(batch.target_ids):  # nothing to learn, but all ranks make the same passes
                return 0.0 * logprobs.sum(), {}
            value, metrics = value_of(number, batch, logprobs, entropy)
            share = len(batch.target_ids) / max(minibatch.targets, 1)
            return value, {**metrics, **figures.share_of({"padding": batch.padding}, share)}

        numbers = range(len(minibatch.runs))
        if not self.side_by_side:
            for number in numbers:
                value, metrics = forward(number)
                value.backward()  # type: ignore[no-untyped-call]
                yield metrics
            return
        parameters = [parameter for parameter in self.model.module.parameters() if parameter.requires_grad]

        def gradients(number: int) -> tuple[tuple[torch.Tensor, ...], dict[str, float]]:
            value, metrics = forward(number)
            return torch.autograd.grad(value, parameters), metrics

        with ThreadPoolExecutor(self.threads) as pool:
            for grads, metrics in pool.map(gradients, numbers):
                for parameter, gradient in zip(parameters, grads, strict=True):
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
                yield metrics

    def optim_step(self) -> float:
        """Clip the gradients, update the weights, clear the gradients; returns the norm before clipping.

        Where that is not finite, weights and the optimizer's state stay as they are.
        """
        norm = float(clip_grad_norm_(self.model.module.parameters(), self.section.max_norm))
        if math.isfinite(norm):
            self.optimizer.step()
            self.updates += 1
        self.clear_gradients()
        return norm

    def clear_gradients(self) -> None:
        """Forget what `forward_backward` has added up."""
        self.optimizer.zero_grad()
        self.accumulated = 0

    def learning_rate(self) -> dict[str, float]:
        """The current learning rate of the first optimizer."""
        return {"learning_rate": float(next(iter(self.schedule.get_metrics().values())))}

    def snapshot(self) -> checkpoint.Snapshot:
        """Weights and training state as they are now, for `checkpoint.write`; overwritten by the next one."""
        return checkpoint.snapshot(self)

    def save(self, folder: Path) -> None:
        """Write weights (`model/`, a Hugging Face folder) and training state into `folder`."""
        checkpoint.save(self, folder)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, with any number of ranks."""
        checkpoint.load(self, folder)


def _token_batch(
    minibatch: Minibatch,
    run: Run,
    batch: Microbatch,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    proximal: torch.Tensor | None,
) -> TokenBatch:
    """The input of a loss for one microbatch."""
    sizes = minibatch.sizes

    def at_tokens(of_segments: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(of_segments[run], sizes.targets[run])).to(logprobs.device)

    return TokenBatch(
        logprobs=logprobs,
        entropy=entropy,
        behavior_logprobs=batch.behavior_logprobs,
        advantages=batch.advantages,
        sequence_ids=at_tokens(sizes.sequences),
        total_tokens=minibatch.total_tokens,
        total_sequences=minibatch.total_sequences,
        ref_logprobs=batch.ref_logprobs,
        proximal_logprobs=proximal,
        sequence_targets=at_tokens(sizes.sequence_targets),
    )


def _metrics(output: LossOutput, entropy: torch.Tensor, share: float) -> dict[str, float]:
    """A loss and its metrics, weighted by `share`, the microbatch's fraction of the minibatch."""
    means = {"entropy": mean(entropy), **{f"loss/{name}": value for name, value in output.metrics.items()}}
    return {"loss": output.loss.item(), **figures.share_of(figures.to_floats(means), share)}
