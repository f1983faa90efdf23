"""One rank of the trainer, without any actor around it: forward, backward, update, save."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from forge_env.config.models import OptimizerSection
from trainers.losses import metrics as figures
from trainers.losses.primitives import mean, token_logprobs_and_entropy
from trainers.losses.types import Loss, TokenBatch, needs
from trainers.titan.batch import Microbatch, TokenSequence, microbatches, split
from trainers.titan.device import Device
from trainers.titan.model import TitanModel
from trainers.titan.optimizer import build_optimizer, build_schedule


class TitanEngine:
    """A model with its optimizer and schedule; `train` makes one or more updates from a batch of sequences."""

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
        self.microbatch_tokens = microbatch_tokens
        self.temperature = temperature
        self.threads = threads
        self.optimizer = build_optimizer(model.module, section, device)
        self.schedule = build_schedule(self.optimizer, section, steps)
        self._rng = random.Random(seed)
        self.updates = 0

    def train(self, sequences: Sequence[TokenSequence], loss: Loss, *, minibatches: int = 1) -> dict[str, float]:
        """Update the weights `minibatches` times from one batch; returns means over its target tokens."""
        started = time.perf_counter()
        totals: dict[str, float] = {}
        parts = split(sequences, minibatches, self._rng)
        proximal = self._proximal(parts, loss)
        for part, logprobs in zip(parts, proximal, strict=True):
            metrics = self._accumulate(part, loss, logprobs)
            metrics["grad_norm"] = self.optim_step()
            figures.add(totals, figures.share_of(metrics, 1 / len(parts)))
        self.schedule.step()
        tokens = sum(len(sequence.token_ids) for sequence in sequences)
        elapsed = time.perf_counter() - started
        return {
            **totals,
            "tokens": tokens,
            "tokens_per_s": tokens / elapsed,
            "train_s": elapsed,
            **self.learning_rate(),
        }

    def _proximal(self, parts: Sequence[Sequence[TokenSequence]], loss: Loss) -> list[list[torch.Tensor] | None]:
        """For each minibatch, what its microbatches' target tokens had as log-probabilities before the first update.

        None where nobody asks, and for the first minibatch, which is trained on by that very policy.
        """
        if not needs(loss).proximal:
            return [None] * len(parts)
        with torch.no_grad():
            return [None, *([self._logprobs(batch) for batch in self._microbatches(part)] for part in parts[1:])]

    def _logprobs(self, batch: Microbatch) -> torch.Tensor:
        return self.forward(batch, total_tokens=1, total_sequences=1).logprobs

    def _accumulate(
        self, part: Sequence[TokenSequence], loss: Loss, proximal: Sequence[torch.Tensor] | None = None
    ) -> dict[str, float]:
        """Gradients of one minibatch, microbatch by microbatch; returns means over its target tokens."""
        totals: dict[str, float] = {}
        for metrics in self._passes(part, loss, sum(sequence.num_targets for sequence in part), proximal):
            figures.add(totals, metrics)
        return totals

    def _microbatches(self, part: Sequence[TokenSequence]) -> Iterator[Microbatch]:
        """The microbatches of a minibatch, the same ones every time; with several threads, some for each."""
        total = sum(len(sequence.token_ids) for sequence in part)
        limit = self.microbatch_tokens if self.threads == 1 else min(self.microbatch_tokens, -(-total // self.threads))
        return microbatches(part, limit, self.device.torch)

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
            output = loss(tokens)
            share = len(batch.target_ids) / max(targets, 1)
            means = {"entropy": mean(tokens.entropy), **{f"loss/{name}": v for name, v in output.metrics.items()}}
            metrics = figures.share_of({"padding": batch.padding, **figures.to_floats(means)}, share)
            return output.loss, {"loss": output.loss.item(), **metrics}

        work = zip(self._microbatches(part), proximal or repeat(None), strict=False)
        if self.threads == 1:
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
        hidden = self.model.hidden(batch.tokens)[:, :-1][batch.target_mask]
        logits = self.model.logits(hidden) / self.temperature
        logprobs, entropy = token_logprobs_and_entropy(logits, batch.target_ids, entropy_gradient=entropy_gradient)
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
        """Clip the gradients, update the weights, clear the gradients; returns the norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.module.parameters(), self.section.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1
        return float(norm)

    def learning_rate(self) -> dict[str, float]:
        """The current learning rate of the first optimizer."""
        return {"learning_rate": float(next(iter(self.schedule.get_metrics().values())))}

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[list[float]]:
        """Log-probabilities of each sequence's target tokens, in order."""
        result = []
        for sequence in sequences:
            batch = next(iter(microbatches([sequence], len(sequence.token_ids), self.device.torch)))
            result.append(self._logprobs(batch).tolist())
        return result

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, schedule and random state (the weights are saved apart, as a Hugging Face folder)."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "updates": self.updates,
            "rng": self._rng.getstate(),
            "torch_rng": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.updates = state["updates"]
        self._rng.setstate(state["rng"])
        torch.set_rng_state(state["torch_rng"])

    def save(self, folder: Path) -> None:
        """Write weights (`model/`, a Hugging Face folder) and training state into `folder`."""
        self.model.save_hf(folder / "model")
        torch.save(self.state_dict(), folder / "state.pt.partial")
        (folder / "state.pt.partial").rename(folder / "state.pt")

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        from safetensors.torch import load_file

        self.model.load_hf(load_file(folder / "model" / "model.safetensors"))
        self.load_state_dict(torch.load(folder / "state.pt", weights_only=False))
