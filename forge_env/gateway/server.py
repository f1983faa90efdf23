"""HTTP server through which programs call the model of an episode with OpenAI's, Anthropic's or Google's API.

    async with Gateway() as gateway:
        with gateway.open(answer) as access:
            client = openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.key)

One server handles all episodes of a process. Each episode has its own key, which gives access to that episode only.
Requests to the model are never streamed: programs that ask for events get the events of the complete answer.

    POST /v1/chat/completions         OpenAI: chat completions
    POST /v1/responses                OpenAI: responses
    POST /v1/messages                 Anthropic: messages
    POST /v1/messages/count_tokens    estimated
    POST /v1/responses/input_tokens   estimated
    GET  /v1/models                   the only model, which answers to any name
    GET  /v1/models/NAME
    POST /v1beta/models/NAME:generateContent          Google: Gemini
    POST /v1beta/models/NAME:streamGenerateContent
    POST /v1beta/models/NAME:countTokens              estimated

The routes under /v1 exist without it too, for programs that leave out the version, and those under /v1beta under /v1.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self
from weakref import WeakKeyDictionary

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Scope

from forge_env.gateway.chat import chat_completion, chat_events, openai_error, read_chat
from forge_env.gateway.gemini import gemini_error, gemini_response, read_counted, read_gemini
from forge_env.gateway.messages import anthropic_error, message_events, message_response, read_messages
from forge_env.gateway.request import Answer, ModelRequest, event, new_id, read_json, with_names
from forge_env.gateway.responses import Earlier, read_responses, response, response_events
from forge_env.http.limits import (
    MAX_OPEN,
    Client,
    LoopShare,
    RefusedRequestError,
    RequestLimits,
    off_loop,
)
from forge_env.http.server import serve
from forge_env.policy import words_of
from forge_env.types import Message

LOOPBACK = "127.0.0.1"
MAX_REMEMBERED = 32 << 20
"""Characters of an episode's responses that are stored for later requests (`previous_response_id`)."""
MESSAGE_CHARS = 1_000
"""Characters that a stored message counts as in addition to its text, for the memory of an empty one."""
MESSAGE_S = 4e-5
"""Estimated work per message or tool of a request, those of earlier responses included, in seconds."""
Ask = Callable[[ModelRequest], Awaitable[Message]]
"""Get one answer to a request from the model. `RefusedRequestError`: the request is refused."""


@dataclass(eq=False, slots=True)
class Access:
    """One episode's access to the model, from `open` to `close`.

    Attributes:
        key: key that its programs send in place of an API key.
        client: its open requests; access is stopped, with a reason, if all its requests are refused.
        stopped: set when access was stopped for that reason.
    """

    key: str
    url: str
    client: Client
    _share: LoopShare
    _ask: Ask
    _end: Callable[[Access], None]
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    _closed: str = ""
    _open: set[asyncio.Task[Message]] = field(default_factory=set)
    _earlier: dict[str, Earlier] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)
    """Characters that each of `_earlier` counts as."""
    _names: dict[str, str] = field(default_factory=dict)
    """The model's names of tools whose names in the program some endpoints refuse."""
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.client.stop = self._stop

    @property
    def openai_url(self) -> str:
        """Base URL for OpenAI's clients."""
        return f"{self.url}/v1"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which clients are configured to use the gateway."""
        return {
            "OPENAI_BASE_URL": self.openai_url,
            "OPENAI_API_BASE": self.openai_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
            "GOOGLE_GEMINI_BASE_URL": self.url,
            "GEMINI_API_KEY": self.key,
            "GOOGLE_API_KEY": self.key,
        }

    def close(self, reason: str = "the episode has ended") -> None:
        """Refuse all further requests, and pending ones too, with this reason."""
        self._closed = self._closed or reason
        self._end(self)
        for task in list(self._open):
            task.cancel()

    def _stop(self, reason: str) -> None:
        self.close(reason)
        self.stopped.set()

    @property
    def closed(self) -> str:
        """Reason for closing, or an empty string while open."""
        return self._closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def answers(self, request: ModelRequest) -> list[Answer]:
        """Get the requested number of answers. `RefusedRequestError`: the request is refused."""
        if self._closed:  # closed while the request was read
            raise ended(self._closed)
        if len(self._open) + request.count > self.client.max_open:
            raise RefusedRequestError(
                f"{len(self._open)} requests are already waiting", status=429, code="too_many_requests"
            )
        tasks = [asyncio.ensure_future(self._ask(request)) for _ in range(request.count)]
        programs = {known: name for name, known in self._names.items()}
        self._open.update(tasks)
        try:
            messages = [with_names(message, programs) for message in await asyncio.gather(*tasks)]
            return [Answer.of(message, request.stop) for message in messages]
        except asyncio.CancelledError:
            if not self._closed:  # cancelled by the caller
                raise
            raise ended(self._closed) from None
        finally:
            for task in tasks:
                task.cancel()
            self._open.difference_update(tasks)

    async def read(self, body: bytes, kind: Callable[[Any], ModelRequest]) -> tuple[Any, ModelRequest]:
        """Parse a body; return its JSON and the request. Bodies are parsed one at a time, large ones in a thread.

        Messages and tools are charged to the episode: an earlier response adds thousands to a short body.
        """

        def reading() -> tuple[Any, ModelRequest]:
            data = read_json(body)
            asked = kind(data)
            self._names = asked.in_safe_names(self._names)
            return data, asked

        async with self._reading:
            data, asked = await off_loop(len(body), reading)
            await self._share.turn(self.client, (len(asked.messages) + len(asked.tools)) * MESSAGE_S)
            return data, asked

    def read_responses(self, data: object) -> ModelRequest:
        """Parse a responses request, which may continue an earlier response of this episode."""
        return read_responses(data, self._earlier)

    def remember(self, name: str, asked: ModelRequest, answer: Message) -> None:
        """Store a response's conversation for later requests; drop the oldest beyond `MAX_REMEMBERED` characters."""
        history = [message for message in [*asked.messages, answer] if message.role != "system"]
        self._earlier[name] = Earlier(history, asked.added)
        self._sizes[name] = sum(
            MESSAGE_CHARS + len(words_of(message)) + sum(map(len, message.images)) for message in history
        ) + sum(MESSAGE_CHARS + len(tool.model_dump_json()) for tool in asked.added)
        total = sum(self._sizes.values())
        while total > MAX_REMEMBERED:
            oldest = next(iter(self._earlier))
            del self._earlier[oldest]
            total -= self._sizes.pop(oldest)


