"""The receiving process of `benchmarks.weights`."""

from __future__ import annotations

import time

from trainers.actors.actor import ForgeActor, endpoint


class Receiver(ForgeActor):
    """Pulls weights as a generator does."""

    @endpoint
    async def setup(self) -> None:
        """Connect."""
        from trainers.weights.store import WeightStore

        self._store = WeightStore()

    @endpoint
    async def pull(self, version: int) -> float:
        """Have every tensor of `version` here; returns seconds."""
        started = time.perf_counter()
        for _, tensor in await self._store.pull(version):
            tensor[-1].item()
        return time.perf_counter() - started

    @endpoint
    async def pull_one_by_one(self, keys: list[str]) -> float:
        """As `pull`, for tensors put under keys of their own."""
        import torchstore

        started = time.perf_counter()
        for key in keys:
            (await torchstore.get(key))[-1].item()
        return time.perf_counter() - started
