"""The engine's end of the channel to one runner: sends requests and matches answers to them by number."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from forge_env.errors import SandboxError
from sandboxes.runner.wire import FrameReader, Header, WireError, pack

Answer = tuple[Header, bytes]
Listener = Callable[[int, bytes], None]
"""Called with the descriptor (1: stdout, 2: stderr) and the bytes written to it."""

_STDERR_BYTES = 2000


class Connection(asyncio.Protocol):
    """A connection to one runner. When the runner is lost, all pending and later requests fail with `SandboxError`."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Header] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()
        self._stderr = b""
        self._transport: asyncio.WriteTransport | None = None
        self._reader = FrameReader()
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._listeners: dict[int, Listener] = {}
        self._numbers = itertools.count(1)

    @property
    def alive(self) -> bool:
        """Whether the runner is connected."""
        return self._transport is not None and not self.lost.done()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        try:
            for header, body in self._reader.feed(data):
                if "ready" in header:
                    if not self.ready.done():
                        self.ready.set_result(header)
                elif "stream" in header:
                    if listener := self._listeners.get(header["id"]):
                        listener(header["stream"], body)
                elif (answer := self._answers.pop(header.get("id", 0), None)) and not answer.done():
                    answer.set_result((header, body))
        except WireError:
            self.close()

    def stderr_received(self, data: bytes) -> None:
        """Keep the end of the runner's standard error, for the error of a failed start."""
        self._stderr = (self._stderr + data)[-_STDERR_BYTES:]

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        if not self.lost.done():
            self.lost.set_result(None)
        if not self.ready.done():
            output = self._stderr.decode("utf-8", "replace").strip()
            self.ready.set_exception(SandboxError(f"the sandbox ended before it was ready{output and f': {output}'}"))
            self.ready.exception()  # marks the exception as retrieved: asyncio must not warn when no caller is waiting
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(SandboxError("the sandbox was lost in the middle of a call"))

    async def request(
        self, header: Header, body: bytes = b"", *, timeout: float, listener: Listener | None = None
    ) -> Answer:
        """Send one request and wait up to `timeout` seconds for its answer; `listener` receives output as it arrives.

        Cancelling the call kills the program. Raises `SandboxError` if the runner is lost or does not answer in time.
        """
        if not self.alive or self._transport is None:
            raise SandboxError("the sandbox is gone")
        number = next(self._numbers)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        if listener is not None:
            self._listeners[number] = listener
        self._transport.write(pack({**header, "id": number}, body))
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            self.close()
            raise SandboxError(f"the sandbox did not answer within {timeout:.0f} s") from None
        except asyncio.CancelledError:
            if self.alive:
                self._transport.write(pack({"op": "kill", "target": number}))
            raise
        finally:
            self._answers.pop(number, None)
            self._listeners.pop(number, None)

    def send(self, data: bytes) -> None:
        """Write raw bytes before the first request, outside the frame protocol."""
        if self._transport is not None:
            self._transport.write(data)

    def notify(self, header: Header) -> None:
        """Send a request that has no answer."""
        if self.alive and self._transport is not None:
            self._transport.write(pack(header))

    def close(self) -> None:
        """Close the connection; the runner then exits."""
        if self._transport is not None:
            self._transport.abort()
        elif not self.lost.done():
            self.lost.set_result(None)
