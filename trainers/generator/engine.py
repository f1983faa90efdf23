"""vLLM's engine as an asyncio object: continuous batching over all callers, weights swapped between two steps.

`InProcessEngine` steps vLLM in a thread for as long as there is work: waking the thread for every step would cost a
tenth of the time with a small model. Requests are admitted and aborted, and weights loaded, only between two steps and
in that thread, so a request in flight continues with the new weights; each sampled token carries the policy version
that sampled it. Callers queue orders for the next step, and get their answers while the thread steps. New requests salt
the prefix cache with the version, so keys and values of old weights are never reused. `trainers.generator.async_llm`
has the other kind of engine.

vLLM returns the output of a request once, at its end: creating an object for every token of every request costs a tenth
of all time with a small model. Until then vLLM keeps the tokens, and `_Request.starts` the versions that sampled them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from forge_env.errors import GeneratorError, UsageError
from forge_env.policy import NO_TOKENS
from forge_env.run.account import Account
from trainers.actors.ranks import Followers, on_this_gpu
from trainers.compat.vllm import num_tokens, request_states, sampled_tokens
from trainers.generator.lockstep import Abortion, Admission, Order, carry_out
from trainers.generator.receipt import receipt
from trainers.generator.types import Completion, EngineFailedError, SamplingOptions
from trainers.model.folder import GEMMA4

logger = logging.getLogger(__name__)

Weights = Callable[[], Iterable[tuple[str, Any]]]
ALWAYS = {"skip_tokenizer_init": True, "disable_log_stats": True}
"""vLLM arguments that every engine uses."""


@dataclass(slots=True)
class _Request:
    completion: Completion
    done: asyncio.Future[Completion]
    starts: list[tuple[int, int]] = field(default_factory=list)
    """`(version, number of tokens sampled before it)` for each policy version that samples this request."""


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine's start."""

    steps: int = 0
    tokens: int = 0
    """Tokens sampled for requests that have ended."""
    requests: int = 0


class Engine(ABC):
    """Interface between a generator and one vLLM engine; bound to the event loop in which it is created.

    `broken` is set when the engine has failed by itself and answers no further requests.
    """

    engine: Any
    _requests: Collection[str]
    """Ids of the requests in flight."""

    def __init__(self) -> None:
        self.version = 0
        self._loads = 1
        self.stats = EngineStats()
        self._most_tokens = 0
        self._count = 0
        self.account = Account("generator", "wait for requests")
        self._failure: GeneratorError | None = None
        self.broken = asyncio.Event()

    @abstractmethod
    async def generate(
        self, prompt_ids: ArrayLike, options: SamplingOptions, request_id: str | None = None
    ) -> Completion:
        """Sample one completion; safe to call many times at once. A cancelled call aborts its request.

        `request_id` is the caller's id for the request, unique among those in flight, for `abort`.

        Raises:
            GeneratorError: the engine has failed (`EngineFailedError`), or was closed.
        """

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """End a request; its completion is the tokens sampled so far, with the stop reason "abort"."""

    @abstractmethod
    async def load_weights(self, weights: Weights, version: int) -> float:
        """Swap the weights between two steps; return the seconds for which generation paused.

        `weights` are full, or adapters to those that the engine started with. If loading fails, so does the engine.
        """

    @abstractmethod
    async def sleep(self) -> None:
        """Pause until `wake` and free GPU memory; a CPU engine frees none.

        Requests wait. Those in flight continue after `wake`: their keys and values are recomputed with the weights
        loaded by then.
        """

    @abstractmethod
    async def wake(self) -> None:
        """Resume after `sleep`."""

    @abstractmethod
    async def checksum(self) -> tuple[int, bool]:
        """Checksum of the first process's weights, and whether it has all published weights, unchanged and in order."""

    @abstractmethod
    async def close(self) -> None:
        """Abort all requests in flight and stop stepping."""

    @property
    def in_flight(self) -> int:
        """Number of requests in flight."""
        return len(self._requests)

    @property
    def tokens(self) -> int:
        """Number of tokens sampled since the start, including requests in flight; never decreases."""
        states = request_states(self.engine)
        unfinished = (num_tokens(state) for request_id, state in states.items() if request_id in self._requests)
        # a request that has just ended is in neither count until its output is delivered
        self._most_tokens = max(self._most_tokens, self.stats.tokens + sum(unfinished))
        return self._most_tokens

    def check(self) -> None:
        """Raise the error that ended the engine, if there is one."""
        if self._failure is not None:
            raise self._failure

    def _failed(self, error: Exception) -> GeneratorError:
        """Store, log and return the error that ends the engine."""
        if not isinstance(error, GeneratorError):
            logger.error("the vLLM engine failed", exc_info=error)
            error = EngineFailedError(f"the vLLM engine failed: {type(error).__name__}: {error}")
        self._failure = error
        if isinstance(error, EngineFailedError):
            self.broken.set()
        return error

    def _begin(self, request_id: str | None) -> str:
        """Count a new request and return its id."""
        self._count += 1
        request_id = request_id or str(self._count)
        if request_id in self._requests:
            raise UsageError(
                f"a request named {request_id!r} is already in progress", fix="give every request its own name"
            )
        self.stats.requests += 1
        return request_id

    def _empty(self, prompt_ids: ArrayLike) -> Completion:
        return Completion(np.asarray(prompt_ids, np.int32), NO_TOKENS, NO_TOKENS, NO_TOKENS, "stop", self.version)

    def _complete(self, completion: Completion, output: Any, starts: Sequence[tuple[int, int]]) -> None:
        """Fill in a completion from vLLM's last output of its request; `starts` as in `take`."""
        sampled = output.outputs[0]
        take(completion, sampled.token_ids, sampled.logprobs, starts)
        self.stats.tokens += len(completion.token_ids)
        completion.stop_reason = sampled.finish_reason or "stop"
        completion.generator_version = self.version

    @property
    def _salt(self) -> str:
        """Salt of the prefix cache. It counts loads too: a run that is set back repeats versions with other weights."""
        return f"v{self.version}.{self._loads}"

    def _set_version(self, version: int) -> None:
        self.version = version
        self._loads += 1


