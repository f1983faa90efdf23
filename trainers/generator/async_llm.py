"""vLLM's `AsyncLLM` as a generator's engine: a separate process steps it, and plans each step during the previous one.

The CPU work between two steps, which would leave the GPU idle, then overlaps with a step. Weights are swapped while
vLLM's scheduler is paused; requests in flight are kept. Weights are not sent through vLLM's messages: vLLM's workers
map the memory into which this process has pulled them.

Requests that arrive during an update wait for its end, so that none computes keys and values under the cache salt of
other weights. Requests that vLLM has already queued keep their salt. Unless `recompute_on_update` is on, they may reuse
keys and values of the previous weights, as requests in flight do.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

from numpy.typing import ArrayLike

from forge_env.errors import GeneratorError
from trainers.compat.vllm import patch_shutdown
from trainers.generator.engine import ALWAYS, Engine, Weights, holds_published, refusals, register_adapters, reorders
from trainers.generator.lockstep import sampling_params
from trainers.generator.types import Completion, SamplingOptions

WORKER = "trainers.generator.async_llm_worker.WeightLoader"
"""Class whose methods vLLM adds to its workers (`worker_extension_cls`)."""


class AsyncLLMEngine(Engine):
    """An engine around an `AsyncLLM`; create it with `start`."""

    def __init__(self, llm: Any, *, recompute_on_update: bool = False) -> None:
        super().__init__()
        self.engine = llm
        self._recompute_on_update = recompute_on_update
        self._requests: set[str] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._watch: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, engine_args: dict[str, Any], *, recompute_on_update: bool = False) -> AsyncLLMEngine:
        """Start vLLM's processes and wait until the model is loaded; arguments as for `InProcessEngine`."""
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        patch_shutdown()
        with refusals():
            register_adapters(engine_args)
            arguments = AsyncEngineArgs(**{**ALWAYS, **engine_args, "worker_extension_cls": WORKER})
            llm = await asyncio.to_thread(AsyncLLM.from_engine_args, arguments, start_engine_loop=False)
        engine = cls(llm, recompute_on_update=recompute_on_update)
        try:
            await llm.update_weight_version(str(engine.version))
            pids = await llm.collective_rpc("own_pid")
        except BaseException:  # also on cancellation: leave no process behind
            await asyncio.to_thread(llm.shutdown)
            raise
        engine._watch = asyncio.create_task(engine._watch_workers(pids), name="engine")
        return engine

    async def _watch_workers(self, pids: Iterable[int]) -> None:
        """Fail the engine when any worker process ends; without requests in flight, nothing else would detect it."""
        from trainers.actors.processes import end_of

        ends = [asyncio.create_task(end_of(pid)) for pid in pids]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        if self._failure is None:
            self._failed(RuntimeError("its process ended"))

    async def generate(
        self, prompt_ids: ArrayLike, options: SamplingOptions, request_id: str | None = None
    ) -> Completion:
        """See `Engine`."""
        self.check()
        request_id = self._begin(request_id)
        self._requests.add(request_id)
        completion = self._empty(prompt_ids)
        try:
            await self._open.wait()
            self.account.enter("generate")
            output = await self._answer(completion, options, request_id)
            spans = output.outputs[0].weight_versions or ()
            self._complete(completion, output, [(int(span.version), span.start) for span in spans])
        finally:
            self._requests.discard(request_id)
            if not self._requests and self._open.is_set():
                self.account.enter("wait for requests")
        return completion

    async def _answer(self, completion: Completion, options: SamplingOptions, request_id: str) -> Any:
        """Run a request and return vLLM's last output of it."""
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        self.check()
        prompt = {"prompt_token_ids": completion.prompt_ids.tolist(), "cache_salt": self._salt}
        outputs = self.engine.generate(prompt, sampling_params(options), request_id, priority=options.priority)
        last = None
        try:
            async for output in outputs:
                last = output
        except EngineGenerateError as error:  # affects only this request
            raise GeneratorError(f"vLLM failed at a request: {error.__cause__ or error}") from error
        except EngineDeadError as error:
            raise (self._failure or self._failed(error)) from error
        self.check()
        assert last is not None, "vLLM has ended a request without an output"
        return last

    async def abort(self, request_id: str) -> None:
        """See `Engine`."""
        if request_id in self._requests:
            await self.engine.abort(request_id)

    async def load_weights(self, weights: Weights, version: int) -> float:
        """See `Engine`."""
        from trainers.weights.flat import Flat

        self.check()
        tensors = weights()
        flat = tensors if isinstance(tensors, Flat) else Flat.of(dict(tensors))
        message = pickle.dumps((flat.layouts, flat.handles, reorders(self.engine)))
        started = time.perf_counter()
        self._open.clear()
        try:
            with self.account.during("load weights"):
                async with self._or_end():
                    await self.engine.pause_generation(mode="keep", clear_cache=self._recompute_on_update)
                    await self.engine.collective_rpc("load_flat", args=(message,))
                    await self.engine.update_weight_version(str(version))
                    self._set_version(version)
                    await self.engine.resume_generation()
        finally:
            self._open.set()
        return time.perf_counter() - started

    @asynccontextmanager
    async def _or_end(self) -> AsyncIterator[None]:
        """Context in which an error ends the engine."""
        try:
            yield
        except Exception as error:  # boundary of vLLM's engine: raised again after every request has failed
            self._failed(error)
            self._open.set()
            await self._abort_all()
            raise

    async def sleep(self) -> None:
        """See `Engine`."""
        self.check()
        self._open.clear()
        async with self._or_end():
            await self.engine.sleep(level=1, mode="keep")
        self.account.enter("wait for the trainer")

    async def wake(self) -> None:
        """See `Engine`."""
        self.check()
        async with self._or_end():
            await self.engine.wake_up()
        self.account.enter("generate" if self._requests else "wait for requests")
        self._open.set()

    async def checksum(self) -> tuple[int, bool]:
        """See `Engine`."""
        self.check()
        checksums = await self.engine.collective_rpc("checksum")
        return checksums[0], len(checksums) == 1 and holds_published(self.engine)

    async def close(self) -> None:
        """See `Engine`."""
        self._failed(GeneratorError("the generator was stopped"))
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        await self._abort_all()
        if self.engine.output_handler is not None:
            self.engine.output_handler.cancel()  # or it may log the end of vLLM's process as an error
        await asyncio.to_thread(self.engine.shutdown)

    async def _abort_all(self) -> None:
        if not self.engine.errored:  # otherwise vLLM has already failed every request
            await self.engine.abort(list(self._requests))
