"""Training engine of one rank, usable without actors: forward, backward, update, save."""

from __future__ import annotations

import math
import random
import re
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
from forge_env.run.fingerprint import Fingerprint
from forge_env.trajectory import Segment
from trainers.buffer.sequences import BatchSizes
from trainers.losses import metrics as figures
from trainers.losses.primitives import mean
from trainers.losses.types import Loss, LossOutput, TokenBatch, needs
from trainers.titan import checkpoint
from trainers.titan.batch import Microbatch
from trainers.titan.device import Device
from trainers.titan.flops import Throughput, Work
from trainers.titan.model import TitanModel
from trainers.titan.optimizer import build_optimizer, build_schedule
from trainers.titan.packing import Run, split
from trainers.titan.parallel import local
from trainers.titan.rounding import Rounding
from trainers.titan.score import Scorer, Segments
from trainers.weights.checksum import MODULUS, bit_sum, read_sums

Value = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Loss and metrics of a microbatch, as its contributions to those of the minibatch."""
ValueOf = Callable[[int, Microbatch, torch.Tensor, torch.Tensor], Value]
"""Computes it from the number of a microbatch, the microbatch, and its log-probabilities and entropies, [N] each."""
TokensOf = Callable[[int, Microbatch, torch.Tensor, torch.Tensor], TokenBatch]
"""Builds the input of a loss from the same arguments."""
MAX_SKIPPED_UPDATES = 5
"""Consecutive updates without a finite loss or gradient before training fails. One is a bad batch; this many point to
the model or the loss."""


@dataclass(slots=True)
class Minibatch:
    """This rank's part of one update, and totals over all ranks.

    Attributes:
        runs: this rank's microbatches, as lists of segment indices in the batch with these `sizes`.
        targets: number of target tokens that are computed.
        total_tokens: tokens that the loss divides by: the computed ones, plus an even share of those not computed.
        total_sequences: sequences that the loss divides by, counted likewise.
        computed: tokens that are computed; what a microbatch's sequences share counts once.
        attended: sum of the squared lengths that the work of attention is proportional to.
        split: whether the segments of some sequence are in different microbatches, of this rank or another.
    """

    sizes: BatchSizes
    runs: list[Run]
    targets: int
    total_tokens: float
    total_sequences: float
    computed: int
    attended: int
    split: bool = False


@dataclass(slots=True)
class Share:
    """This rank's part of a training step."""

    sizes: BatchSizes
    minibatches: list[Minibatch]

    @property
    def work(self) -> Work:
        """Work of all ranks."""
        return Work(
            tokens=int(self.sizes.lengths.sum()),
            targets=int(self.sizes.targets.sum()),
            computed=sum(minibatch.computed for minibatch in self.minibatches),
            attended=sum(minibatch.attended for minibatch in self.minibatches),
        )

    @property
    def runs(self) -> list[Run]:
        """All microbatches of this rank."""
        return [run for minibatch in self.minibatches for run in minibatch.runs]


