"""An OpenAI-compatible endpoint on loopback that behaves exactly as badly as a test tells it to."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

Answer = bytes | None
"""What is written to the connection before it is closed or used again; None never answers."""


def completion(content: str | None = "4", *, calls: Any = None, finish: str = "stop", **more: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls is not None:
        message["tool_calls"] = calls
    usage = {"prompt_tokens": 10, "completion_tokens": 5}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": usage, **more}


def tool_call(name: str, arguments: Any, call_id: str = "call_0") -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def http(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"content-type": "application/json", "content-length": str(len(content)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + content


def events(*pieces: Any, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(piece)}\n\n" for piece in pieces] + (["data: [DONE]\n\n"] if done else [])
    return http("".join(lines).encode(), headers={"content-type": "text/event-stream"})


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


NO_LIST = http({"error": {"message": "no list"}}, 404)
"""What is answered where the models are asked for and there are none to list."""


class Server:
    """Answers request number n (from 0) with `behave(request, n)`: a completion's dictionary, or bytes to write."""

    def __init__(
        self,
        behave: Callable[[dict[str, Any], int], dict[str, Any] | Answer],
        *,
        models: dict[str, Any] | None = None,
        tls: ssl.SSLContext | None = None,
        hangs_up: bool = False,
    ) -> None:
        self.behave = behave
        self.models = models
        self.tls = tls
        self.hangs_up = hangs_up
        """Closes the connection after every answer without a word about it."""
        self.connections = 0
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.asked = asyncio.Event()
        """Set once a request has come in."""
        self.in_flight = self.most_in_flight = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        scheme = "https" if self.tls else "http"
        return f"{scheme}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=1024, ssl=self.tls)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                while await self._exchange(reader, writer):
                    pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lengths = [line.split(":")[1] for line in head.lower().splitlines() if line.startswith("content-length:")]
        body = await reader.readexactly(int(lengths[0]) if lengths else 0)
        if head.startswith("GET"):
            writer.write(http(self.models) if self.models else NO_LIST)
            return True
        request = json.loads(body)
        number = len(self.requests)
        self.requests.append(request)
        self.headers.append(dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line))
        self.asked.set()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            answer = self.behave(request, number)
            if asyncio.iscoroutine(answer):
                answer = await answer
            if answer is None:
                await asyncio.Event().wait()
            data = answer if isinstance(answer, bytes) else http(answer)
            writer.write(data)
            await writer.drain()
        finally:
            self.in_flight -= 1
        return _is_whole(data) and not self.hangs_up


def _is_whole(data: bytes) -> bool:
    """Whether `data` is as long as it says; a shorter one is cut off by closing the connection."""
    head, _, content = data.partition(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return bool(lengths) and int(lengths[0].split(b":")[1]) == len(content)
