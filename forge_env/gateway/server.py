"""The model behind an address: programs ask it as they ask OpenAI's or Anthropic's, and an episode answers.

    async with Gateway() as gateway:
        with gateway.open(answer) as access:
            client = openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.key)

One endpoint serves all episodes of a process. Each has a key of its own, which no other's requests reach. What is asked
of the model is never streamed: whoever wants events gets those of the whole answer.

    POST /v1/chat/completions         OpenAI: chat completions
    POST /v1/responses                OpenAI: responses
    POST /v1/messages                 Anthropic: messages
    POST /v1/messages/count_tokens    estimated
    GET  /v1/models                   the one that is there

The same under /, for programs that leave out the version.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Self
from weakref import WeakKeyDictionary

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from forge_env.gateway.chat import chat_completion, chat_events, openai_error, read_chat
from forge_env.gateway.messages import anthropic_error, message_events, message_response, read_messages
from forge_env.gateway.request import Answer, ModelRequest, RefusedRequestError
from forge_env.gateway.responses import read_responses, response, response_events
from forge_env.serve.server import serve
from forge_env.types import Message

LOOPBACK = "127.0.0.1"
MAX_BODY = 32 << 20
"""Bytes of a request."""
MAX_READ = 8 * MAX_BODY
"""Bytes of a request that is too long, before its connection is closed."""
MOST_OPEN = 256
Ask = Callable[[ModelRequest], Awaitable[Message]]
"""Has a request answered, once. `RefusedRequestError`: it gets no answer."""


@dataclass(eq=False, slots=True)
class Access:
    """One episode's access to the model, from `open` to `close`.

    Attributes:
        key: shown by its programs, in place of an API key.
        url: of the gateway.
    """

    key: str
    url: str
    _ask: Ask
    _end: Callable[[Access], None]
    _most_open: int
    _closed: str = ""
    _open: set[asyncio.Task[Message]] = field(default_factory=set)
    _earlier: dict[str, list[Message]] = field(default_factory=dict)

    @property
    def openai_url(self) -> str:
        """What OpenAI's clients take as the base URL."""
        return f"{self.url}/v1"

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which clients find the model."""
        return {
            "OPENAI_BASE_URL": self.openai_url,
            "OPENAI_API_BASE": self.openai_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
        }

    def close(self, reason: str = "the episode has ended") -> None:
        """Answer nothing more; what waits for an answer is told why."""
        self._closed = self._closed or reason
        self._end(self)
        for task in list(self._open):
            task.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def answers(self, request: ModelRequest) -> list[Answer]:
        """As many answers as the request wants. `RefusedRequestError`: there are none."""
        if len(self._open) + request.count > self._most_open:
            raise RefusedRequestError(f"{len(self._open)} requests wait already", status=429, code="too_many_requests")
        tasks = [asyncio.ensure_future(self._ask(request)) for _ in range(request.count)]
        self._open.update(tasks)
        try:
            return [Answer.of(message, request.stop) for message in await asyncio.gather(*tasks)]
        except asyncio.CancelledError:
            if not self._closed:  # it is whoever asks that is gone
                raise
            raise ended(self._closed) from None
        finally:
            for task in tasks:
                task.cancel()
            self._open.difference_update(tasks)

    def read_responses(self, data: object) -> ModelRequest:
        """A request that may go on from an earlier response of this episode."""
        return read_responses(data, self._earlier)

    def remember(self, name: str, messages: Iterable[Message]) -> None:
        """Let later requests go on from a response."""
        self._earlier[name] = [message for message in messages if message.role != "system"]


_SHARED: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[Gateway]] = WeakKeyDictionary()


async def shared_gateway() -> Gateway:
    """The gateway of all episodes of this event loop, which ends with the loop."""
    loop = asyncio.get_running_loop()
    if loop not in _SHARED:
        gateway = Gateway()

        async def start() -> Gateway:
            await gateway.start()
            return gateway

        _SHARED[loop] = loop.create_task(start())
    return await asyncio.shield(_SHARED[loop])


def ended(reason: str) -> RefusedRequestError:
    """A request that came too late."""
    return RefusedRequestError(reason, status=403, code="episode_ended")


class Gateway:
    """The endpoint of a process; see the module."""

    def __init__(self) -> None:
        self._episodes: dict[str, Access] = {}
        self._serving: asyncio.Task[None] | None = None
        self.port = 0
        self.app = Starlette(
            routes=[
                Route(f"{version}{path}", endpoint, methods=[method])
                for version in ("/v1", "")
                for path, endpoint, method in (
                    ("/chat/completions", self._chat, "POST"),
                    ("/responses", self._responses, "POST"),
                    ("/messages", self._messages, "POST"),
                    ("/messages/count_tokens", self._count, "POST"),
                    ("/models", self._models, "GET"),
                )
            ],
            exception_handlers={RefusedRequestError: _refused, ClientDisconnect: _gone},
        )

    @property
    def url(self) -> str:
        """Its address, on this machine."""
        return f"http://{LOOPBACK}:{self.port}"

    async def start(self) -> None:
        """Serve, on a port that the system chooses. `UsageError`: there is none."""
        told = asyncio.Event()

        def ready(port: int) -> None:
            self.port = port
            told.set()

        self._serving = asyncio.create_task(serve(self.app, LOOPBACK, 0, ready=ready, lifespan=False))
        waiting = asyncio.create_task(told.wait())
        await asyncio.wait([waiting, self._serving], return_when=asyncio.FIRST_COMPLETED)
        if not told.is_set():
            waiting.cancel()
            await self._serving

    async def close(self) -> None:
        """End every episode's access, and the server."""
        for access in list(self._episodes.values()):
            access.close()
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def open(self, ask: Ask, *, url: str | None = None, most_open: int = MOST_OPEN) -> Access:
        """A new episode's access.

        Args:
            ask: answers its requests.
            url: at which its programs reach the gateway, where that is another than here.
            most_open: requests that may wait for an answer at once.
        """
        access = Access(f"fe-{secrets.token_hex(24)}", url or self.url, ask, self._end, most_open)
        self._episodes[access.key] = access
        return access

    def _end(self, access: Access) -> None:
        self._episodes.pop(access.key, None)

    # --- requests

    async def _chat(self, request: Request) -> Response:
        access, data = await self._begin(request)
        asked = read_chat(data)
        answers = await _answered(request, access, asked)
        return _sent(asked, chat_completion(asked, answers), lambda: chat_events(asked, answers, data))

    async def _messages(self, request: Request) -> Response:
        access, data = await self._begin(request)
        asked = read_messages(data)
        whole = message_response(asked, await _answered(request, access, asked))
        return _sent(asked, whole, lambda: message_events(whole))

    async def _responses(self, request: Request) -> Response:
        access, data = await self._begin(request)
        asked = access.read_responses(data)
        answers = await _answered(request, access, asked)
        whole = response(asked, answers, data)
        access.remember(whole["id"], [*asked.messages, answers[0].message])
        return _sent(asked, whole, lambda: response_events(whole))

    async def _count(self, request: Request) -> Response:
        _, data = await self._begin(request)
        return JSONResponse({"input_tokens": read_messages(data).prompt_tokens})

    async def _models(self, request: Request) -> Response:
        self._access(request)
        model = {"id": "model", "object": "model", "created": 0, "owned_by": "forge-env"}
        shown = {"type": "model", "display_name": "model", "created_at": "1970-01-01T00:00:00Z"}
        return JSONResponse({"object": "list", "data": [{**shown, **model}], "has_more": False})

    async def _begin(self, request: Request) -> tuple[Access, Any]:
        """Whose request it is, and its body."""
        access = self._access(request)
        body, length = bytearray(), 0
        async for chunk in request.stream():
            length += len(chunk)
            if length <= MAX_BODY:
                body += chunk
            elif length > MAX_READ:
                break
            else:
                body.clear()  # the rest is read: most clients look for an answer only when they have said all
        if length > MAX_BODY:
            raise RefusedRequestError(f"more than {MAX_BODY >> 20} MiB", status=413, code="request_too_large")
        try:
            return access, json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RefusedRequestError(f"the body is not JSON: {error}") from error

    def _access(self, request: Request) -> Access:
        shown = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        access = self._episodes.get(shown)
        if access is None:
            raise RefusedRequestError("this key is of no running episode", status=401, code="invalid_api_key")
        return access


async def _answered(request: Request, access: Access, asked: ModelRequest) -> list[Answer]:
    """The answers, for as long as somebody waits for them. `ClientDisconnect`: nobody does."""
    answering = asyncio.ensure_future(access.answers(asked))
    hanging_up = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait([answering, hanging_up], return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect
        return answering.result()
    finally:
        for task in (answering, hanging_up):
            task.cancel()
        await asyncio.gather(answering, hanging_up, return_exceptions=True)


def _sent(asked: ModelRequest, whole: object, events: Callable[[], Iterable[bytes]]) -> Response:
    """The answer, whole or as events."""
    if not asked.stream:
        return JSONResponse(whole)
    return StreamingResponse(iter([b"".join(events())]), media_type="text/event-stream")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedRequestError)
    form = anthropic_error if "messages" in request.url.path else openai_error
    return JSONResponse(form(error), status_code=error.status)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
