"""vLLM's engine as an asyncio object: continuous batching over all callers, weights swapped between two steps.

`InProcessEngine` steps it in a thread, for as long as there is work: to wake it for every step would cost a tenth of a
small model's time. Requests are admitted and aborted and weights loaded only between two steps, in that thread, so a
request in flight simply goes on with the new weights; every sampled token carries the version that sampled it. Callers
leave orders for the next step, and are answered beside it. New requests salt the prefix cache with the version, so keys
and values of old weights are never reused. `trainers.generator.async_llm` has the other kind of engine.

vLLM is asked for the output of a request once, at its end: an object for every token of every request costs a tenth of
all time with a small model. It keeps the tokens meanwhile, and which weights sampled them.
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
from trainers.actors.ranks import Followers
from trainers.generator.lockstep import Abortion, Admission, Order, carry_out
from trainers.generator.receipt import receipt
from trainers.generator.types import Completion, EngineFailedError, SamplingOptions

logger = logging.getLogger(__name__)

Weights = Callable[[], Iterable[tuple[str, Any]]]
ALWAYS = {"skip_tokenizer_init": True, "disable_log_stats": True}
"""Arguments of vLLM."""


@dataclass(slots=True)
class _Request:
    completion: Completion
    done: asyncio.Future[Completion]
    starts: list[tuple[int, int]] = field(default_factory=list)
    """`(version, tokens before)` of each version that samples it."""


@dataclass(slots=True)
class EngineStats:
    """Counters since the start."""

    steps: int = 0
    tokens: int = 0
    """Of requests that have ended."""
    requests: int = 0


class Engine(ABC):
    """What a generator asks: one vLLM engine, for the event loop in which it is made.

    Attributes:
        version: of the weights.
        stats: counters.
        account: where the time goes.
        broken: set when the engine has failed by itself: it answers no request any more.
        engine: vLLM's.
    """

    engine: Any
    _requests: Collection[str]
    """Names of those under way."""

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

        Args:
            prompt_ids: tokens to condition on, int32 [P].
            options: how to sample.
            request_id: a name of the caller's, unique among those in flight, for `abort`.

        Raises:
            GeneratorError: the engine has failed (`EngineFailedError`), or was closed.
            UsageError: a request of that name is under way.
        """

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """End a request; what it has sampled so far is its completion, with the stop reason "abort"."""

    @abstractmethod
    async def load_weights(self, weights: Weights, version: int) -> float:
        """Swap the weights between two steps; returns the seconds that generation stood still.

        Args:
            weights: whole ones, or adapters to those that the engine was made with (`trainers.weights.adapter`).
            version: theirs.

        Raises:
            GeneratorError: the engine has failed, or was closed.
            Exception: loading failed, and with it the engine: nobody knows which weights it holds.
        """

    @abstractmethod
    async def sleep(self) -> None:
        """Stand still until `wake`, and give back what memory of a GPU there is; on a CPU that is none.

        Requests wait. Those under way go on afterwards: their keys and values are computed anew, under the weights that
        are there by then.

        Raises:
            GeneratorError: the engine has failed, or was closed.
        """

    @abstractmethod
    async def wake(self) -> None:
        """Go on. Errors as in `sleep`."""

    @abstractmethod
    async def checksum(self) -> tuple[int, bool]:
        """Checksum of all weights, as far as the first process has them, and whether they are whole and in order there.

        Generation stands still meanwhile, for about as long as it takes to read them once.

        Raises:
            GeneratorError: the engine has failed, or was closed.
        """

    @abstractmethod
    async def close(self) -> None:
        """Abort what is in flight and stop stepping."""

    @property
    def _states(self) -> Iterable[Any]:
        """vLLM's of the requests that it works on."""
        # a copy, since a step in another thread ends requests
        return list(self.engine.output_processor.request_states.values())

    @property
    def in_flight(self) -> int:
        """Requests under way."""
        return len(self._requests)

    @property
    def tokens(self) -> int:
        """Tokens sampled since the start, those of requests under way included."""
        wanted = self._requests
        unfinished = (each.detokenizer.num_output_tokens() for each in self._states if each.external_req_id in wanted)
        # a request that has just ended is in neither count until it is delivered
        self._most_tokens = max(self._most_tokens, self.stats.tokens + sum(unfinished))
        return self._most_tokens

    def check(self) -> None:
        """Raise what has ended the engine."""
        if self._failure is not None:
            raise self._failure

    def _failed(self, error: Exception) -> GeneratorError:
        """Remember, log and give back what ends the engine."""
        if not isinstance(error, GeneratorError):
            logger.error("the vLLM engine failed", exc_info=error)
            error = EngineFailedError(f"the vLLM engine failed: {type(error).__name__}: {error}")
        self._failure = error
        if isinstance(error, EngineFailedError):
            self.broken.set()
        return error

    def _begin(self, request_id: str | None) -> str:
        """The name of a new request."""
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
        """Fill in vLLM's last output of a request; `starts` as in `_take`."""
        sampled = output.outputs[0]
        _take(completion, sampled.token_ids, sampled.logprobs, starts)
        self.stats.tokens += len(completion.token_ids)
        completion.stop_reason = sampled.finish_reason or "stop"
        completion.generator_version = self.version

    @property
    def _salt(self) -> str:
        """Of the prefix cache: a run that was set back reaches a version twice, with different weights."""
        return f"v{self.version}.{self._loads}"

    def _set_version(self, version: int) -> None:
        self.version = version
        self._loads += 1


