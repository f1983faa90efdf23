"""A model behind an OpenAI-compatible chat endpoint (vLLM's server, hosted ones) as a policy.

    async with EndpointPolicy(EndpointOptions(model="qwen3", base_url="http://localhost:8000/v1")) as policy:
        trajectory = await fe.run_episode(make_env, policy, task=task)

A request that fails for a passing reason is asked again with growing, jittered delays; what still fails, and what
can't succeed, is a `GeneratorError` of a class that names it (`endpoint_errors`), never an empty answer.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from forge_env.errors import ContextLengthExceeded, UsageError, did_you_mean
from forge_env.policies.endpoint_answers import read_answer
from forge_env.policies.endpoint_bounds import FIELDS, says_full
from forge_env.policies.endpoint_errors import (
    AccessDeniedError,
    AnswerTooLargeError,
    EndpointError,
    EndpointFailureError,
    EndpointOverloadedError,
    EndpointTimeoutError,
    EndpointUnreachableError,
    MalformedAnswerError,
    NoSuchModelError,
    RequestRefusedError,
    TruncatedAnswerError,
)
from forge_env.policies.endpoint_http import Connections
from forge_env.policies.endpoint_limiter import AdaptiveLimiter
from forge_env.policies.endpoint_options import EndpointOptions
from forge_env.policies.endpoint_session import EndpointSession
from forge_env.policies.endpoint_stream import assemble
from forge_env.policies.endpoint_usage import fill_in
from forge_env.policy import PolicySession, Reply
from forge_env.types import ToolSpec
from forge_env.working_time import waiting

__all__ = ["EndpointOptions", "EndpointPolicy"]

CHECK_S = 30.0


INCONCLUSIVE = (
    *(NoSuchModelError, MalformedAnswerError, TruncatedAnswerError, AnswerTooLargeError),
    *(EndpointFailureError, EndpointOverloadedError),
)
"""Failures to list the models that say nothing of whether the model can be asked."""


class EndpointPolicy:
    """Sessions with one endpoint, which share its connections, its rate and its counters."""

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
        """Failed requests by kind, those that were then repeated with success included."""
        self.fatal: EndpointError | None = None
        """An error that every other request would meet as well."""
        self.answered = False
        """Whether the endpoint has answered a request."""
        self._connections = Connections(options.base_url, api_key=_api_key(options.api_key_env), uds=options.uds)
        self._served: list[str] = []
        """Models that the endpoint lists."""
        self.largest: int | None = None
        """Tokens that the endpoint named as the most there can be, when it refused a bound beyond them."""
        self._renamed = False
        self._sleep = sleep
        self._rng = rng or random.Random()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._connections.close()

    async def check(self) -> None:
        """Ask for the list of models, so that a wrong address, key or name shows before anything is started.

        Raises:
            EndpointError: nothing answers, or the key is refused.
            UsageError: a vLLM server has no such model.
        """
        try:
            data = await self._connections.exchange("GET", "models", timeout_s=CHECK_S)
        except EndpointUnreachableError as error:
            error.fix = error.fix or "start the server, or check --base-url"
            raise
        except EndpointTimeoutError as error:
            error.fix = error.fix or "is it an OpenAI-compatible endpoint? check --base-url"
            raise
        except INCONCLUSIVE:
            return  # not every endpoint has such a list, or the means to give it at any time
        except RequestRefusedError as error:
            self._explain(error)
            if error.fatal:
                raise
            return
        listed = data.get("data") if isinstance(data, dict) else None
        models = [item for item in listed or [] if isinstance(item, dict)] if isinstance(listed, list) else []
        self._served = [str(item.get("id")) for item in models]
        if not any(item.get("owned_by") == "vllm" for item in models):
            return
        if self.options.model not in self._served:
            raise UsageError(f"the server has no model {self.options.model!r}", fix=self._other_model())
        self.exact_tokens = self.options.exact_tokens is not False

    def _explain(self, error: EndpointError) -> None:
        """Name the fix as exactly as the options and the endpoint's list of models allow."""
        if self.answered and error.excusable and error.status != 401:
            error.fix = None  # key, address and model serve others
            return
        name = self.options.api_key_env
        if isinstance(error, AccessDeniedError) and name:
            known = os.environ.get(name)
            error.fix = f"the key in {name} is refused" if known else f"set {name}, or name another with --api-key-env"
        if isinstance(error, NoSuchModelError) and self._served and self.options.model not in self._served:
            error.fix = self._other_model()

    def _other_model(self) -> str:
        guess = did_you_mean(self.options.model, self._served)
        return f"did you mean {guess!r}?" if guess else f"it serves {', '.join(self._served[:10])}"

    def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
        """A conversation with these tools."""
        return EndpointSession(self, tools, seed)

    async def ask(self, body: dict[str, Any], on_failure: Callable[[EndpointError], None] = lambda _: None) -> Reply:
        """One request, repeated while it fails for passing reasons.

        Args:
            body: the request.
            on_failure: is told of every try that failed.

        Raises:
            ContextLengthExceeded: the conversation doesn't fit.
            EndpointError: what the last try met.
        """
        options = self.options
        for attempt in range(options.retries + 1):
            try:
                reply = await self._ask_once(body)
            except EndpointError as error:
                if isinstance(error, RequestRefusedError) and says_full(error.message):
                    raise ContextLengthExceeded(error.message) from error
                self.errors[type(error).__name__] += 1
                self._explain(error)
                on_failure(error)
                if error.fatal and not (error.excusable and self.answered):
                    self.fatal = error
                if not error.transient or attempt == options.retries:
                    raise
                delay = min(options.longest_delay_s, options.first_delay_s * 2.0**attempt) * self._rng.uniform(0.5, 1.5)
                with waiting():
                    await self._sleep(max(delay, error.retry_after_s or 0.0))
            else:
                reply.metadata["attempts"] = attempt + 1
                return reply
        raise AssertionError("unreachable")

    async def _ask_once(self, body: dict[str, Any]) -> Reply:
        sent = self._named(body)
        try:
            return await self._exchange(sent)
        except RequestRefusedError as error:
            if FIELDS[0] not in sent or FIELDS[1] not in error.message:
                raise
        self._renamed = True  # some models know the bound of a reply by its newer name alone
        return await self._exchange(self._named(body))

    def _named(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self._renamed or FIELDS[0] not in body:
            return body
        return {name if name != FIELDS[0] else FIELDS[1]: value for name, value in body.items()}

    async def _exchange(self, body: dict[str, Any]) -> Reply:
        async with self.limiter.slot() as begun:
            asked = time.perf_counter()
            try:
                data = await self._connections.exchange(
                    "POST", "chat/completions", body, timeout_s=self.options.timeout_s
                )
                reply = _read(data)
                fill_in(reply, body)
            except EndpointError as error:
                if error.overload:
                    self.limiter.overloaded(begun)
                raise
            latency = time.perf_counter() - asked
            self.limiter.succeeded(begun)
        self.answered = True
        if self.fatal is not None and self.fatal.excusable:
            self.fatal = None  # it was about that request
        reply.metadata["latency_s"] = round(latency, 6)
        return reply

    def request(self, tools: list[ToolSpec], seed: int | None) -> dict[str, Any]:
        """The fields that all requests of a session share."""
        options = self.options
        body: dict[str, Any] = {"model": options.model}
        for name in ("temperature", "top_p", "max_tokens"):
            if (value := getattr(options, name)) is not None:
                body[name] = value
        if options.send_seed and seed is not None:
            body["seed"] = seed
        if tools and options.tools == "native":
            body["tools"] = [tool.to_openai() for tool in tools]
        if options.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.exact_tokens:
            body |= {"return_token_ids": True, "logprobs": True}
        return {**body, **options.extra}


def _api_key(variable: str) -> str:
    """The key in an environment variable, "" where there is none; `UsageError` where no header may hold it."""
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UsageError(
            f"the API key in {variable} holds characters that are no printable ASCII",
            fix="copy the key again: a line break, a quote of a word processor or a hidden character is in it",
        )
    return key


def _read(data: Any) -> Reply:
    """The reply in an answer, streamed or whole. Whatever garbage does to the parsers is the endpoint's mistake."""
    try:
        return read_answer(assemble(data) if isinstance(data, bytes) else data)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise MalformedAnswerError(f"the answer can't be read: {type(error).__name__}: {error}") from error
