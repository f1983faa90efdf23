"""A model behind an OpenAI-compatible chat endpoint (vLLM's server, hosted ones) as a policy.

    async with EndpointPolicy(EndpointOptions(model="qwen3", base_url="http://localhost:8000/v1")) as policy:
        trajectory = await fe.run_episode(make_env, policy, task=task)

A request that fails for a transient reason is retried with growing, jittered delays. If the retries are used up, or the
error is permanent, a subclass of `GeneratorError` is raised (`forge_env.endpoint.errors`); the answer is never empty.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Self

from forge_env import redaction
from forge_env.config.evaluation import EndpointOptions
from forge_env.endpoint.answers import assemble, fill_in, read_answer
from forge_env.endpoint.errors import (
    AccessDeniedError,
    EndpointError,
    EndpointTimeoutError,
    EndpointUnreachableError,
    MalformedAnswerError,
    NoSuchModelError,
    RequestRefusedError,
)
from forge_env.endpoint.history import REASONING, History
from forge_env.endpoint.http import Connections
from forge_env.endpoint.limiter import AdaptiveLimiter
from forge_env.errors import ContextLengthExceeded, GeneratorError, UsageError, suggestion
from forge_env.figures import duration
from forge_env.policy import NO_TOKENS, Policy, PolicySession, Reply
from forge_env.rollout.episode import Retry
from forge_env.tools.turns import read_turn
from forge_env.types import Message, Observation, ToolSpec
from forge_env.working_time import limited_elsewhere, waiting

if TYPE_CHECKING:
    from forge_env.endpoint.chat_format import TokenReader
    from forge_env.policy import IntArray


# ---
# Refusals about length: is the conversation too long, or the token limit of the reply?
#
# Servers disagree about a reply limit (`max_tokens`) that doesn't fit the context: some lower it, some refuse the
# request if the limit alone exceeds the context, some if prompt and limit together do. Without a limit, the remaining
# context limits the reply, which is less than a limit that was refused for that reason; so a refused request may be
# retried without one.

FIELDS = ("max_tokens", "max_completion_tokens")
"""Names of the reply limit, the older first."""

_CONTEXT_FULL = re.compile(
    r"context_length_exceeded|context length|context window|max_model_len|maximum.{0,40}tokens|prompt is too long", re.I
)
_BOUND = re.compile(r"max_?(?:completion|output|new)?_?tokens|(?:completion|output) tokens", re.I)
_LARGEST = re.compile(
    r"(?:context (?:length|window|size)|max_model_len|max_total_tokens|at most|<=|>)\D{0,30}?(\d[\d,]*)", re.I
)


def says_full(refusal: str) -> bool:
    """Whether a refusal says that the conversation, perhaps together with the reply limit, exceeds the context."""
    return _CONTEXT_FULL.search(refusal) is not None


def blames_bound(refusal: str) -> bool:
    """Whether the reply limit alone may have caused a refusal."""
    return says_full(refusal) or _BOUND.search(refusal) is not None


def largest(refusal: str) -> int | None:
    """Token limit quoted in a refusal, or None."""
    match = _LARGEST.search(refusal)
    return int(match[1].replace(",", "")) if match else None


def bound(body: dict[str, Any]) -> int | None:
    """Reply limit of a request in tokens, or None."""
    return next((body[name] for name in FIELDS if isinstance(body.get(name), int)), None)


def without_bound(body: dict[str, Any]) -> dict[str, Any]:
    """A copy of the request without a reply limit."""
    return {name: value for name, value in body.items() if name not in FIELDS}


def with_bound(body: dict[str, Any], tokens: int) -> dict[str, Any]:
    """A copy of the request with this reply limit, under the name that the request already uses."""
    return {**body, FIELDS[1] if FIELDS[1] in body else FIELDS[0]: tokens}


# ---
# Conversations with an endpoint.

Answer = tuple[Reply, dict[str, Any]]
"""A reply, and the answer's fields that hold the model's thoughts."""


class EndpointSession(PolicySession):
    """One conversation with an endpoint: its history, its request options and the state of the pending request."""

    def __init__(self, policy: EndpointPolicy, tools: list[ToolSpec], seed: int | None) -> None:
        self._policy = policy
        self._tools = tools
        self._body = policy.request(tools, seed)
        self._history = History(tools, as_text=policy.options.tools == "text")
        self._tokens: IntArray = NO_TOKENS
        self._turn = 0
        self._left: int | None = None  # tokens left of an outer limit, not one of the options
        self._unbounded = False
        self._opened = time.perf_counter()
        self._asked: float | None = None
        self._failure: EndpointError | None = None

    async def reply(self, observation: Observation) -> Reply:
        """The model's answer; see `EndpointPolicy.ask`."""
        self._history.add(observation)
        messages = self._history.messages(reasoning=not self._policy.refuses_reasoning)
        self._asked, self._failure = time.perf_counter(), None
        reply, thoughts = await self._ask({**self._body, "messages": messages})
        self._asked = self._failure = None
        given, text = reply.message, reply.message.content
        reply.message = self._read(reply)
        if given.tool_calls and len(given.tool_calls) != len(reply.message.tool_calls):
            text = reply.message.content  # the server removed its own calls from the text
        self._history.add_turn(text, reply.message, thoughts)
        self._tokens = reply.follow(self._tokens)
        self._turn += 1
        return reply

    def _read(self, reply: Reply) -> Message:
        reader, given = self._policy.reader, reply.message
        if reader is not None and len(reply.token_ids) and self._policy.options.tools == "native":
            return reader.parse(reply.token_ids.tolist(), self._tools, reply.prompt_ids.tolist())
        return read_turn(
            given.content,
            reasoning=given.reasoning_content,
            calls=given.tool_calls,
            tools=bool(self._tools),
            turn=self._turn,
        )

    async def _ask(self, body: dict[str, Any]) -> Answer:
        """Ask with the reply limit; if the endpoint refuses and the limit may be the cause, ask again without it."""
        policy, configured = self._policy, bound(body)
        most = min((tokens for tokens in (configured, self._left) if tokens is not None), default=None)
        if most is None:
            return await policy.ask(body, self._failed)
        if self._unbounded or (configured is None and policy.largest is not None and most >= policy.largest):
            return await policy.ask(without_bound(body), self._failed)
        try:
            return await policy.ask(with_bound(body, most), self._failed)
        except (ContextLengthExceeded, RequestRefusedError) as error:
            if (isinstance(error, EndpointError) and error.fatal) or not blames_bound(error.message):
                raise
            refusal = error.message
        self._failure = None
        answer = await policy.ask(without_bound(body), self._failed)  # raises again if the conversation is full
        if (limit := largest(refusal)) is not None:
            policy.largest = limit
        if most == configured and (configured >= limit if limit is not None else not says_full(refusal)):
            raise UsageError(
                f"the endpoint refuses replies of up to {configured} tokens: {refusal}",
                fix="lower --max-tokens, or leave it out: a reply may then be as long as the context allows",
            )
        self._unbounded = True  # the conversation only grows, so every later request with a limit would be refused too
        return answer

    def limit_reply(self, tokens: int) -> None:
        """Limit later replies to this many tokens, besides the options' limit, if the endpoint accepts limits."""
        self._left = tokens

    def _failed(self, error: EndpointError) -> None:
        self._failure = error

    def unanswered(self) -> GeneratorError | None:
        """Return the endpoint's error if it is to blame for a time limit that just ended the episode, else None.

        The endpoint is to blame if the pending request had failed and was waiting for a retry, or if it has waited
        without an answer for longer than the rest of the episode took. Slow but answered turns are the model's: they
        leave less time for the last one.
        """
        if self._failure is not None or self._asked is None:
            return self._failure
        silent = time.perf_counter() - self._asked
        if silent < self._asked - self._opened:
            return None
        self._policy.errors[EndpointTimeoutError.__name__] += 1
        return EndpointTimeoutError(f"no complete answer after {silent:.3g} s; a time limit ended the sample")


