"""`forge-env serve`: serve an environment over OpenEnv's protocol, and its tools over MCP.

    GET  /health /metadata /schema      status and description of the server
    WS   /ws                            one session per connection (messages: see `sessions`)
    POST /reset /step /close, GET /state  the same without a connection:

        POST /reset {"seed": 7}  -> {"observation": {...}, "reward": null, "done": false}
        POST /step  {"session_id": "...", "action": {"message": "8"}}

    /mcp                                only the tools (see `mcp`)

Without a connection, the session's id is in the metadata of every observation and in a cookie, which HTTP clients with
cookie support return automatically. Such a session ends when it is closed or idle for too long.

On a connection, a message that arrives while another is being processed means that the client no longer waits for that
one. Its answer is then dropped, so that the client doesn't take it for the answer to its next message.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Literal

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Scope
from starlette.websockets import WebSocket, WebSocketDisconnect

from forge_env import __version__
from forge_env.config.serving import ServeLimits
from forge_env.http.limits import MAX_OPEN, Hosts, RefusedRequestError, RequestLimits, off_loop
from forge_env.http.server import OwnPages
from forge_env.registry import environment_class, make, make_config, summary_of
from forge_env.sandbox.engines import LazyEngine
from forge_env.serve.mcp import SERVER_ERROR, McpEndpoint, answer_rpc, rpc_refusal
from forge_env.serve.sessions import (
    RESET,
    AssistantAction,
    CallTool,
    EpisodeState,
    ListTools,
    Refusal,
    Result,
    Session,
    Sessions,
    TextObservation,
    WireError,
    message_of,
    parse_json,
    parse_message,
    schemas,
)

log = logging.getLogger(__name__)
COOKIE = "openenv_session"
PROTOCOL = "1.0.0"
"""Version of OpenEnv's HTTP interface."""
_STATUS = {"INVALID_JSON": 400, "VALIDATION_ERROR": 422, "SESSION_ERROR": 409, "CAPACITY_REACHED": 503}
REFUSALS = {
    400: "the body is not JSON",
    409: "there is no such session, or no running episode",
    422: "the body is not as documented",
    500: "the environment failed",
    503: "all sessions are in use",
}
MODE: Literal["validation"] = "validation"
MODELS: list[type[BaseModel]] = [
    AssistantAction,
    CallTool,
    ListTools,
    TextObservation,
    EpisodeState,
    Result,
    Refusal,
]
REFERENCE = "#/components/schemas/{model}"
DEFAULT_LIMITS = ServeLimits()


def app_of(
    name: str,
    *,
    sandbox: str = "auto",
    docker_host: str | None = None,
    limits: ServeLimits = DEFAULT_LIMITS,
    names: Sequence[str] = (),
    **options: Any,
) -> Starlette:
    """Make an ASGI application that serves the environment `name`: `app = app_of("my_env")`.

    `app.state.sessions` holds its sessions; they are closed when the application shuts down. Clients may address it by
    IP address, by a name of this machine, by `names`, and by the names in the environment variable FORGE_ENV_NAMES.
    """
    cls = environment_class(name)
    make_config(name, cls, options)
    engine = LazyEngine(sandbox, docker_host=docker_host)
    sessions = Sessions(lambda: make(name, sandboxes=engine, **options), limits)
    mcp = McpEndpoint(name, __version__, sessions)
    about = {"name": name, "description": summary_of(cls) or name, "version": __version__}

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with engine, mcp.run():
            yield
            await sessions.close_all()

    routes = [
        Route("/health", JSONResponse({"status": "healthy"}), methods=["GET"]),
        Route("/metadata", JSONResponse(about), methods=["GET"]),
        Route("/schema", JSONResponse(schemas()), methods=["GET"]),
        Route("/metrics", Metrics(name, sessions).answer),
        *http_routes(sessions, name, cls.splits),
        WebSocketRoute("/ws", lambda socket: Connection(socket, sessions).run()),
        WebSocketRoute("/mcp", lambda socket: ToolConnection(socket, sessions).run()),
        Route("/mcp", mcp),
    ]
    hosts = Hosts(max(MAX_OPEN, 4 * limits.max_sessions))
    guard = [
        Middleware(OwnPages, names=[*names, *os.environ.get("FORGE_ENV_NAMES", "").split()]),
        Middleware(RequestLimits, identify=hosts.identify, refuse=_beyond_limits),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, middleware=guard, exception_handlers={WireError: _refused})
    app.state.sessions = sessions
    return app


