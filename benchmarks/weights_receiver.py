"""The receiving process of `benchmarks.weights`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from trainers.actors.actor import ForgeActor, endpoint


class Receiver(ForgeActor):
    """Pulls weights as a generator does."""

    @endpoint
    async def setup(self) -> None:
        """Connect."""
        from trainers.weights.store import WeightStore

        self._store = WeightStore()
        self._own: dict[str, Any] = {}

    @endpoint
    async def pull(self, version: int) -> float:
        """Have every tensor of `version` in this process's own; returns seconds."""
        started = time.perf_counter()
        self._load(await self._store.pull(version))
        return time.perf_counter() - started

    @endpoint
    async def pull_one_by_one(self, keys: list[str]) -> float:
        """As `pull`, for tensors put under keys of their own."""
        import torchstore

        started = time.perf_counter()
        self._load([(key.removeprefix("single/"), await torchstore.get(key)) for key in keys])
        return time.perf_counter() - started

    def _load(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Copy into the tensors of the time before, as a model's parameters are filled."""
        for name, tensor in weights:
            if name not in self._own:
                self._own[name] = tensor.clone()
            self._own[name].copy_(tensor)
