"""The generator actor: one vLLM engine, in one process or, tensor parallel, in several."""

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
from trainers.actors.remote import ActorDiedError
from trainers.generator.arguments import prepare_process, show_model
from trainers.generator.hold import Hold
from trainers.generator.lockstep import Order, name_rank
from trainers.generator.types import Completion, EngineFailedError, SamplingOptions, WeightsDroppedError

if TYPE_CHECKING:
    from trainers.generator.engine import Engine
    from trainers.weights.checksum import Served
    from trainers.weights.store import Published


def import_engine(**process: Any) -> None:
    """Import vLLM and what else an engine needs, which takes most of its start.

    Args:
        process: arguments of `trainers.generator.arguments.prepare_process`.
    """
    prepare_process(**process)
    from vllm import LLMEngine  # noqa: F401

    import trainers.generator.engine
    import trainers.weights.adapter
    import trainers.weights.store  # noqa: F401

    settle_imports()


class Generator(LedActor):
    """vLLM behind endpoints. Calls overlap; each is one request in the engine's running batch.

    Args:
        engine_args: vLLM's `EngineArgs` as a dictionary (`model`, `dtype`, `max_model_len`, ...).
        sampling_params: defaults of `SamplingOptions`.
        process: arguments of `trainers.generator.arguments.prepare_process`.
        recompute_on_update: compute keys and values of requests in flight anew after each weight update.
        apart: vLLM has processes of its own (`trainers.generator.async_llm`).
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
        self._defaults = sampling_params or {}
        self._process = {"with_gpus": False, "threads": 1, "kv_cache_gb": 1, **(process or {})}
        self._recompute_on_update = recompute_on_update
        self._engine: Any = None  # `Engine`; of several processes `InProcessEngine`
        self._store: Any = None
        self._pulled: Any = None
        self._updating = asyncio.Lock()
        """Held while it sleeps too: weights that arrive meanwhile are loaded afterwards."""
        self._resting = asyncio.Lock()
        self._asleep = self._tired = False
        self._hold = Hold()
        self._loaded = asyncio.Event()

    @concurrent_endpoint
    async def preload(self) -> None:
        """Import vLLM ahead of time, while the checkpoint is still being made."""
        await self.with_followers(asyncio.to_thread(import_engine, **self._process), "preload")

    @concurrent_endpoint
    async def setup(self) -> None:
        """Load the model and compile what there is to compile."""
        await self.with_followers(self._setup(), "setup")

    async def _setup(self) -> None:
        leave_as_it_stands()
        import_engine(**self._process)
        from trainers.weights.store import WeightStore

        self._engine = await self._start_engine()
        self._store = WeightStore()
        self._loaded.set()
        settle_heap()

    async def _start_engine(self) -> Engine:
        if not self._process["with_gpus"]:
            show_model(self._engine_args["model"])
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
        """Raises what has ended the engine: it would answer every request at once, with that."""
        await self._loaded.wait()
        await self._engine.broken.wait()
        self._engine.check()

    @concurrent_endpoint
    async def generate(
        self,
        prompt_ids: ArrayLike,
        options: dict[str, Any] | None = None,
        request_id: str | None = None,
        held: bool = False,
        at_least: int = 0,
    ) -> Completion:
        """Sample one completion of `prompt_ids`, [P], which are not sent back with it.

        Args:
            prompt_ids: tokens to condition on.
            options: of `SamplingOptions`, over the defaults.
            request_id: the caller's name for it, for `abort`.
            held: it is for the weights that are held.
            at_least: the oldest version that may sample it.

        Raises:
            WeightsHeldError: the weights are held for others.
            WeightsOldError: they are older.
        """
        self._hold.check(self._engine.version, held=held, at_least=at_least)
        completion: Completion = await self._engine.generate(
            prompt_ids, SamplingOptions(**{**self._defaults, **(options or {})}), request_id
        )
        completion.prompt_ids = completion.prompt_ids[:0]
        return completion

    @concurrent_endpoint
    async def hold(self) -> None:
        """From here on, take requests for held weights only."""
        self._hold.begin()

    @concurrent_endpoint
    async def release(self) -> None:
        """Take every request again."""
        self._hold.end()

    @concurrent_endpoint
    async def abort(self, request_id: str) -> None:
        """End a request: a caller that was cancelled there has nobody waiting here."""
        await self._engine.abort(request_id)

    @concurrent_endpoint
    async def update_weights(self, version: int, published: Published | None = None) -> dict[str, float]:
        """Pull `version` and swap it in between two engine steps; requests in flight go on with it.

        Args:
            version: of the policy.
            published: where it lies; by default the store is asked.

        Raises:
            WeightsDroppedError: it is gone, and so is its trainer, or there are newer ones; the engine goes on with
                those it has.
        """
        async with self._updating:
            started = time.perf_counter()
            await self._pull(version, published)
            pulled = time.perf_counter()
            stalled = await self._engine.load_weights(self._take_pulled, version)
        return {"pull_s": pulled - started, "stall_s": stalled}

    @concurrent_endpoint
    async def take(self, published: Published) -> None:
        """As a follower: take the weights that the first process has pulled, for `follow_load`."""
        self._pulled = await self._store.take(published)

    async def _pull(self, version: int, published: Published | None) -> None:
        try:
            published = published or await self._store.find(version)
            self._pulled = await self._store.take(published)
        except ActorDiedError as error:
            raise WeightsDroppedError(f"the weight store is gone, and with it version {version}: {error}") from error
        except (FileNotFoundError, ConnectionError) as error:
            raise WeightsDroppedError(f"version {version} is gone, or the trainer that had it: {error}") from error
        except OSError as error:
            raise GeneratorError(
                f"the weights of version {version} can't be fetched from the trainer: {error}",
                fix="see that this host reaches the trainer's at the addresses of job.workers",
            ) from error
        except Exception as error:  # boundary of torchstore: what it raises depends on when they were dropped
            if version in await self._store.versions():
                raise
            raise WeightsDroppedError(f"the weights of version {version} are not in the store any more") from error
        if self.followers is not None:
            await self.followers.call("take", replace(published, handles=self._pulled.handles))

    @concurrent_endpoint
    async def sleep(self) -> None:
        """Stand still and give back memory of the GPU, until `wake`; see `Engine.sleep`."""
        await self._rest(True)

    @concurrent_endpoint
    async def wake(self) -> None:
        """Go on, if it sleeps."""
        await self._rest(False)

    async def _rest(self, tired: bool) -> None:
        self._tired = tired
        async with self._resting:  # of those that wait here, the last word counts
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
        """Of the weights that the engine has, and of those it took.

        Args:
            published: where those lie; None: there are none.

        Raises:
            GeneratorError: they are gone, or the engine has failed.
        """
        from trainers.model.adapter import PREFIX
        from trainers.weights.checksum import Served, checksums

        async with self._updating:
            taken = None
            if published is not None:
                try:
                    taken = await asyncio.to_thread(checksums, await self._store.take(published))
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
        """As a follower: one step, as the first process takes it (see `lockstep`)."""
        await self._engine.follow(orders, salt)

    @concurrent_endpoint
    async def follow_load(self, version: int) -> None:
        """As a follower: swap in what `take` took."""
        await self._engine.follow_load(self._take_pulled, version)

    @concurrent_endpoint
    async def follow_rest(self, asleep: bool) -> None:
        """As a follower: sleep or wake as the first process does."""
        await self._engine.follow_rest(asleep)

    @concurrent_endpoint
    async def get_stats(self) -> dict[str, float]:
        """Counters since the start (see `EngineStats`), requests in flight, and `time/WHAT`: where the seconds went."""
        stats = self._engine.stats
        values = {name: float(getattr(stats, name)) for name in stats.__slots__}
        account = {f"time/{doing}": seconds for doing, seconds in self._engine.account.seconds().items()}
        values["tokens"] = float(self._engine.tokens)
        return {**values, "in_flight": float(self._engine.in_flight), **account}

    @concurrent_endpoint
    async def halt(self) -> None:
        """Abort what is in flight and stop stepping (Monarch reserves the name `stop` for ending an actor)."""
        if self._engine is not None:
            await self._engine.close()