# --- without a connection


def http_routes(sessions: Sessions, name: str, splits: Sequence[str]) -> list[BaseRoute]:
    """HTTP routes for requests that name their session."""

    async def reset(request: Request) -> Response:
        data = await _body(request)
        session_id = _session_id(data.pop("session_id", None), request)
        try:
            session = sessions.find(session_id) if session_id else await sessions.open(named=True)
        except WireError as error:
            if error.code != "SESSION_ERROR":
                raise
            session = await sessions.open(named=True)  # the old session has ended; reset starts a new episode anyway
        reply = await sessions.use(session, session.reset(data))
        response = JSONResponse(reply["data"])
        response.set_cookie(COOKIE, session.id, httponly=True, samesite="strict")
        return response

    async def step(request: Request) -> Response:
        data = await _body(request)
        session = _named(request, data)
        action, timeout_s = data.get("action"), data.get("timeout_s")
        if not isinstance(action, dict):
            raise WireError("VALIDATION_ERROR", "action: an object is needed, such as {'message': text}")
        if timeout_s is not None and not (type(timeout_s) in (int, float) and timeout_s > 0):
            raise WireError("VALIDATION_ERROR", "timeout_s is not a number above 0")
        reply = await sessions.use(session, session.step(action, timeout_s=timeout_s))
        return JSONResponse(reply["data"])

    async def state(request: Request) -> Response:
        data = dict(request.query_params)
        if not (data.get("session_id") or request.cookies.get(COOKIE)):
            return JSONResponse(EpisodeState().model_dump())
        return JSONResponse(_named(request, data).state.model_dump())

    async def close(request: Request) -> Response:
        session = _named(request, await _body(request))
        await sessions.close(session)
        response = JSONResponse({"closed": True})
        response.delete_cookie(COOKIE)
        return response

    def _session_id(given: Any, request: Request) -> str | None:
        if given is not None and not isinstance(given, str):
            raise WireError("VALIDATION_ERROR", "session_id is not a string")
        return given or request.cookies.get(COOKIE)

    def _named(request: Request, data: dict[str, Any]) -> Session:
        session_id = _session_id(data.get("session_id"), request)
        if not session_id:
            raise WireError(
                "SESSION_ERROR", "name the session: reset's answer has it in observation.metadata.session_id"
            )
        return sessions.find(session_id)

    return [
        Route("/reset", reset, methods=["POST"]),
        Route("/step", step, methods=["POST"]),
        Route("/close", close, methods=["POST"]),
        Route("/state", state),
        Route("/openapi.json", JSONResponse(openapi(name, splits)), methods=["GET"]),
    ]


async def _refused(request: Request, error: Exception) -> Response:
    """Response to a request that raised a `WireError`."""
    assert isinstance(error, WireError)
    detail = {"detail": str(error), "code": error.code, **error.details}
    return JSONResponse(detail, status_code=_STATUS.get(error.code, 500))


def _beyond_limits(scope: Scope, error: RefusedRequestError) -> Response:
    """Response to a request beyond the limits of `forge_env.http.limits`."""
    if scope["path"] == "/mcp":
        return JSONResponse(rpc_refusal(error), status_code=error.status)
    bad = error.status == 400
    detail = f"not valid JSON: {error.message}" if bad else error.message
    return JSONResponse({"detail": detail, "code": "INVALID_JSON" if bad else error.code.upper()}, error.status)


async def _body(request: Request) -> dict[str, Any]:
    text = await request.body()
    data = await off_loop(len(text), lambda: parse_json(text)) if text.strip() else {}
    if not isinstance(data, dict):
        raise WireError("VALIDATION_ERROR", "the body must be a JSON object")
    return data


