"""`forge-env serve`: any environment over OpenEnv's protocol.

    GET /health /metadata /schema     what is served
    WS  /ws                           one session a connection (`wire` has the messages)

A message that arrives while another is being worked on means that the client has given up waiting for that one: its
answer is then dropped, so that the client never takes it for the answer to its next message.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from forge_env.environment import Environment
from forge_env.interop.sessions import ServeLimits, Session, Sessions
from forge_env.interop.wire import WireError, parse_message, schemas

log = logging.getLogger(__name__)
DEFAULT_LIMITS = ServeLimits()
SHUTDOWN_S = 5.0
"""How long connections have to end when the server does."""


def make_app(
    name: str,
    make_env: Callable[[], Environment],
    *,
    limits: ServeLimits = DEFAULT_LIMITS,
    description: str = "",
    version: str = "",
) -> Starlette:
    """The ASGI application that serves `make_env()` to every connection.

    `app.state.sessions` are its sessions; they are closed when the application shuts down.
    """
    sessions = Sessions(make_env, limits)

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "healthy"})

    async def metadata(request: Request) -> JSONResponse:
        return JSONResponse({"name": name, "description": description or name, "version": version or None})

    async def schema(request: Request) -> JSONResponse:
        return JSONResponse(schemas())

    async def connect(socket: WebSocket) -> None:
        await Connection(socket, sessions).run()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await sessions.close_all()

    routes = [
        Route("/health", health),
        Route("/metadata", metadata),
        Route("/schema", schema),
        WebSocketRoute("/ws", connect),
    ]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.state.sessions = sessions
    return app


class Connection:
    """One client: reads ahead, so that it notices a client that went away or gave up."""

    def __init__(self, socket: WebSocket, sessions: Sessions) -> None:
        self.socket = socket
        self.sessions = sessions
        self.session: Session | None = None
        self._reading: asyncio.Task[str] | None = None
        self._done = False
        """The client is done with its session."""
        self._moved = False
        """The client goes on with its session on another connection."""

    async def run(self) -> None:
        """Serve until the client closes, goes away, is silent for too long, or comes back on another connection."""
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

    def _attach(self, session: Session) -> None:
        self.session = session
        session.let_go = self._let_go

    def _let_go(self) -> None:
        """The session goes on elsewhere: stop, and leave it alone."""
        self.session = None
        self._moved = True
        self._stop_reading()

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._reading.cancel()

    async def _serve(self) -> None:
        """Answer messages until the client is done, or goes on elsewhere."""
        self._reading = asyncio.create_task(self.socket.receive_text())
        while not self._moved:
            done, _ = await asyncio.wait({self._reading}, timeout=self.sessions.limits.idle_s)
            if not done:
                await self._close(1001, "idle")
                return
            if self._reading.cancelled():  # let go
                break
            text = self._reading.result()
            self._reading = asyncio.create_task(self.socket.receive_text())
            if _kind(text) == "close":
                await self._close(1000, "closed")
                return
            answer = asyncio.create_task(self._answer(text))
            await asyncio.wait({self._reading, answer}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                await self.socket.send_text(json.dumps(answer.result()))
            elif not self._reading.cancelled():
                # The client went on without the answer (which nobody gets then), or away. A new episode needn't wait.
                following = _kind(self._reading.result())
                if self.session is not None:
                    await self.session.finish(cancel=following == "reset")
                await asyncio.wait([answer])
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # the client may be gone
            await self.socket.close(1000, "continued on another connection")

    async def _close(self, code: int, reason: str) -> None:
        self._done = True
        with contextlib.suppress(RuntimeError):  # closed by the client
            await self.socket.close(code, reason)

    async def _answer(self, text: str) -> dict[str, Any]:
        """The reply to one message."""
        request_id: Any = None
        try:
            message = parse_message(text)
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
            case "state":
                return {"type": "state", "data": (await self._own()).state.model_dump()}
            case other:
                raise WireError("UNKNOWN_TYPE", f"there is no message of type {str(other)[:80]!r}")

    async def _own(self) -> Session:
        """The session of this connection, opened when it is first needed."""
        if self.session is None:
            self._attach(await self.sessions.open())
        assert self.session is not None
        return self.session

    async def _resume(self, session_id: str) -> dict[str, Any]:
        found = self.sessions.take(session_id, self._let_go)
        if found is None:
            raise WireError("SESSION_ERROR", "that session is not waiting for its client (any more)")
        own, self.session = self.session, found
        if own is not None and own is not found:
            await self.sessions.close(own)
        await found.finish()
        return found.last_reply()


def _kind(text: str) -> Any:
    try:
        return parse_message(text).get("type")
    except WireError:
        return None


async def serve(app: Starlette, host: str, port: int, *, ready: Callable[[int], None] = lambda port: None) -> None:
    """Serve until cancelled; `ready` is told the port (0 lets the system choose one).

    Raises:
        OSError: the address can't be used.
    """
    import uvicorn

    # Pings find clients that are gone without a word; a step that takes long doesn't hold them up.
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        ws="websockets-sansio",
        ws_ping_interval=20.0,
        ws_ping_timeout=20.0,
        timeout_graceful_shutdown=int(SHUTDOWN_S),
    )
    server = uvicorn.Server(config)
    sock = config.bind_socket()
    sock.listen(config.backlog)  # from here on a client's connection waits, and isn't refused
    ready(sock.getsockname()[1])
    running = asyncio.ensure_future(server.serve(sockets=[sock]))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        server.should_exit = True  # sessions are closed before it ends
        await running
        raise
    finally:
        sock.close()
