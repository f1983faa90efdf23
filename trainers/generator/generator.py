"""The generator actor: one vLLM engine, one process per tensor-parallel rank's host."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from trainers.actors.actor import ForgeActor, concurrent_endpoint
from trainers.generator.types import Completion, SamplingOptions


class Generator(ForgeActor):
    """vLLM behind endpoints. Calls overlap; each is one request in the engine's running batch.

    Args:
        engine_args: vLLM's `EngineArgs` as a dictionary (`model`, `dtype`, `max_model_len`, ...).
        sampling_params: defaults of `SamplingOptions`.
        process: arguments of `trainers.generator.engine.prepare_process`.
        recompute_on_update: compute keys and values of requests in flight anew after each weight update.
    """

    def __init__(
        self,
        engine_args: dict[str, Any],
        sampling_params: dict[str, Any] | None = None,
        process: dict[str, Any] | None = None,
        recompute_on_update: bool = False,
    ) -> None:
        self._engine_args = engine_args
        self._defaults = sampling_params or {}
        self._process = {"with_gpus": False, "threads": 1, "kv_cache_gb": 1, **(process or {})}
        self._recompute_on_update = recompute_on_update
        self._engine: Any = None
        self._store: Any = None

    @concurrent_endpoint
    async def preload(self) -> None:
        """Import vLLM ahead of time, while the checkpoint is still being made."""
        await asyncio.to_thread(self._import)

    def _import(self) -> None:
        from trainers.generator.engine import prepare_process

        prepare_process(**self._process)
        import vllm  # noqa: F401

    @concurrent_endpoint
    async def setup(self) -> None:
        """Load the model and compile what there is to compile."""
        self._import()
        from trainers.generator.engine import AsyncEngine
        from trainers.weights.store import WeightStore

        self._engine = AsyncEngine(self._engine_args, recompute_on_update=self._recompute_on_update)
        self._store = WeightStore()

    @concurrent_endpoint
    async def generate(
        self, prompt_ids: list[int], options: dict[str, Any] | None = None, request_id: str | None = None
    ) -> Completion:
        """Sample one completion of `prompt_ids`, [P]; `request_id` is the caller's name for it, for `abort`."""
        completion: Completion = await self._engine.generate(
            prompt_ids, SamplingOptions(**{**self._defaults, **(options or {})}), request_id
        )
        return completion

    @concurrent_endpoint
    async def abort(self, request_id: str) -> None:
        """End a request: a caller that was cancelled there has nobody waiting here."""
        await self._engine.abort(request_id)

    @concurrent_endpoint
    async def update_weights(self, version: int) -> dict[str, float]:
        """Pull `version` and swap it in between two engine steps; requests in flight go on with it."""
        started = time.perf_counter()
        weights = await self._store.pull(version)
        pulled = time.perf_counter()
        stalled = await self._engine.load_weights(lambda: weights, version)
        return {"pull_s": pulled - started, "stall_s": stalled, "total_s": time.perf_counter() - started}

    @concurrent_endpoint
    async def get_version(self) -> int:
        """The policy version in use."""
        return int(self._engine.version)

    @concurrent_endpoint
    async def get_stats(self) -> dict[str, float]:
        """Counters since the start (see `EngineStats`), requests in flight, and `time/WHAT`: where the seconds went."""
        stats = self._engine.stats
        values = {name: float(getattr(stats, name)) for name in stats.__slots__}
        account = {f"time/{doing}": seconds for doing, seconds in self._engine.account.seconds().items()}
        return {**values, "in_flight": float(self._engine.in_flight), **account}

    @concurrent_endpoint
    async def get_vllm_config(self) -> Any:
        """The engine's resolved configuration."""
        return self._engine.engine.vllm_config

    @concurrent_endpoint
    async def halt(self) -> None:
        """Abort what is in flight and stop stepping (Monarch reserves the name `stop` for ending an actor)."""
        if self._engine is not None:
            await self._engine.close()
