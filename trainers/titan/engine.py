"""One rank of the trainer, without any actor around it: forward, backward, update, save."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import torch
from torchtitan.distributed.utils import clip_grad_norm_

from forge_env.config.recipe import OptimizerSection
from forge_env.errors import ForgeError
from trainers.losses import metrics as figures
from trainers.losses.primitives import mean, token_logprobs_and_entropy
from trainers.losses.types import Loss, TokenBatch, needs
from trainers.titan import checkpoint
from trainers.titan.batch import Microbatch, TokenSequence, collate
from trainers.titan.device import Device
from trainers.titan.flops import Throughput
from trainers.titan.model import TitanModel
from trainers.titan.optimizer import build_optimizer, build_schedule
from trainers.titan.packing import Budget, plan, split

MAX_SKIPPED_UPDATES = 5
"""Updates in a row whose loss or gradient is not finite. One is a bad batch; so many are the model or the loss."""


class TitanEngine:
    """A model with its optimizer and schedule; `train` makes one or more updates from a batch of sequences.

    With several ranks each has an engine, is given the whole batch, and works on its own share of it: every method
    is a collective. Gradients, metrics and weights come out as those of one rank.
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
        self.model = model
        self.section = section
        self.device = device
        self.budget = Budget(microbatch_tokens, device.packed or not model.ranks.alone)
        self.temperature = temperature
        self.threads = threads
        self.optimizer = build_optimizer(model.module, section, device)
        self.schedule = build_schedule(self.optimizer, section, steps)
        self.throughput = Throughput(model, device)
        self.rng = random.Random(seed)
        self.updates = 0
        self.accumulated = 0
        self.skipped_in_a_row = 0

    @property
    def side_by_side(self) -> bool:
        """Whether threads run microbatches side by side; not over ranks, whose passes meet in collectives."""
        return self.threads > 1 and self.device.side_by_side and self.model.ranks.alone

    def train(self, sequences: Sequence[TokenSequence], loss: Loss, *, minibatches: int = 1) -> dict[str, float]:
        """Update the weights `minibatches` times from one batch; returns means over its target tokens.

        A batch without sequences leaves the weights as they are, and is a step of the schedule like any other. So does
        an update whose loss or gradient is not finite: it is left out of the means, and counted (`skipped_updates`).

        Raises:
            ForgeError: no finite update for a long time.
        """
        started = time.perf_counter()
        totals: dict[str, float] = {}
        parts = split(sequences, minibatches, self.rng)
        proximal = self._proximal(parts, loss)
        done = []
        for part, logprobs in zip(parts, proximal, strict=True):
            metrics = self.forward_backward(part, loss, logprobs)
            if self._update(metrics):
                done.append(metrics)
        for metrics in done:
            figures.add(totals, figures.share_of(metrics, 1 / len(done)))
        self.schedule.step()
        elapsed = time.perf_counter() - started
        return {
            **totals,
            **self.throughput.metrics(sequences, elapsed),
            "skipped_updates": float(len(parts) - len(done)),
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

    def _proximal(self, parts: Sequence[Sequence[TokenSequence]], loss: Loss) -> list[list[torch.Tensor] | None]:
        """For each minibatch, what its microbatches' target tokens had as log-probabilities before the first update.

        None where nobody asks, and for the first minibatch, which is trained on by that very policy.
        """
        if not parts or not needs(loss).proximal:
            return [None] * len(parts)
        with torch.no_grad():
            return [None, *([self._logprobs(batch) for batch in self._microbatches(part)] for part in parts[1:])]

    def _logprobs(self, batch: Microbatch) -> torch.Tensor:
        return self.forward(batch, total_tokens=1, total_sequences=1).logprobs

    def forward_backward(
        self, part: Sequence[TokenSequence], loss: Loss, proximal: Sequence[torch.Tensor] | None = None
    ) -> dict[str, float]:
        """Add the gradients of one minibatch, microbatch by microbatch; returns means over its target tokens."""
        totals: dict[str, float] = {}
        for metrics in self._passes(part, loss, sum(sequence.num_targets for sequence in part), proximal):
            figures.add(totals, metrics)
            self.accumulated += 1
        return self.model.ranks.together(totals)

    def _microbatches(self, part: Sequence[TokenSequence]) -> Iterator[Microbatch]:
        """This rank's microbatches of a minibatch, the same ones every time; with several threads, some for each.

        Where a rank has none left, a sequence without targets keeps up the count.
        """
        ranks = self.model.ranks
        chunks = plan(
            part,
            self.budget,
            ranks=ranks.data_degree,
            at_least=self.threads if self.side_by_side else 1,
            quadratic=self.model.quadratic_cost,
        )
        for chunk in chunks[ranks.data_rank]:
            rows = chunk or [TokenSequence([0, 0], [False, False])]
            yield self._collate(rows)

    def _collate(self, rows: Sequence[TokenSequence]) -> Microbatch:
        return collate(rows, self.device.torch, packed=self.budget.packed, multiple=self.model.ranks.row_multiple)

    def _passes(
        self, part: Sequence[TokenSequence], loss: Loss, targets: int, proximal: Sequence[torch.Tensor] | None
    ) -> Iterator[dict[str, float]]:
        """Forward and backward over the microbatches of `part`; yields each one's share of the metrics.

        On a CPU, microbatches run side by side, one a thread: threads inside an operation wait for each other at
        its end, hundreds of times a step, and stand still together when another process takes one's core.
        """
        entropy_gradient = needs(loss).entropy_gradient

        def forward(batch: Microbatch, before: torch.Tensor | None) -> tuple[torch.Tensor, dict[str, float]]:
            tokens = self.forward(
                batch, total_tokens=targets, total_sequences=len(part), entropy_gradient=entropy_gradient
            )
            tokens.proximal_logprobs = before
            if not len(batch.target_ids):  # nothing to learn, but all ranks make the same passes
                return 0.0 * tokens.logprobs.sum(), {}
            output = loss(tokens)
            share = len(batch.target_ids) / max(targets, 1)
            means = {"entropy": mean(tokens.entropy), **{f"loss/{name}": v for name, v in output.metrics.items()}}
            metrics = figures.share_of({"padding": batch.padding, **figures.to_floats(means)}, share)
            return output.loss, {"loss": output.loss.item(), **metrics}

        work = zip(self._microbatches(part), proximal or repeat(None), strict=False)
        if not self.side_by_side:
            for batch, before in work:
                value, metrics = forward(batch, before)
                value.backward()  # type: ignore[no-untyped-call]
                yield metrics
            return
        parameters = [parameter for parameter in self.model.module.parameters() if parameter.requires_grad]

        def gradients(
            item: tuple[Microbatch, torch.Tensor | None],
        ) -> tuple[tuple[torch.Tensor, ...], dict[str, float]]:
            value, metrics = forward(*item)
            return torch.autograd.grad(value, parameters), metrics

        with ThreadPoolExecutor(self.threads) as pool:
            for grads, metrics in pool.map(gradients, work):
                for parameter, gradient in zip(parameters, grads, strict=True):
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
                yield metrics

    def forward(
        self, batch: Microbatch, *, total_tokens: int, total_sequences: int, entropy_gradient: bool = False
    ) -> TokenBatch:
        """Log-probabilities and entropy of a microbatch's target tokens."""
        context = self.model.ranks.context
        part = batch if context is None else context.part(batch)
        logits = self.model.logits(part) / self.temperature
        logprobs, entropy = token_logprobs_and_entropy(logits, part.target_ids, entropy_gradient=entropy_gradient)
        if context is not None:
            logprobs, entropy = (context.whole(values, batch) for values in (logprobs, entropy))
        return TokenBatch(
            logprobs=logprobs,
            entropy=entropy,
            behavior_logprobs=batch.behavior_logprobs,
            advantages=batch.advantages,
            sequence_ids=batch.sequence_ids,
            total_tokens=total_tokens,
            total_sequences=total_sequences,
            ref_logprobs=batch.ref_logprobs,
        )

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

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[list[float]]:
        """Log-probabilities of each sequence's target tokens, in order."""
        result = []
        for sequence in sequences:
            batch = self._collate([sequence])
            result.append(self._logprobs(batch).tolist())
        return result

    def save(self, folder: Path) -> None:
        """Write weights (`model/`, a Hugging Face folder) and training state into `folder`."""
        checkpoint.save(self, folder)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, with any number of ranks."""
        checkpoint.load(self, folder)