class InProcessEngine(Engine):
    """An `LLMEngine` that a thread of this process steps.

    Args:
        engine_args: vLLM's `EngineArgs` as a dictionary.
        recompute_on_update: after new weights, compute the keys and values of requests in flight anew, so that
            every further token is sampled from exactly the new policy. Off, they are kept, which costs nothing.
        followers: the other processes of a tensor-parallel replica; one of those is itself only asked to `follow`.

    Raises:
        UsageError: vLLM refuses `engine_args`.
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
        """Callers that want to come between two steps."""
        self._work = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        # always the same one: memory and caches of a thread are its own
        self._thread = ThreadPoolExecutor(1, "engine")

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
            for state in self._states:
                if state.external_req_id == request_id:
                    found = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs
                    _take(request.completion, *found, request.starts)
            self.stats.tokens += len(request.completion.token_ids)
            self._orders.append(Abortion(request_id))
        request.completion.stop_reason = "abort"
        request.completion.generator_version = self.version
        if not request.done.done():
            request.done.set_result(request.completion)

    async def _run(self) -> None:
        """Step the engine while there is work; sleep on an event while there is none."""
        try:
            while True:
                if not self._orders and not self.engine.has_unfinished_requests():
                    self._work.clear()
                    self.account.enter("wait for requests")
                    await self._work.wait()
                await self._awake.wait()
                async with self._between_steps:
                    if not self._awake.is_set():  # it fell asleep meanwhile
                        continue
                    self.account.enter("generate")
                    if self._followers is None:
                        await self._in_thread(self._step_on)
                    else:
                        orders, salt = self._take_orders(), self._salt
                        own = self._in_thread(self._step, orders, salt)
                        await self._followers.beside(own, "follow", orders, salt)
        except Exception as error:  # noqa: BLE001 - task boundary: whatever ends the engine must reach every caller
            self._fail(error)

    @asynccontextmanager
    async def _pause(self) -> AsyncIterator[None]:
        """Inside, no step is under way."""
        self._wanted += 1
        try:
            async with self._between_steps:
                yield
        finally:
            self._wanted -= 1

    def _step_on(self) -> None:
        """In the thread: step until nothing is left to do, or somebody wants to come between two steps."""
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
        """As a follower: carry out the leader's orders and take the step that it takes."""
        await self._in_thread(self._step, orders, salt)

    def _deliver(self, outputs: list[Any]) -> None:
        try:
            for output in outputs:
                self._end(output)
        except Exception as error:  # noqa: BLE001 - boundary of vLLM's data: what can't be read, every caller is told
            self._fail(error)

    def _end(self, output: Any) -> None:
        request = self._requests.get(output.request_id)
        if request is None:
            return
        self._complete(request.completion, output, request.starts)
        del self._requests[output.request_id]
        if not request.done.done():
            request.done.set_result(request.completion)

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
        """Do `own` here, and `endpoint` in the other processes; what fails ends the engine."""
        try:
            await (own if self._followers is None else self._followers.beside(own, endpoint, *args))
        except Exception as error:  # boundary of vLLM's engine: passed on when every caller is told
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
            found = await self._in_thread(self.engine.apply_model, held_by)
            return found[0], self._followers is None and not self._reorders

    async def follow_load(self, weights: Weights, version: int) -> None:
        """As a follower: swap the weights as the leader does."""
        await self._in_thread(self._load, weights, version)

    def _load(self, weights: Weights, version: int) -> None:
        from trainers.weights.adapter import whole_weights

        device, base = self.engine.vllm_config.device_config.device, Path(self.engine.model_config.model)
        if self._has_adapters:
            from trainers.generator.adapters import load_adapters

            published = dict(weights())
            self.engine.apply_model(lambda model: load_adapters(model, published))
        elif self._reorders:
            whole = whole_weights(weights(), base, everything=True, device=device)
            self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": whole})
        else:
            whole = whole_weights(weights(), base, device=device)
            self.engine.apply_model(lambda model: _load(model, whole))
        if self._recompute_on_update:
            self.engine.reset_prefix_cache(True)
        self._set_version(version)
        for state in self._states:
            if request := self._requests.get(state.external_req_id):
                request.starts.append((version, state.detokenizer.num_output_tokens()))

    async def close(self) -> None:
        """See `Engine`."""
        self._wanted += 1  # and does not go back: the thread ends after the step under way
        self._fail(GeneratorError("the generator was stopped"))
        if self._loop_task is not None:
            self._loop_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._loop_task
            self._loop_task = None
        self._thread.shutdown(wait=False)


def register_adapters(engine_args: Mapping[str, Any]) -> bool:
    """Register layers with adapters with vLLM if an engine's arguments request them. Returns whether they do."""
    if "hf_overrides" not in engine_args:
        return False
    from trainers.generator import adapters  # noqa: F401 - registers itself with vLLM

    return True


def reorders(engine: Any) -> bool:
    """Whether new weights have to be loaded as the first ones were: experts lie in an order of their kernel's own."""
    return bool(engine.model_config.get_num_experts() > 0)


@contextmanager
def refusals() -> Iterator[None]:
    """Make vLLM's refusal of its arguments a `UsageError`."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"vLLM refuses its arguments: {error}", fix="see the generator section of the recipe"
        ) from error


def _load(model: Any, weights: Iterable[tuple[str, Any]]) -> None:
    model.load_weights(weights)


def _take(completion: Completion, token_ids: Sequence[int], logprobs: Any, starts: Sequence[tuple[int, int]]) -> None:
    """Fill in what vLLM sampled; `starts` are `(version, tokens before)` of each version that took part."""
    completion.token_ids = np.array(token_ids, np.int32)
    completion.logprobs = np.array(logprobs.logprobs, np.float32)
    versions, before = np.array(starts, np.int32).reshape(-1, 2).T
    completion.versions = np.repeat(versions, np.diff(before, append=len(completion.token_ids)))
    completion.receipt = receipt(completion.prompt_ids, completion.token_ids, completion.logprobs)
