"""The generator actor: one vLLM engine in one process, or in several with tensor parallelism."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike

from forge_env.errors import GeneratorError
from trainers.actors.actor import concurrent_endpoint
from trainers.actors.processes import leave_as_it_stands, settle_heap, settle_imports
from trainers.actors.ranks import LedActor
from trainers.compat.vllm import name_rank
from trainers.generator.arguments import caches_prefixes_on_cpu, prepare_process, show_model
from trainers.generator.lockstep import Order
from trainers.generator.types import Completion, EngineFailedError, Hold, SamplingOptions, WeightsDroppedError

if TYPE_CHECKING:
    from trainers.generator.engine import Engine
    from trainers.weights.checksum import Served
    from trainers.weights.transport import Published


def import_engine(**process: Any) -> None:
    """Import vLLM and the other modules that an engine needs, which takes most of an engine's start."""
    prepare_process(**process)
    from vllm import LLMEngine  # noqa: F401

    import trainers.generator.engine
    import trainers.model.merging
    import trainers.weights.reader  # noqa: F401

    settle_imports()


class Generator(LedActor):
    """Actor that serves a vLLM engine. Calls overlap; each `generate` is one request in the engine's running batch.

    Args:
        engine_args: vLLM's `EngineArgs` as a dictionary (`model`, `dtype`, `max_model_len`, ...).
        sampling_params: fields of `SamplingOptions`, for requests without options.
        process: arguments of `trainers.generator.arguments.prepare_process`.
        recompute_on_update: recompute keys and values of requests in flight after each weight update.
        apart: run vLLM in separate processes (`trainers.generator.async_llm`).
    """

    died = EngineFailedError

    def __init__(
        self,
        engine_args: dict[str, Any],
        sampling_params: dict[str, Any] | None = None,
        process: dict[str, Any] | None = None,
        recompute_on_update: bool = False,
        apart: bool = False,
    ) -> None:
        self._engine_args = engine_args
        self._apart = apart
        self._defaults = SamplingOptions(**(sampling_params or {}))
        self._process = {"with_gpus": False, "threads": 1, "kv_cache_gb": 1, **(process or {})}
        self._recompute_on_update = recompute_on_update
        self._engine: Any = None  # an `Engine`; with several processes an `InProcessEngine`
        self._weights: Any = None
        self._pulled: Any = None
        self._updating = asyncio.Lock()
        """Held during weight updates and during sleep: weights that arrive during sleep are loaded afterwards."""
        self._resting = asyncio.Lock()
        self._asleep = self._tired = False
        self._hold = Hold()
        self._loaded = asyncio.Event()

    @concurrent_endpoint
    async def preload(self) -> None:
        """Import vLLM in advance, while the checkpoint is still being written."""
        await self.with_followers(asyncio.to_thread(import_engine, **self._process), "preload")

    @concurrent_endpoint
    async def setup(self) -> None:
        """Start the engine: load the model and compile it if that is enabled."""
        await self.with_followers(self._setup(), "setup")

    async def _setup(self) -> None:
        leave_as_it_stands()
        import_engine(**self._process)
        from trainers.weights.reader import Reader

        self._engine = await self._start_engine()
        self._weights = Reader()
        self._loaded.set()
        settle_heap()

    async def _start_engine(self) -> Engine:
        if not self._process["with_gpus"]:
            show_model(self._engine_args["model"])
            if not caches_prefixes_on_cpu(self._engine_args["model"]):
                self._engine_args["enable_prefix_caching"] = False
        if self._apart:
            from trainers.generator.async_llm import AsyncLLMEngine

            return await AsyncLLMEngine.start(self._engine_args, recompute_on_update=self._recompute_on_update)
        import torch

        from trainers.generator.engine import InProcessEngine

        if self._engine_args.get("tensor_parallel_size", 1) > 1:
            on_host = torch.cuda.device_count() if self._process["with_gpus"] else self.rank + 1
            name_rank(self.rank, self.rank % on_host)
        return InProcessEngine(
            self._engine_args, recompute_on_update=self._recompute_on_update, followers=self.followers
        )

    @concurrent_endpoint
    async def ended(self) -> None:
        """Wait until the engine fails, then raise its error, which every further request would raise at once."""
        await self._loaded.wait()
        await self._engine.broken.wait()
        self._engine.check()

    @concurrent_endpoint
    async def generate(
        self,
        prompt_ids: ArrayLike,
        options: SamplingOptions | None = None,
        request_id: str | None = None,
        held: bool = False,
        at_least: int = 0,
    ) -> Completion:
        """Sample one completion; its `prompt_ids` are empty, since the caller has them.

        Args:
            prompt_ids: tokens to condition on, [P].
            options: how to sample; None: with the actor's `sampling_params`.
            request_id: the caller's id for the request, for `abort`.
            held: whether the request is for held weights.
            at_least: oldest policy version that may sample it.

        Raises:
            WeightsHeldError: the weights are held for other callers.
            WeightsOldError: the weights are older than `at_least`.
        """
        self._hold.check(self._engine.version, held=held, at_least=at_least)
        completion: Completion = await self._engine.generate(prompt_ids, options or self._defaults, request_id)
        completion.prompt_ids = completion.prompt_ids[:0]
        return completion

    @concurrent_endpoint
    async def hold(self) -> None:
        """Refuse requests that are not for held weights, from now on."""
        self._hold.held = True

    @concurrent_endpoint
    async def release(self) -> None:
        """Accept all requests again."""
        self._hold.held = False

    @concurrent_endpoint
    async def abort(self, request_id: str) -> None:
        """Abort a request, for example because its caller was cancelled in another process."""
        await self._engine.abort(request_id)

    @concurrent_endpoint
    async def update_weights(self, version: int, published: Published | None = None) -> dict[str, float]:
        """Pull `version` and swap it in between two engine steps; requests in flight continue with it.

        Args:
            version: policy version.
            published: location of the weights; None: it is looked up in TorchStore.

        Returns:
            Seconds of the pull (`pull_s`) and of the pause in generation (`stall_s`).

        Raises:
            WeightsDroppedError: the weights are gone, because newer ones replaced them or their trainer died; the
                engine keeps its current weights.
            GeneratorError: the weights can't be fetched, or the engine has failed.
        """
        async with self._updating:
            started = time.perf_counter()
            await self._pull(version, published)
            pulled = time.perf_counter()
            stalled = await self._engine.load_weights(self._take_pulled, version)
        return {"pull_s": pulled - started, "stall_s": stalled}

    @concurrent_endpoint
    async def take(self, published: Published) -> None:
        """As a follower: get the weights that the first process has pulled, for `follow_load`."""
        self._pulled = await self._weights.take(published)

    async def _pull(self, version: int, published: Published | None) -> None:
        try:
            published = published or await self._weights.find(version)
            self._pulled = await self._weights.take(published)
        except (FileNotFoundError, ConnectionError) as error:
            raise WeightsDroppedError(f"version {version} or its trainer is gone: {error}") from error
        except OSError as error:
            raise GeneratorError(
                f"the weights of version {version} can't be fetched from the trainer: {error}",
                fix="check that this host can reach the trainer's host at its address in job.workers",
            ) from error
        if self.followers is not None:
            await self.followers.call("take", replace(published, handles=self._pulled.handles, key=None))

    @concurrent_endpoint
    async def sleep(self) -> None:
        """Pause and free GPU memory until `wake`; see `Engine.sleep`."""
        await self._rest(True)

    @concurrent_endpoint
    async def wake(self) -> None:
        """Resume, if asleep."""
        await self._rest(False)

    async def _rest(self, tired: bool) -> None:
        self._tired = tired
        async with self._resting:  # of several waiting calls, the latest one decides
            if self._tired and not self._asleep:
                await self._updating.acquire()
                self._asleep = True
                await self._engine.sleep()
            elif self._asleep and not self._tired:
                await self._engine.wake()
                self._asleep = False
                self._updating.release()

    @concurrent_endpoint
    async def checksums(self, published: Published | None = None) -> Served:
        """Compute checksums of the engine's weights and, if their location is given, of the published weights."""
        from trainers.model.adapter import PREFIX
        from trainers.weights.checksum import Served, checksums

        async with self._updating:
            taken = None  # checksums of the published weights, by tensor
            if published is not None:
                try:
                    taken = await asyncio.to_thread(checksums, await self._weights.take(published))
                except OSError as error:
                    raise WeightsDroppedError(f"there are newer weights: {error}") from error
            held, alone = await self._engine.checksum()
            adapters = taken is not None and any(name.startswith(PREFIX) for name in taken)
            return Served(self._engine.version, taken, held, alone and not adapters)

    def _take_pulled(self) -> Any:
        weights, self._pulled = self._pulled, None
        return weights

    @concurrent_endpoint
    async def follow(self, orders: Sequence[Order], salt: str) -> None:
        """As a follower: take the same step as the first process (see `lockstep`)."""
        await self._engine.follow(orders, salt)

    @concurrent_endpoint
    async def follow_load(self, version: int) -> None:
        """As a follower: swap in the weights that `take` has fetched."""
        await self._engine.follow_load(self._take_pulled, version)

    @concurrent_endpoint
    async def follow_rest(self, asleep: bool) -> None:
        """As a follower: sleep or wake as the first process does."""
        await self._engine.follow_rest(asleep)

    @concurrent_endpoint
    async def get_stats(self) -> dict[str, float]:
        """Return counters since the start (see `EngineStats`), `in_flight`, and seconds by activity (`time/NAME`)."""
        stats = self._engine.stats
        values = {name: float(getattr(stats, name)) for name in stats.__slots__}
        account = {f"time/{activity}": seconds for activity, seconds in self._engine.account.seconds().items()}
        values["tokens"] = float(self._engine.tokens)
        return {**values, "in_flight": float(self._engine.in_flight), **account}

    @concurrent_endpoint
    async def halt(self) -> None:
        """Abort all requests in flight and stop stepping (Monarch reserves the name `stop` for ending an actor)."""
        if self._engine is not None:
            await self._engine.close()