def openapi(name: str, splits: Sequence[str]) -> dict[str, Any]:
    """OpenAPI document of a server."""

    def reference(model: type[BaseModel]) -> dict[str, Any]:
        return {"$ref": REFERENCE.format(model=model.__name__)}

    def answers(schema: dict[str, Any], *codes: int) -> dict[str, Any]:
        refused = {"application/json": {"schema": reference(Refusal)}}
        refusals = {str(code): {"description": REFUSALS[code], "content": refused} for code in codes}
        return {"200": {"description": "OK", "content": {"application/json": {"schema": schema}}}, **refusals}

    def post(summary: str, body: dict[str, Any], responses: dict[str, Any]) -> dict[str, Any]:
        content = {"application/json": {"schema": body}}
        return {"post": {"summary": summary, "requestBody": {"content": content}, "responses": responses}}

    session = {"session_id": {"type": ["string", "null"]}}
    split = {"split": {"enum": [*splits, None]}}
    reset = {"properties": {**session, **RESET, **split}, "additionalProperties": False}
    action = {"anyOf": [reference(model) for model in (AssistantAction, CallTool, ListTools)]}
    seconds = {"type": ["number", "null"], "exclusiveMinimum": 0}
    step = {"properties": {**session, "action": action, "timeout_s": seconds}, "required": ["action"]}
    free = {"type": "object"}
    named = {"name": "session_id", "in": "query", "schema": {"type": "string"}}
    state = {"summary": "state of the episode", "parameters": [named]}
    paths: dict[str, Any] = {
        "/reset": post("start an episode", {**free, **reset}, answers(reference(Result), 400, 422, 500, 503)),
        "/step": post("act", {**free, **step}, answers(reference(Result), 400, 409, 422, 500)),
        "/state": {"get": {**state, "responses": answers(reference(EpisodeState), 409)}},
        "/close": post("end a session", {**free, "properties": session}, answers(free, 400, 409, 422)),
        "/mcp": post("JSON-RPC: tools/list, tools/call; errors follow JSON-RPC", {}, answers(free)),
    }
    gone = {"400": {"description": "no session is named"}, "404": {"description": "there is no such session"}}
    which = {"name": "mcp-session-id", "in": "header", "required": True, "schema": {"type": "string"}}
    ended = {"summary": "end a session of MCP", "parameters": [which], "responses": {**answers(free), **gone}}
    paths["/mcp"]["delete"] = ended
    for path in ("/health", "/metadata", "/schema"):
        paths[path] = {"get": {"summary": path[1:], "responses": answers(free)}}
    _, definitions = models_json_schema([(model, MODE) for model in MODELS], ref_template=REFERENCE)
    info = {"title": name, "version": PROTOCOL}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": definitions["$defs"]}}


# --- metrics


