"""The trainer actor: TorchTitan's model, optimizer and schedule behind endpoints."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from forge_env.config.models import OptimizerSection
from trainers.actors.actor import ForgeActor, endpoint


class TitanTrainer(ForgeActor):
    """One model in training.

    Args:
        folder: Hugging Face checkpoint folder (config and tokenizer; weights where there are any).
        max_length: longest row.
        threads: CPU threads.
        seed: of initial weights and minibatch order.
        dtype: precision of the arithmetic; weights are float32.
    """

    def __init__(
        self,
        folder: str,
        *,
        max_length: int,
        threads: int = 1,
        with_gpus: bool = False,
        seed: int = 0,
        dtype: str = "float32",
    ) -> None:
        self._folder = folder
        self._max_length = max_length
        self._threads = threads
        self._with_gpus = with_gpus
        self._seed = seed
        self._dtype = dtype
        self._model: Any = None
        self._engine: Any = None
        self._device: Any = None
        self._store: Any = None
        self._loss: Any = None
        self._minibatches = 1
        self._published: int | None = None

    @endpoint
    async def setup(self) -> None:
        """Build the model and load its weights."""
        from trainers.titan.device import use_device
        from trainers.titan.model import TitanModel
        from trainers.weights.store import WeightStore

        self._device = use_device(self._with_gpus)
        self._model = TitanModel(
            self._folder, max_length=self._max_length, device=self._device.torch, seed=self._seed, dtype=self._dtype
        )
        self._store = WeightStore()

    @endpoint
    async def configure(
        self,
        optimizer: OptimizerSection,
        *,
        loss: Any,
        steps: int,
        microbatch_tokens: int,
        minibatches: int = 1,
        temperature: float = 1.0,
        threads: int | None = None,
    ) -> None:
        """Begin a phase of training: a fresh optimizer and schedule over `steps`, and its loss."""
        from trainers.titan.engine import TitanEngine

        self._loss = loss
        self._minibatches = minibatches
        self._engine = TitanEngine(
            self._model,
            optimizer,
            device=self._device,
            steps=steps,
            microbatch_tokens=microbatch_tokens,
            temperature=temperature,
            threads=threads or self._threads,
            seed=self._seed,
        )

    @endpoint
    async def train_step(self, sequences: list[Any]) -> dict[str, float]:
        """Update the weights from one batch of `TokenSequence`s; returns its metrics."""
        metrics: dict[str, float] = self._engine.train(sequences, self._loss, minibatches=self._minibatches)
        return metrics

    @endpoint
    async def push_weights(self, version: int) -> dict[str, float]:
        """Publish the weights as policy `version`, and forget the version before: generators have had it."""
        started = time.perf_counter()
        moved = await self._store.push(self._model.state_dict_hf(), version)
        if self._published is not None:
            await self._store.drop(self._published)
        self._published = version
        return {"push_s": time.perf_counter() - started, "bytes": float(moved)}

    @endpoint
    async def logprobs(self, sequences: list[Any]) -> list[list[float]]:
        """Log-probabilities of each sequence's target tokens under the current weights."""
        result: list[list[float]] = self._engine.logprobs(sequences)
        return result

    @endpoint
    async def save(self, folder: str) -> None:
        """Write weights and training state."""
        self._engine.save(Path(folder))

    @endpoint
    async def load(self, folder: str) -> None:
        """Read what `save` wrote."""
        self._engine.load(Path(folder))

    @endpoint
    async def save_model(self, folder: str) -> None:
        """Write a Hugging Face folder."""
        self._model.save_hf(Path(folder))