_SHARED: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[Gateway]] = WeakKeyDictionary()


async def shared_gateway() -> Gateway:
    """Gateway shared by all episodes of this event loop; started on first use, it ends with the loop."""
    loop = asyncio.get_running_loop()
    if loop not in _SHARED:
        gateway = Gateway()

        async def start() -> Gateway:
            await gateway.start()
            return gateway

        _SHARED[loop] = loop.create_task(start())
    return await asyncio.shield(_SHARED[loop])


def ended(reason: str) -> RefusedRequestError:
    """Error for a request that arrives after the episode was closed."""
    return RefusedRequestError(reason, status=403, code="episode_ended")


class Gateway:
    """HTTP server for the episodes of a process; see the module."""

    def __init__(self) -> None:
        self._episodes: dict[str, Access] = {}
        self._serving: asyncio.Task[None] | None = None
        self._strangers = Client()
        self.port = 0
        app = Starlette(
            routes=[
                *(
                    Route(f"{version}{path}", partial(self._post, answer), methods=["POST"])
                    for version in ("/v1", "")
                    for path, answer in (
                        ("/chat/completions", partial(_whole, read_chat, chat_completion, chat_events)),
                        ("/responses", _responses),
                        ("/responses/input_tokens", _count_responses),
                        ("/messages", partial(_whole, read_messages, message_response, message_events)),
                        ("/messages/count_tokens", partial(_count, read_messages, "input_tokens")),
                    )
                ),
                *(
                    Route(f"{version}/models/{{name:path}}:{method}", partial(self._post, answer), methods=["POST"])
                    for version in ("/v1beta", "/v1", "")
                    for method, answer in (
                        ("generateContent", _gemini),
                        ("streamGenerateContent", _gemini),
                        ("countTokens", partial(_count, read_counted, "totalTokens")),
                    )
                ),
                *(Route(f"{version}/models", self._models, methods=["GET"]) for version in ("/v1", "")),
                *(Route(f"{version}/models/{{name:path}}", self._model, methods=["GET"]) for version in ("/v1", "")),
            ],
            exception_handlers={RefusedRequestError: _refused, ClientDisconnect: _gone, HTTPException: _nowhere},
        )
        self._share = LoopShare()
        self.app = RequestLimits(app, identify=self._identify, refuse=_refusal, share=self._share)

    @property
    def url(self) -> str:
        """URL of the gateway on this machine."""
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def open_episodes(self) -> int:
        """Number of episodes with open access."""
        return len(self._episodes)

    async def start(self) -> None:
        """Start serving on a port chosen by the system. `UsageError`: none is free."""
        listening = asyncio.Event()

        def ready(port: int) -> None:
            self.port = port
            listening.set()

        self._serving = asyncio.create_task(serve(self.app, LOOPBACK, 0, ready=ready, lifespan=False))
        waiting = asyncio.create_task(listening.wait())
        await asyncio.wait([waiting, self._serving], return_when=asyncio.FIRST_COMPLETED)
        if not listening.is_set():
            waiting.cancel()
            await self._serving

    async def close(self) -> None:
        """Close every episode's access and stop the server."""
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

    def open(self, ask: Ask, *, url: str | None = None, most_open: int = MAX_OPEN) -> Access:
        """Open access for a new episode.

        Args:
            url: URL at which its programs reach the gateway, if it differs from `self.url`.
            most_open: maximum number of requests waiting for an answer at once.
        """
        key = f"fe-{secrets.token_hex(24)}"
        access = Access(key, url or self.url, Client(most_open), self._share, ask, self._end)
        self._episodes[access.key] = access
        return access

    def _end(self, access: Access) -> None:
        self._episodes.pop(access.key, None)

    # --- requests

    def _identify(self, scope: Scope) -> tuple[Client, RefusedRequestError | None]:
        """Client of the episode that a request belongs to; requests without a running episode share one client."""
        request = Request(scope)
        try:
            request.state.access = self._access(request)
        except RefusedRequestError as error:
            return self._strangers, error
        return request.state.access.client, None

    async def _post(self, answer: Answering, request: Request) -> Response:
        return await answer(request, request.state.access, await request.body())

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model("model")], "has_more": False})

    async def _model(self, request: Request) -> Response:
        return JSONResponse(_model(request.path_params["name"]))

    def _access(self, request: Request) -> Access:
        sent = request.headers
        shown = sent.get("x-api-key") or sent.get("x-goog-api-key") or request.query_params.get("key")
        access = self._episodes.get(shown or sent.get("authorization", "").removeprefix("Bearer "))
        if access is None:
            raise RefusedRequestError("this key belongs to no running episode", status=401, code="invalid_api_key")
        return access