class InProcessEngine(Engine):
    """An `LLMEngine` that a thread of this process steps.

    Args:
        engine_args: vLLM's `EngineArgs` as a dictionary.
        recompute_on_update: after a weight update, recompute the keys and values of requests in flight, so that every
            further token is sampled from exactly the new policy. If off, they are kept, which costs nothing.
        followers: the other processes of a tensor-parallel replica; in those processes, only `follow...` is called.
    """

    def __init__(
        self, engine_args: dict[str, Any], *, recompute_on_update: bool = False, followers: Followers | None = None
    ) -> None:
        from vllm import EngineArgs, LLMEngine

        super().__init__()
        with refusals():
            self._has_adapters = register_adapters(engine_args)
            arguments = EngineArgs(**{**ALWAYS, **engine_args})
            self.engine = LLMEngine.from_engine_args(arguments)
        self._reorders = reorders(self.engine)
        self._recompute_on_update = recompute_on_update
        self._followers = followers
        self._requests: dict[str, _Request] = {}
        self._orders: deque[Order] = deque()
        self._between_steps = asyncio.Lock()
        self._awake = asyncio.Event()
        self._awake.set()
        self._wanted = 0
        """Number of callers that wait for a pause between two steps."""
        self._work = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        # one thread for all steps, since each thread has its own memory and caches
        self._thread = ThreadPoolExecutor(1, "engine", initializer=on_this_gpu())

    async def generate(
        self, prompt_ids: ArrayLike, options: SamplingOptions, request_id: str | None = None
    ) -> Completion:
        """See `Engine`."""
        self.check()
        if self._loop_task is None:
            self._loop_task = asyncio.create_task(self._run(), name="engine")
        request_id = self._begin(request_id)
        completion = self._empty(prompt_ids)
        request = _Request(completion, asyncio.get_running_loop().create_future())
        self._requests[request_id] = request
        self._orders.append(Admission(request_id, completion.prompt_ids, options, time.monotonic()))
        self._work.set()
        try:
            return await request.done
        except asyncio.CancelledError:
            await asyncio.shield(self.abort(request_id))
            raise

    async def abort(self, request_id: str) -> None:
        """See `Engine`."""
        async with self._pause():
            request = self._requests.pop(request_id, None)
            if request is None:
                return
            if (state := request_states(self.engine).get(request_id)) is not None:
                take(request.completion, *sampled_tokens(state), request.starts)
            self.stats.tokens += len(request.completion.token_ids)
            self._orders.append(Abortion(request_id))
        request.completion.stop_reason = "abort"
        request.completion.generator_version = self.version
        if not request.done.done():
            request.done.set_result(request.completion)

    async def _run(self) -> None:
        """Step the engine while there is work; otherwise wait for a request."""
        try:
            while True:
                if not self._orders and not self.engine.has_unfinished_requests():
                    self._work.clear()
                    self.account.enter("wait for requests")
                    await self._work.wait()
                await self._awake.wait()
                async with self._between_steps:
                    if not self._awake.is_set():  # `sleep` was called in the meantime
                        continue
                    self.account.enter("generate")
                    if self._followers is None:
                        await self._in_thread(self._step_on)
                    else:
                        orders, salt = self._take_orders(), self._salt
                        local = self._in_thread(self._step, orders, salt)
                        await self._followers.beside(local, "follow", orders, salt)
        except Exception as error:  # noqa: BLE001 - task boundary: an error that ends the engine must reach every caller
            self._fail(error)

    @asynccontextmanager
    async def _pause(self) -> AsyncIterator[None]:
        """Context in which no step runs."""
        self._wanted += 1
        try:
            async with self._between_steps:
                yield
        finally:
            self._wanted -= 1

    def _step_on(self) -> None:
        """In the thread: step until no work is left or a caller waits for a pause."""
        self._step(self._take_orders(), self._salt)
        while not self._wanted and (self._orders or self.engine.has_unfinished_requests()):
            self._step(self._take_orders(), self._salt)

    def _step(self, orders: Sequence[Order], salt: str) -> None:
        for order in orders:
            if isinstance(order, Admission) and (request := self._requests.get(order.request_id)):
                request.starts.append((self.version, 0))
        for request_id, error in carry_out(self.engine, orders, salt).items():
            self._loop.call_soon_threadsafe(self._answer, request_id, error)
        outputs = self.engine.step()
        self.stats.steps += 1
        if outputs:
            self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _take_orders(self) -> list[Order]:
        return [self._orders.popleft() for _ in range(len(self._orders))]

    def _in_thread(self, work: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        return self._loop.run_in_executor(self._thread, work, *args)

    def _answer(self, request_id: str, error: Exception) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None and not request.done.done():
            request.done.set_exception(error)

    async def follow(self, orders: Sequence[Order], salt: str) -> None:
        """As a follower: carry out the leader's orders and take the same step."""
        await self._in_thread(self._step, orders, salt)

    def _deliver(self, outputs: list[Any]) -> None:
        try:
            for output in outputs:
                if (request := self._requests.get(output.request_id)) is None:
                    continue
                self._complete(request.completion, output, request.starts)
                del self._requests[output.request_id]
                if not request.done.done():
                    request.done.set_result(request.completion)
        except Exception as error:  # noqa: BLE001 - boundary of vLLM's data: unreadable output fails every request
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        error = self._failed(error)
        for request_id in list(self._requests):
            self._answer(request_id, error)

    async def load_weights(self, weights: Weights, version: int) -> float:
        """See `Engine`."""
        async with self._pause():
            self.check()
            started = time.perf_counter()
            with self.account.during("load weights"):
                await self._in_all(self._in_thread(self._load, weights, version), "follow_load", version)
            return time.perf_counter() - started

    async def _in_all(self, own: asyncio.Future[None], endpoint: str, *args: Any) -> None:
        """Await `own` here while `endpoint` runs in the other processes; an error ends the engine."""
        try:
            await (own if self._followers is None else self._followers.beside(own, endpoint, *args))
        except Exception as error:  # boundary of vLLM's engine: raised again after every request has failed
            self._fail(error)
            raise

    async def sleep(self) -> None:
        """See `Engine`."""
        async with self._pause():
            self.check()
            self._awake.clear()
            await self._in_all(self._in_thread(self._rest, True), "follow_rest", True)
            self.account.enter("wait for the trainer")

    async def wake(self) -> None:
        """See `Engine`."""
        self.check()
        await self._in_all(self._in_thread(self._rest, False), "follow_rest", False)
        self.account.enter("wait for requests")
        self._awake.set()

    async def follow_rest(self, asleep: bool) -> None:
        """As a follower: sleep or wake as the leader does."""
        await self._in_thread(self._rest, asleep)

    def _rest(self, asleep: bool) -> None:
        if asleep:
            self.engine.sleep(level=1, mode="keep")
        else:
            self.engine.wake_up()

    async def checksum(self) -> tuple[int, bool]:
        """See `Engine`."""
        from trainers.weights.checksum import held_by

        async with self._pause():
            self.check()
            checksums = await self._in_thread(self.engine.apply_model, held_by)
            return checksums[0], self._followers is None and holds_published(self.engine)

    async def follow_load(self, weights: Weights, version: int) -> None:
        """As a follower: load the same weights as the leader."""
        await self._in_thread(self._load, weights, version)

    def _load(self, weights: Weights, version: int) -> None:
        load_into(self.engine, weights(), has_adapters=self._has_adapters, reorders=self._reorders)
        if self._recompute_on_update:
            self.engine.reset_prefix_cache(True)
        self._set_version(version)
        for request_id, state in request_states(self.engine).items():
            if request := self._requests.get(request_id):
                request.starts.append((version, num_tokens(state)))

    async def close(self) -> None:
        """See `Engine`."""
        self._wanted += 1  # never decremented: the thread ends after its current step
        self._fail(GeneratorError("the generator was stopped"))
        if self._loop_task is not None:
            self._loop_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._loop_task
            self._loop_task = None
        self._thread.shutdown(wait=False)


def register_adapters(engine_args: Mapping[str, Any]) -> bool:
    """Register vLLM layers with adapters if the engine's arguments request them; return whether they do."""
    if "hf_overrides" not in engine_args:
        return False
    from trainers.generator import adapters  # noqa: F401 - registers itself with vLLM

    return True


def reorders(engine: Any) -> bool:
    """Whether updates need vLLM's full loading path: experts are stored in an order specific to their kernel."""
    return bool(engine.model_config.get_num_experts() > 0)


def holds_published(engine: Any) -> bool:
    """Whether the parameters of an engine with one process are exactly the published tensors.

    Reordered experts don't count. In Gemma 4, scales of blocks aren't parameters, and some keys are stored twice.
    """
    return not reorders(engine) and engine.model_config.hf_config.model_type != GEMMA4


@contextmanager
def refusals() -> Iterator[None]:
    """Convert errors of vLLM's start: to `UsageError` if it rejects its arguments, otherwise to `GeneratorError`."""
    try:
        yield
    except RuntimeError as error:
        raise GeneratorError(
            f"vLLM did not start: {error}",
            fix="run.log has the errors of its processes; if a GPU's memory ran out, lower generator.kv_cache_gb or "
            "generator.gpu_memory_utilization",
        ) from error
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"vLLM rejects its arguments: {error}", fix="see the generator section of the recipe"
        ) from error


