"""One rank of the trainer, without any actor around it: forward, backward, update, save."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import torch
from torchtitan.distributed.utils import clip_grad_norm_

from forge_env.config.recipe import OptimizerSection
from forge_env.errors import ForgeError
from forge_env.trajectory import Segment
from trainers.buffer.sequences import BatchSizes
from trainers.losses import metrics as figures
from trainers.losses.primitives import mean
from trainers.losses.types import Loss, TokenBatch, needs
from trainers.titan import checkpoint
from trainers.titan.batch import Microbatch
from trainers.titan.device import Device
from trainers.titan.flops import Throughput
from trainers.titan.model import TitanModel
from trainers.titan.optimizer import build_optimizer, build_schedule
from trainers.titan.packing import Run, split
from trainers.titan.score import Scorer, Segments

MAX_SKIPPED_UPDATES = 5
"""Updates in a row whose loss or gradient is not finite. One is a bad batch; so many are the model or the loss."""


@dataclass(slots=True)
class Minibatch:
    """What this rank computes of one update, and what all ranks do together.

    Attributes:
        runs: this rank's microbatches, of sequences by number.
        targets: tokens to be learned that are computed, over all ranks.
        total_tokens: tokens that the loss divides by: those computed, and an even share of those without signal.
        total_sequences: sequences likewise.
    """

    runs: list[Run]
    targets: int
    total_tokens: float
    total_sequences: float


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
        """A random partition into `minibatches`, and what this rank computes of each.

        Sequences without signal are computed by nobody and are part of every mean: the minibatches share them evenly.
        """
        parts = split(len(sizes.lengths), minibatches, self.rng)
        silent_tokens = sizes.total_tokens - int(sizes.targets.sum())
        silent_sequences = sizes.total_sequences - len(sizes.lengths)
        found = []
        for part in parts:
            lengths, targets = sizes.lengths[part].tolist(), int(sizes.targets[part].sum())
            found.append(
                Minibatch(
                    [[part[place] for place in run] for run in self.microbatches(lengths)],
                    targets,
                    targets + silent_tokens / len(parts),
                    len(part) + silent_sequences / len(parts),
                )
            )
        return Share(sizes, found)

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
        runs = self.microbatches(sizes.lengths.tolist())
        whole = Minibatch(runs, sizes.total_tokens, sizes.total_tokens, sizes.total_sequences)
        return self._add_gradients(whole, sizes.pick(segments), loss, None)

    def _add_gradients(
        self, minibatch: Minibatch, segments: Segments, loss: Loss, proximal: Sequence[torch.Tensor] | None
    ) -> dict[str, float]:
        totals: dict[str, float] = {}
        for metrics in self._passes(minibatch, segments, loss, proximal):
            figures.add(totals, metrics)
            self.accumulated += 1
        return self.model.ranks.together(totals)

    def _passes(
        self, minibatch: Minibatch, segments: Segments, loss: Loss, proximal: Sequence[torch.Tensor] | None
    ) -> Iterator[dict[str, float]]:
        """Forward and backward over the microbatches; yields each one's share of the metrics.

        On a CPU, microbatches run side by side, one a thread: threads inside an operation wait for each other at
        its end, hundreds of times a step, and stand still together when another process takes one's core.
        """

        def forward(run: Run, before: torch.Tensor | None) -> tuple[torch.Tensor, dict[str, float]]:
            return self._loss_of(self.collate(run, segments), minibatch, loss, before)

        work = zip(minibatch.runs, proximal or repeat(None), strict=False)
        if not self.side_by_side:
            for run, before in work:
                value, metrics = forward(run, before)
                value.backward()  # type: ignore[no-untyped-call]
                yield metrics
            return
        parameters = [parameter for parameter in self.model.module.parameters() if parameter.requires_grad]

        def gradients(item: tuple[Run, torch.Tensor | None]) -> tuple[tuple[torch.Tensor, ...], dict[str, float]]:
            value, metrics = forward(*item)
            return torch.autograd.grad(value, parameters), metrics

        with ThreadPoolExecutor(self.threads) as pool:
            for grads, metrics in pool.map(gradients, work):
                for parameter, gradient in zip(parameters, grads, strict=True):
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
                yield metrics

    def _loss_of(
        self, batch: Microbatch, minibatch: Minibatch, loss: Loss, proximal: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """A microbatch's share of the loss and of the metrics."""
        logprobs, entropy = self.forward(batch)
        if not len(batch.target_ids):  # nothing to learn, but all ranks make the same passes
            return 0.0 * logprobs.sum(), {}
        output = loss(
            TokenBatch(
                logprobs=logprobs,
                entropy=entropy,
                behavior_logprobs=batch.behavior_logprobs,
                advantages=batch.advantages,
                sequence_ids=batch.sequence_ids,
                total_tokens=minibatch.total_tokens,
                total_sequences=minibatch.total_sequences,
                ref_logprobs=batch.ref_logprobs,
                proximal_logprobs=proximal,
            )
        )
        share = len(batch.target_ids) / max(minibatch.targets, 1)
        means = {"entropy": mean(entropy), **{f"loss/{name}": v for name, v in output.metrics.items()}}
        metrics = figures.share_of({"padding": batch.padding, **figures.to_floats(means)}, share)
        return output.loss, {"loss": output.loss.item(), **metrics}

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
