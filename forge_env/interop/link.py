"""The connection to an OpenEnv server: one question at a time, each with a time limit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from forge_env.errors import EnvironmentBugError, InfrastructureError

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

T = TypeVar("T")


class Patience(BaseModel):
    """How long to wait, and how often to try."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    connect_s: float = Field(10.0, gt=0)
    """Seconds to wait for a connection."""
    answer_s: float = Field(120.0, gt=0)
    """Seconds to wait for an answer."""
    reconnects: int = Field(3, ge=0)
    """Tries to connect after the first, each after twice the delay of the one before."""
    first_delay_s: float = Field(0.2, ge=0)
    """Seconds before the first such try."""
    max_message_mb: float = Field(64.0, gt=0)
    """Longest message of the server, MiB."""


class ConnectionLost(Exception):
    """The connection broke, or an answer didn't come in time."""


class Refused(EnvironmentBugError):
    """The server answered with an error."""

    def __init__(self, message: str, *, fix: str | None = None, code: str = "", reason: str = "") -> None:
        super().__init__(message, fix=fix)
        self.code = code
        self.reason = reason


class Link:
    """The connection to a server: one question at a time, each with a time limit."""

    def __init__(self, url: str, patience: Patience) -> None:
        self.url = url
        self.patience = patience
        self._http = url.rstrip("/").replace("ws://", "http://", 1).replace("wss://", "https://", 1)
        self._ws = self._http.replace("http://", "ws://", 1).replace("https://", "wss://", 1) + "/ws"
        self._socket: ClientConnection | None = None

    async def get(self, path: str) -> dict[str, Any]:
        """A JSON document of the server. `ConnectionLost` when there is none."""
        import httpx

        async def fetch() -> dict[str, Any]:
            try:
                async with httpx.AsyncClient(timeout=self.patience.answer_s, trust_env=False) as client:
                    response = await client.get(f"{self._http}{path}")
                    response.raise_for_status()
                    found: dict[str, Any] = response.json()
                    return found
            except (httpx.HTTPError, ValueError) as error:
                raise ConnectionLost(f"{path}: {type(error).__name__}: {error}") from error

        return await self._again(fetch)

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send one message and return the data of its answer.

        Raises:
            ConnectionLost: no connection, or no answer in time; the connection is closed then.
            Refused: the server answered with an error.
            InfrastructureError: the server has no room.
        """
        from websockets.exceptions import WebSocketException

        if self._socket is None:
            self._socket = await self._again(self._connect)
        try:
            async with asyncio.timeout(self.patience.answer_s):
                await self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
                answer = json.loads(await self._socket.recv())
        except TimeoutError as error:
            self.drop()
            raise ConnectionLost(f"no answer to {kind} within {self.patience.answer_s:g} s") from error
        except (OSError, ValueError, WebSocketException) as error:
            self.drop()
            raise ConnectionLost(f"{type(error).__name__}: {error}") from error
        except asyncio.CancelledError:
            self.drop()  # its answer is still to come, and would be taken for the next one's
            raise
        found: dict[str, Any] = answer.get("data") or {}
        if answer.get("type") != "error":
            return found
        code, reason = str(found.get("code", "")), str(found.get("message", ""))
        if code in ("CAPACITY_REACHED", "FACTORY_ERROR") or found.get("retriable"):
            self.drop()
            raise InfrastructureError(f"{self.url}: {reason}")
        raise Refused(f"{self.url} refused {kind}: {reason} ({code})", code=code, reason=reason)

    async def _connect(self) -> ClientConnection:
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        size = int(self.patience.max_message_mb * 1024 * 1024)
        try:
            return await connect(self._ws, open_timeout=self.patience.connect_s, max_size=size, proxy=None)
        except (OSError, TimeoutError, WebSocketException) as error:
            raise ConnectionLost(f"no connection: {type(error).__name__}: {error}") from error

    async def _again(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """`attempt()`, tried again after growing delays while the server can't be reached."""
        for number in range(self.patience.reconnects + 1):
            try:
                return await attempt()
            except ConnectionLost:
                if number == self.patience.reconnects:
                    raise
            await asyncio.sleep(self.patience.first_delay_s * 2**number)
        raise AssertionError("unreachable")

    def drop(self) -> None:
        """Give the connection up without a word."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.transport.abort()

    async def close(self) -> None:
        """End the session on the server, then the connection."""
        from websockets.exceptions import WebSocketException

        socket, self._socket = self._socket, None
        if socket is None:
            return
        try:
            async with asyncio.timeout(self.patience.connect_s):
                await socket.send(json.dumps({"type": "close"}))
                await socket.close()
        except (OSError, TimeoutError, WebSocketException):
            socket.transport.abort()