class Metrics:
    """`/metrics` of a server, in Prometheus' text format."""

    def __init__(self, name: str, sessions: Sessions) -> None:
        self._name = name
        self._sessions = sessions
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def collect(self) -> Iterator[Any]:
        """Yield the figures, for `prometheus_client`."""
        sessions = self._sessions
        for kind, name, text, value in (
            (GaugeMetricFamily, "forge_env_sessions", "open sessions", len(sessions)),
            (GaugeMetricFamily, "forge_env_sessions_limit", "most open sessions", sessions.limits.max_sessions),
            (CounterMetricFamily, "forge_env_episodes", "episodes begun", sessions.counts["reset"]),
            (CounterMetricFamily, "forge_env_steps", "steps taken", sessions.counts["step"]),
            (CounterMetricFamily, "forge_env_failures", "resets and steps that failed", sessions.counts["failed"]),
        ):
            family = kind(name, text, labels=["environment"])
            family.add_metric([self._name], value)
            yield family

    async def answer(self, request: Request) -> Response:
        """Answer a request for `/metrics`."""
        return Response(generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


# --- over a WebSocket


class Connection:
    """Connection of one client. It reads ahead to notice a client that disconnected or stopped waiting."""

    one_at_a_time = True
    """Whether a new message means that the client no longer waits for the previous answer."""

    def __init__(self, socket: WebSocket, sessions: Sessions) -> None:
        self.socket = socket
        self.sessions = sessions
        self.session: Session | None = None
        self._reading: asyncio.Task[Any] | None = None
        self._done = False
        """Whether the client has finished with its session."""
        self._moved = False
        """Whether another connection has taken the session over."""

    async def run(self) -> None:
        """Serve until the client closes, disconnects, is idle for too long, or reconnects on another connection."""
        await self.socket.accept()
        try:
            await self._serve()
        except WebSocketDisconnect:
            pass
        finally:
            self._stop_reading()
            if self.session is not None:
                if self._done:
                    await self.sessions.close(self.session)
                else:
                    self.sessions.detach(self.session)

    def _let_go(self) -> None:
        """Give up the session, which another connection has taken over, and stop serving."""
        self.session = None
        self._moved = True
        self._stop_reading()

    async def _read(self) -> Any:
        """Read the next message; return its JSON value, or the `WireError` to answer."""
        text = await self.socket.receive_text()
        return await off_loop(len(text), lambda: parse_message(text))

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._reading.cancel()

    async def _serve(self) -> None:
        """Answer messages until the client has finished or continues on another connection."""
        self._reading = asyncio.create_task(self._read())
        while not self._moved:
            done, _ = await asyncio.wait({self._reading}, timeout=self.sessions.limits.idle_timeout)
            if not done:
                await self._close(1001, "idle")
                return
            if self._reading.cancelled():  # the session was taken over
                break
            data = self._reading.result()
            self._reading = asyncio.create_task(self._read())
            if _kind(data) == "close":
                await self._close(1000, "closed")
                return
            answer = asyncio.create_task(self._answer(data))
            await asyncio.wait({self._reading, answer}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                await self.socket.send_text(json.dumps(answer.result()))
            elif not self._reading.cancelled():
                # The client sent another message, so this answer is dropped, or it disconnected. A reset needn't wait.
                following = _kind(self._reading.result())
                if self.session is not None:
                    await self.session.finish(cancel=following == "reset")
                await asyncio.wait([answer])
                if not self.one_at_a_time:
                    await self.socket.send_text(json.dumps(answer.result()))
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # the client may be gone
            await self.socket.close(1000, "continued on another connection")

    async def _close(self, code: int, reason: str) -> None:
        self._done = True
        with contextlib.suppress(RuntimeError):  # closed by the client
            await self.socket.close(code, reason)

    async def _answer(self, data: Any) -> dict[str, Any]:
        """Reply to one message, as returned by `_read`."""
        request_id: Any = None
        try:
            message = message_of(data)
            request_id = message.get("request_id")
            reply = await self._handle(message)
        except WireError as error:
            reply = error.reply()
        return reply if request_id is None else {**reply, "request_id": request_id}

    async def _handle(self, message: dict[str, Any]) -> dict[str, Any]:
        data = message.get("data", {})
        match message.get("type"):
            case "reset" if "resume" in data:
                return await self._resume(str(data["resume"]))
            case "reset":
                session = await self._own()
                return await session.work(session.reset(data))
            case "step":
                session = await self._own()
                return await session.work(session.step(data))
            case "mcp":
                attached = await self._own()
                return {"type": "mcp", "data": await answer_rpc(data, self.sessions, attached)}
            case "state":
                return {"type": "state", "data": (await self._own()).state.model_dump()}
            case other:
                raise WireError("UNKNOWN_TYPE", f"there is no message of type {str(other)[:80]!r}")

    async def _own(self) -> Session:
        """The session of this connection, opened on first use."""
        if self.session is None:
            self.session = await self.sessions.open()
            self.session.let_go = self._let_go
        return self.session

    async def _resume(self, session_id: str) -> dict[str, Any]:
        resumed = self.sessions.take(session_id, self._let_go)
        if resumed is None:
            raise WireError("SESSION_ERROR", "that session is not waiting for a client")
        previous, self.session = self.session, resumed
        if previous is not None and previous is not resumed:
            await self.sessions.close(previous)
        await resumed.finish()
        return resumed.last_reply()


class ToolConnection(Connection):
    """Connection to `/mcp`: every message is a JSON-RPC request, and its answer has the same id."""

    one_at_a_time = False

    async def _answer(self, data: Any) -> dict[str, Any]:
        """Response to one request."""
        try:
            session = await self._own()
        except WireError as error:
            return {"jsonrpc": "2.0", "id": None, "error": {"code": SERVER_ERROR, "message": str(error)}}
        return await answer_rpc(data, self.sessions, session)


def _kind(data: Any) -> Any:
    return data.get("type") if isinstance(data, dict) else None