def load_into(engine: Any, weights: Iterable[tuple[str, Any]], *, has_adapters: bool, reorders: bool) -> None:
    """Load whole weights or adapters, as published, into vLLM's `LLMEngine` between two steps."""
    from trainers.model.merging import reloadable, whole_weights

    device, base = engine.vllm_config.device_config.device, Path(engine.model_config.model)
    if has_adapters:
        from trainers.generator.adapters import load_adapters

        published = dict(weights)
        engine.apply_model(lambda model: load_adapters(model, published))
    elif reorders:
        whole = whole_weights(weights, base, everything=True, device=device)
        skipped: dict[str, Any] = {}
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": reloadable(whole, skipped)})
        if skipped:
            engine.apply_model(lambda model: model.load_weights(skipped.items()))
    else:
        whole = whole_weights(weights, base, device=device)
        engine.apply_model(lambda model: model.load_weights(whole))


def take(completion: Completion, token_ids: Sequence[int], logprobs: Any, starts: Sequence[tuple[int, int]]) -> None:
    """Fill in a completion from the tokens that vLLM sampled, and their flat log-probabilities.

    `starts` has `(version, number of tokens sampled before it)` for each policy version that sampled tokens.
    """
    completion.token_ids = np.array(token_ids, np.int32)
    completion.logprobs = np.array(logprobs.logprobs, np.float32)
    versions, before = np.array(starts, np.int32).reshape(-1, 2).T
    completion.versions = np.repeat(versions, np.diff(before, append=len(completion.token_ids)))
    completion.receipt = receipt(completion.prompt_ids, completion.token_ids, completion.logprobs)