class TitanEngine(Scorer):
    """A model with its optimizer and schedule; `train` makes one or more updates from a batch of sequences.

    With several ranks, each has an engine and works on its own share of the batch, and every method is a collective.
    Gradients, metrics and weights equal those of a single rank.
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
        share_prefixes: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(
            model,
            device=device,
            microbatch_tokens=microbatch_tokens,
            temperature=temperature,
            threads=threads,
            share_prefixes=share_prefixes,
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
        self._traces = False
        """Whether a step's first update is being computed, which the fingerprint is of."""
        self._first = math.nan, math.nan
        """Loss and gradient norm of the last step's first update."""
        self._logprob_sums: list[torch.Tensor] = []
        """Checksums of its log-probabilities, by microbatch."""
        self._gradient_sums: dict[str, torch.Tensor] = {}
        """Checksums of its gradients before clipping, by parameter."""
        self._rounding: Rounding | None = None
        """The weights' first values in this phase, if they are rounded for the generators."""

    def train(self, segments: Sequence[Segment], loss: Loss, *, minibatches: int = 1) -> dict[str, float]:
        """Update the weights from a batch that every rank has in full; see `train_share`."""
        sizes = BatchSizes.of(segments)
        return self.train_share(self.share(sizes, minibatches), sizes.pick(segments), loss)

    def share(self, sizes: BatchSizes, minibatches: int = 1) -> Share:
        """Split the sequences randomly into `minibatches`, and return this rank's part of each.

        Segments that are not computed still count in every mean, with an even share in each minibatch.
        """
        members: dict[int, list[int]] = {}
        for index, sequence in enumerate(sizes.sequences.tolist()):
            members.setdefault(sequence, []).append(index)
        whole = list(members.values())
        parts = split(len(whole), minibatches, self.rng)
        silent_tokens = sizes.total_tokens - int(sizes.targets.sum())
        silent_sequences = sizes.total_sequences - len(whole)
        result = []
        for part in parts:
            minibatch = self._minibatch(sizes, [index for number in part for index in whole[number]])
            minibatch.total_tokens += silent_tokens / len(parts)
            minibatch.total_sequences = len(part) + silent_sequences / len(parts)
            result.append(minibatch)
        return Share(sizes, result)

    def _minibatch(self, sizes: BatchSizes, places: Sequence[int]) -> Minibatch:
        """Plan a minibatch of these segments of a batch, ignoring all others."""
        ordered = np.array(sorted(places), np.int64)
        planned_sizes = self.sizes(sizes.lengths[ordered], sizes.shared_among(ordered))
        planned = self.plan(planned_sizes)
        computed, attended = planned_sizes.work(run for rank in planned for run in rank)
        runs = [[ordered[run].tolist() for run in rank] for rank in planned]
        pieces = sum(len(np.unique(sizes.sequences[run])) for rank in runs for run in rank)
        sequences, targets = len(np.unique(sizes.sequences[places])), int(sizes.targets[places].sum())
        return Minibatch(
            sizes,
            runs[self.model.ranks.data_rank],
            targets=targets,
            total_tokens=targets,
            total_sequences=sequences,
            computed=computed,
            attended=attended,
            split=pieces > sequences,
        )

    def train_share(self, share: Share, segments: Segments, loss: Loss) -> dict[str, float]:
        """Update the weights once for each minibatch; returns means over the computed target tokens.

        A batch without sequences leaves the weights unchanged and counts as a step of the schedule like any other. An
        update whose loss or gradient is not finite also leaves them unchanged: it is excluded from the means and
        counted in `skipped_updates`. `segments` has at least those of `share.runs`.

        Raises:
            ForgeError: `MAX_SKIPPED_UPDATES` consecutive updates were not finite.
        """
        started = time.perf_counter()
        self._first = math.nan, math.nan
        self._logprob_sums.clear()
        self._gradient_sums.clear()
        if self._rounding is None and self.model.dtype != torch.float32:
            self._rounding = Rounding(self.model)
        done = []
        proximal = self._proximal(share.minibatches, segments, loss)
        for number, (minibatch, logprobs) in enumerate(zip(share.minibatches, proximal, strict=True)):
            self._traces = number == 0
            metrics = self._add_gradients(minibatch, segments, loss, logprobs)
            if self._update(metrics):
                done.append(metrics)
            if self._traces:
                self._first = metrics["loss"], metrics.get("grad_norm", math.nan)
        self._traces = False
        totals: dict[str, float] = {}
        for metrics in done:
            figures.add(totals, figures.share_of(metrics, 1 / len(done)))
        self.schedule.step()
        self.device.trim_memory()
        elapsed = time.perf_counter() - started
        return {
            **totals,
            **self.throughput.metrics(share.work, elapsed),
            "sequences_not_finite": float(share.sizes.not_finite),
            "skipped_updates": float(len(share.minibatches) - len(done)),
            "train_s": elapsed,
            **self.learning_rate(),
            **({} if self._rounding is None else {"change_kept": self._rounding.kept()}),
        }

    def _update(self, metrics: dict[str, float]) -> bool:
        """Update the weights if loss and gradient are finite; returns whether they were.

        All ranks see the same metrics, so they decide alike.
        """
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
        """For each minibatch, log-probabilities of its microbatches' target tokens before the first update.

        None if the loss doesn't need them, and for the first minibatch, which is trained from that same policy.
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
        """Accumulate the gradients of one minibatch by microbatches; returns means over its target tokens."""
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
        passes = list(self._passes(minibatch, segments, value))
        self.accumulated += len(passes)
        for metrics in figures.to_floats(passes):  # only now, because a GPU would wait in each pass
            figures.add(totals, metrics)
        return self.model.ranks.together(totals)

    def _value_of_whole_sequences(
        self, minibatch: Minibatch, segments: Segments, loss: Loss, tokens: TokensOf
    ) -> ValueOf:
        """Return the `ValueOf` for a loss that combines tokens of sequences split over microbatches.

        Applies the chain rule in two steps. The first computes log-probabilities and entropies l of all ranks' tokens,
        without gradients in the weights, and the derivatives dL/dl of the loss. The second backpropagates the sum over
        tokens of dL/dl * l, one microbatch at a time; its gradient in the weights is that of L. Costs an additional
        forward pass.
        """
        local: list[TokenBatch] = []
        with torch.no_grad():
            for number, run in enumerate(minibatch.runs):
                batch = self.collate(run, segments)
                local.append(tokens(number, batch, *self.forward(batch)))
        ranks = self.model.ranks
        by_rank = ranks.gather([part.to("cpu") for part in local] if ranks.counts else [])
        parts = [part for rank in by_rank for part in rank]
        filled = [part for part in parts if len(part.logprobs)]
        whole = TokenBatch.of(filled).to(self.device.torch)
        scores = whole.logprobs.requires_grad_(), whole.entropy.requires_grad_()
        output = loss(whole)
        slopes = torch.autograd.grad(output.loss, scores, allow_unused=True, materialize_grads=True)
        counts = [len(part.logprobs) for part in parts]
        first = ranks.data_rank * len(local)  # all ranks make the same number of passes
        mine = list(zip(*(torch.split(slope, counts) for slope in slopes), strict=True))[first : first + len(local)]
        metrics = figures.share_of(_metrics(output, whole.entropy, 1.0), 1 / len(filled))

        def value(number: int, batch: Microbatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> Value:
            by_logprob, by_entropy = mine[number]
            return (by_logprob * logprobs).sum() + (by_entropy * entropy).sum(), metrics

        return value

    def _passes(self, minibatch: Minibatch, segments: Segments, value_of: ValueOf) -> Iterator[dict[str, torch.Tensor]]:
        """Run forward and backward over the microbatches; yields each one's share of the metrics.

        On a CPU, each thread runs whole microbatches in parallel with the others. Threads that share an operation would
        wait for each other at its end, hundreds of times a step, and all stall when another process takes the core of
        one.
        """

        def forward(number: int) -> Value:
            batch = self.collate(minibatch.runs[number], segments)
            logprobs, entropy = self.forward(batch)
            if self._traces and self.model.ranks.counts:
                self._logprob_sums.append(bit_sum(logprobs))
            if not len(batch.target_ids):  # no targets, but all ranks must make the same number of passes
                return 0.0 * logprobs.sum(), {}
            value, metrics = value_of(number, batch, logprobs, entropy)
            share = len(batch.target_ids) / max(minibatch.targets, 1)
            return value, {**metrics, "padding": value.new_full((), batch.padding * share)}

        numbers = range(len(minibatch.runs))
        if not self.side_by_side:
            for number in numbers:
                value, metrics = forward(number)
                value.backward()  # type: ignore[no-untyped-call]
                yield metrics
            return
        parameters = [parameter for parameter in self.model.module.parameters() if parameter.requires_grad]

        def gradients(number: int) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
            value, metrics = forward(number)
            return torch.autograd.grad(value, parameters), metrics

        with ThreadPoolExecutor(self.threads) as pool:
            for grads, metrics in pool.map(gradients, numbers):
                for parameter, gradient in zip(parameters, grads, strict=True):
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
                yield metrics

    def _trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Trained parameters by their names without the wrappers of compilation and activation checkpoints."""
        named = self.model.module.named_parameters()
        wrappers = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")
        return {wrappers.sub("", name): parameter for name, parameter in named if parameter.requires_grad}

    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the last step on this rank: of its first update, and of the weights after all of them."""
        weights = {name: bit_sum(local(item)) for name, item in self.model.trained_state().items()}
        logprobs = sum(read_sums({str(number): part for number, part in enumerate(self._logprob_sums)}).values())
        gradients = dict.fromkeys(self._trained_parameters(), 0) | read_sums(self._gradient_sums)
        return Fingerprint(*self._first, logprobs % MODULUS, gradients, read_sums(weights))

    def optim_step(self) -> float:
        """Clip the gradients, update the weights and clear the gradients; returns the norm before clipping.

        If the norm is not finite, weights and optimizer state remain unchanged.
        """
        if self._traces:
            grads = ((name, item.grad) for name, item in self._trained_parameters().items() if item.grad is not None)
            self._gradient_sums = {name: bit_sum(local(grad)) for name, grad in grads}
        norm = float(clip_grad_norm_(self.model.module.parameters(), self.section.max_norm))
        if math.isfinite(norm):
            self.optimizer.step()
            self.updates += 1
        self.clear_gradients()
        return norm

    def clear_gradients(self) -> None:
        """Discard the accumulated gradients."""
        self.optimizer.zero_grad()
        self.accumulated = 0

    def learning_rate(self) -> dict[str, float]:
        """The current learning rate of the first optimizer."""
        return {"learning_rate": float(next(iter(self.schedule.get_metrics().values())))}

    def snapshot(self) -> checkpoint.Snapshot:
        """Copy the current weights and training state for `checkpoint.write`; the next snapshot overwrites it."""
        return checkpoint.snapshot(self)

    def save(self, folder: Path) -> None:
        """Write weights (`model/`, a Hugging Face folder) and training state into `folder`."""
        checkpoint.write(self.snapshot(), self.model, folder)
        self.model.ranks.gather(None)  # barrier: no rank continues before all files are written

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, with any number of ranks."""
        checkpoint.load(self, folder)
        self._rounding = None


def _token_batch(
    minibatch: Minibatch,
    run: Run,
    batch: Microbatch,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    proximal: torch.Tensor | None,
) -> TokenBatch:
    """Build the input of a loss for one microbatch."""
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


def _metrics(output: LossOutput, entropy: torch.Tensor, share: float) -> dict[str, torch.Tensor]:
    """The loss, and metrics weighted by `share`, the microbatch's fraction of the minibatch."""
    means = {"entropy": mean(entropy), **{f"loss/{name}": value for name, value in output.metrics.items()}}
    detached = {name: value.detach() for name, value in means.items()}
    return {"loss": output.loss.detach(), **figures.share_of(detached, share)}