CHECK_S = 30.0


class EndpointPolicy(Policy):
    """Policy whose sessions share one endpoint's connections, concurrency limit and counters."""

    def __init__(
        self,
        options: EndpointOptions,
        *,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self.options = options
        self.exact_tokens = bool(options.exact_tokens)
        self.limiter = AdaptiveLimiter(start=options.start_concurrency, maximum=options.concurrency)
        self.errors: Counter[str] = Counter()
        """Number of failed requests by error class, including those whose retry succeeded."""
        self.fatal: EndpointError | None = None
        """Error that every other request would meet as well, or None."""
        self.answered = False
        """Whether the endpoint has answered at least one request."""
        self._connections = Connections(options.base_url, api_key=_api_key(options.api_key_env), uds=options.uds)
        self._served: list[str] = []
        self.largest: int | None = None
        """Token limit quoted by the endpoint when it refused a larger reply limit, or None."""
        self.reader: TokenReader | None = None
        """The trainer's chat format of this model, or None; the server may parse and end turns differently."""
        self.refuses_reasoning = False
        """Whether the endpoint rejected a request with the model's thoughts and accepted it without them."""
        self.tell: Callable[[str], object] = lambda text: None
        """Called with messages for the user."""
        self._renamed = False
        self._stopped = asyncio.Event()
        self._told_of_wait = False
        self._sleep = sleep
        self._rng = rng or random.Random()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._connections.close()

    def stop_waiting(self) -> None:
        """End all pauses before retries now; from then on, each request is tried at most once more."""
        self._stopped.set()

    async def check(self) -> None:
        """Fetch the list of models, so that a wrong address, key or model name is reported before anything starts.

        Raises:
            EndpointError: the endpoint doesn't answer, or it rejects the key.
            UsageError: the server is vLLM's and doesn't have the model.
        """
        try:
            data = await self._connections.exchange("GET", "models", timeout_s=CHECK_S)
        except EndpointUnreachableError as error:
            error.fix = (
                error.fix or "start the server, or check --base-url (OpenAI's own models: https://api.openai.com/v1)"
            )
            raise
        except EndpointTimeoutError as error:
            error.fix = error.fix or "is it an OpenAI-compatible endpoint? check --base-url"
            raise
        except RequestRefusedError as error:
            self._explain(error)
            if error.fatal and not isinstance(error, NoSuchModelError):
                raise
            return
        except EndpointError:
            return  # not every endpoint lists its models, or can do so at any time
        listed = data.get("data") if isinstance(data, dict) else None
        models = [item for item in listed or [] if isinstance(item, dict)] if isinstance(listed, list) else []
        self._served = [str(item.get("id")) for item in models]
        if not any(item.get("owned_by") == "vllm" for item in models):
            return
        if self.options.model not in self._served:
            raise UsageError(f"the server has no model {self.options.model!r}", fix=self._other_model())
        self.exact_tokens = self.options.exact_tokens is not False

    def _explain(self, error: EndpointError) -> None:
        """Set the error's fix as precisely as the options and the endpoint's list of models allow."""
        if self.answered and error.excusable and error.status != 401:
            error.fix = None  # key, address and model work for other requests
            return
        name = self.options.api_key_env
        if isinstance(error, AccessDeniedError) and name:
            known = os.environ.get(name)
            error.fix = f"the key in {name} is rejected" if known else f"set {name}, or name another with --api-key-env"
        if isinstance(error, NoSuchModelError) and self._served and self.options.model not in self._served:
            error.fix = self._other_model()

    def _other_model(self) -> str:
        return suggestion(self.options.model, self._served, f"it serves {', '.join(self._served[:10])}")

    def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
        """Start a conversation with these tools."""
        return EndpointSession(self, tools, seed)

    async def ask(self, body: dict[str, Any], on_failure: Callable[[EndpointError], None] = lambda _: None) -> Answer:
        """Send one request, and retry it while it fails for transient reasons.

        Raises:
            ContextLengthExceeded: the conversation doesn't fit.
            EndpointError: the last attempt failed.
        """
        options = self.options
        retry = Retry(options.retries, options.first_delay_s, options.longest_delay_s)
        for attempt in range(options.retries + 1):
            try:
                with limited_elsewhere():
                    reply, thoughts = await self._ask_once(body)
            except EndpointError as error:
                if isinstance(error, RequestRefusedError) and says_full(error.message):
                    raise ContextLengthExceeded(error.message) from error
                self.errors[type(error).__name__] += 1
                self._explain(error)
                on_failure(error)
                if error.fatal and not (error.excusable and self.answered):
                    self.fatal = error
                if not error.transient or attempt == options.retries or self._stopped.is_set():
                    raise
                with waiting():
                    await self._pause(retry.delay(attempt, self._rng), error.retry_after_s or 0.0)
            else:
                reply.metadata["attempts"] = attempt + 1
                return reply, thoughts
        raise AssertionError("unreachable")

    async def _pause(self, delay_s: float, asked_s: float) -> None:
        """Wait before a retry for `delay_s`, or longer if requested (`Retry-After`), up to the configured maximum."""
        longest = self.options.longest_delay_s
        if asked_s > longest and not self._told_of_wait:
            self._told_of_wait = True
            self.tell(
                f"the endpoint asks to wait {duration(asked_s)} (Retry-After); "
                f"retrying after {duration(longest)} (longest_delay_s)"
            )
        pause = asyncio.ensure_future(self._sleep(max(delay_s, min(asked_s, longest))))
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait([pause, stopped], return_when=asyncio.FIRST_COMPLETED)
        finally:
            pause.cancel()
            stopped.cancel()

    async def _ask_once(self, body: dict[str, Any]) -> Answer:
        sent = self._named(body)
        try:
            return await self._exchange(sent)
        except RequestRefusedError as error:
            if FIELDS[0] in sent and FIELDS[1] in error.message:
                self._renamed = True  # some models accept only the newer name of the token limit
                sent = self._named(body)
            elif _THOUGHTS.search(error.message) and (plain := _without_thoughts(sent)) != sent:
                try:
                    answer = await self._exchange(plain)
                except RequestRefusedError:
                    raise error from None  # the thoughts were not the cause
                self.refuses_reasoning = True
                return answer
            else:
                raise
        return await self._exchange(sent)

    def _named(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self._renamed or FIELDS[0] not in body:
            return body
        return {name if name != FIELDS[0] else FIELDS[1]: value for name, value in body.items()}

    async def _exchange(self, body: dict[str, Any]) -> Answer:
        async with self.limiter.slot() as begun:
            asked = time.perf_counter()
            try:
                data = await self._connections.exchange(
                    "POST", "chat/completions", body, timeout_s=self.options.timeout_s
                )
                reply, thoughts = _read(data)
                fill_in(reply, body)
            except EndpointError as error:
                if error.overload:
                    self.limiter.overloaded(begun)
                raise
            latency = time.perf_counter() - asked
            self.limiter.succeeded(begun)
        self.answered = True
        if self.fatal is not None and self.fatal.excusable:
            self.fatal = None  # the error concerned only that request
        reply.metadata["latency_s"] = round(latency, 6)
        return reply, thoughts

    def request(self, tools: list[ToolSpec], seed: int | None) -> dict[str, Any]:
        """Fields shared by all requests of a session."""
        options = self.options
        body = options.model_dump(include={"model", "temperature", "top_p", "max_tokens"}, exclude_none=True)
        if options.send_seed and seed is not None:
            body["seed"] = seed
        if tools and options.tools == "native":
            body["tools"] = [tool.to_openai() for tool in tools]
        if options.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.reader is not None:
            body["stop_token_ids"] = self.reader.stop_token_ids
        if self.exact_tokens:
            body |= {"return_token_ids": True, "logprobs": True}
        return {**body, **options.extra}


def _api_key(variable: str) -> str:
    """Key in an environment variable, "" if unset. `UsageError`: it is not a valid header value."""
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UsageError(
            f"the API key in {variable} has characters that are not printable ASCII",
            fix="copy the key again: it contains a line break, a typographic quote or a hidden character",
        )
    redaction.add(key, variable)
    return key


_THOUGHTS = re.compile(r"reasoning|thinking|thoughts|extra|unexpected|unknown|unsupported|not permitted", re.I)
"""Words in errors that may be caused by a field with thoughts."""


def _without_thoughts(body: dict[str, Any]) -> dict[str, Any]:
    messages = [
        {name: value for name, value in message.items() if name not in REASONING} for message in body["messages"]
    ]
    return {**body, "messages": messages}


def _read(data: Any) -> Answer:
    """Reply in an answer, streamed or whole. Any parsing failure is raised as `MalformedAnswerError`."""
    try:
        return read_answer(assemble(data) if isinstance(data, bytes) else data)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise MalformedAnswerError(f"the answer can't be read: {type(error).__name__}: {error}") from error