Answering = Callable[[Request, Access, bytes], Awaitable[Response]]
"""Handler of an episode's request, given its body."""


async def _whole(
    read: Callable[[Any], ModelRequest],
    respond: Callable[[ModelRequest, list[Answer]], dict[str, Any]],
    events: Callable[[dict[str, Any]], Iterable[bytes]],
    request: Request,
    access: Access,
    body: bytes,
) -> Response:
    """Answer a request of an API: `read` parses it, `respond` builds the response, `events` its events."""
    _, asked = await access.read(body, read)
    answers = await _answered(request, access, asked)

    def answer() -> Response:
        whole = respond(asked, answers)
        return _sent(asked, whole, lambda: events(whole))

    return await off_loop(len(body), answer)


async def _responses(request: Request, access: Access, body: bytes) -> Response:
    data, asked = await access.read(body, access.read_responses)
    answers = await _answered(request, access, asked)
    name = new_id("resp_")
    access.remember(name, asked, answers[0].message)

    def answer() -> Response:
        whole = response(name, asked, answers, data)
        return _sent(asked, whole, lambda: response_events(whole))

    return await off_loop(len(body), answer)


async def _gemini(request: Request, access: Access, body: bytes) -> Response:
    stream = request.url.path.endswith(":streamGenerateContent")
    kind = partial(read_gemini, model=request.path_params["name"], stream=stream)
    _, asked = await access.read(body, kind)
    answers = await _answered(request, access, asked)

    def answer() -> Response:
        whole = gemini_response(asked, answers)
        if stream and request.query_params.get("alt") != "sse":
            return JSONResponse([whole])
        return _sent(asked, whole, lambda: [event(whole)])

    return await off_loop(len(body), answer)


async def _count(
    read: Callable[[Any], ModelRequest], name: str, request: Request, access: Access, body: bytes
) -> Response:
    """Estimate the tokens of a request, and return the number under this name."""
    _, asked = await access.read(body, read)
    return JSONResponse({name: await off_loop(len(body), lambda: asked.prompt_tokens)})


async def _count_responses(request: Request, access: Access, body: bytes) -> Response:
    _, asked = await access.read(body, access.read_responses)
    count = await off_loop(len(body), lambda: asked.prompt_tokens)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": count})


def _model(name: str) -> dict[str, Any]:
    """Description of the model in the format of both APIs; the only model answers to any name."""
    shown = {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    return {**shown, "id": name, "object": "model", "created": 0, "owned_by": "forge-env"}


async def _answered(request: Request, access: Access, asked: ModelRequest) -> list[Answer]:
    """Get the answers while the client is connected. `ClientDisconnect`: it disconnected."""
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
    """HTTP response with the answer as JSON, or as events if requested."""
    if not asked.stream:
        return JSONResponse(whole)
    return StreamingResponse(iter([b"".join(events())]), media_type="text/event-stream")


def _refusal(scope: Scope, error: RefusedRequestError) -> JSONResponse:
    """Error response in the format of the API that the program uses."""
    path, headers = scope["path"], {name for name, _ in scope["headers"]}
    body = openai_error
    if "messages" in path or b"anthropic-version" in headers:
        body = anthropic_error
    elif path.startswith("/v1beta/") or path.endswith(("enerateContent", ":countTokens")):
        body = gemini_error
    return JSONResponse(body(error), status_code=error.status)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedRequestError)
    return _refusal(request.scope, error)


async def _nowhere(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    why = (
        f"there is no {request.method} {request.url.path[:200]} here, only chat completions, responses, messages and"
        " generateContent"
    )
    return await _refused(request, RefusedRequestError(why, status=error.status_code, code="not_found"))


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
