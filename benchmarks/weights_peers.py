"""Sending and receiving actors for `benchmarks.weights`."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch

from trainers.actors.actor import ForgeActor, endpoint
from trainers.model.parts import Part
from trainers.weights.reader import Reader
from trainers.weights.transport import Published
from trainers.weights.transport import Sender as WeightSender


class _Peer(ForgeActor):
    """Base of sender and receiver.

    Args:
        threads: torch threads.
        transport: `shared` or `torchstore`.
    """

    def __init__(self, threads: int, transport: str = "shared") -> None:
        self._threads = threads
        self._transport = transport

    @endpoint
    async def setup(self) -> None:
        """Set the number of threads, and create both ends of the transfer."""
        torch.set_num_threads(self._threads)
        kind = WeightSender
        if self._transport == "torchstore":
            from trainers.weights.store import StoreSender as kind
        self._sender, self._reader = kind(), Reader()


class Sender(_Peer):
    """Actor that pushes weights like a trainer, and sends the same number of bytes over plain TCP."""

    @endpoint
    async def prepare(self, megabytes: float) -> None:
        """Create weights of this size."""
        from benchmarks.weights import tensors

        self._state = tensors(megabytes)
        self._copies: dict[str, torch.Tensor] = {}

    @endpoint
    async def memcpy(self) -> float:
        """Copy every tensor once within this process; returns seconds."""
        self._copies = self._copies or {name: tensor.clone() for name, tensor in self._state.items()}
        started = time.perf_counter()
        for name, tensor in self._state.items():
            self._copies[name].copy_(tensor)
        return time.perf_counter() - started

    @endpoint
    async def push(self, version: int) -> tuple[Published, float]:
        """Publish the weights like a trainer; returns their location, and the seconds until they can be read."""
        started = time.perf_counter()
        published = self._sender.publish([self._sender.snapshot(Part.all_of(self._state))])
        await self._sender.upload(version)
        return published, time.perf_counter() - started

    @endpoint
    async def put_one_by_one(self) -> list[str]:
        """Put every tensor into TorchStore separately; returns the keys."""
        import torchstore

        for name, tensor in self._state.items():
            await torchstore.put(f"single/{name}", tensor)
        return [f"single/{name}" for name in self._state]

    @endpoint
    async def serve(self, host: str, count: int) -> int:
        """Send `count` bytes to the next client that connects; returns the port."""
        listening = socket.create_server((host, 0))
        sent = bytes(count)

        def send() -> None:
            connection, _ = listening.accept()
            with connection, listening:
                connection.sendall(sent)

        threading.Thread(target=send, daemon=True).start()
        port: int = listening.getsockname()[1]
        return port


class Receiver(_Peer):
    """Actor that pulls weights like a generator."""

    def __init__(self, threads: int, transport: str = "shared") -> None:
        super().__init__(threads, transport)
        self._own: dict[str, Any] = {}

    @endpoint
    async def pull(self, published: Published) -> float:
        """Copy every tensor of a version into this process's tensors; returns seconds."""
        started = time.perf_counter()
        self._load(await self._reader.take(published))
        return time.perf_counter() - started

    @endpoint
    async def copy(self, host: str, port: int, count: int) -> float:
        """Receive `count` bytes over TCP into allocated memory; returns seconds."""
        into = memoryview(bytearray(count))
        into[:] = bytes(count)
        started, got = time.perf_counter(), 0
        with socket.create_connection((host, port)) as connection:
            while got < count:
                got += connection.recv_into(into[got:])
        return time.perf_counter() - started

    @endpoint
    async def pull_one_by_one(self, keys: list[str]) -> float:
        """Pull like `pull`, for tensors stored under separate keys."""
        import torchstore

        started = time.perf_counter()
        self._load([(key.removeprefix("single/"), await torchstore.get(key)) for key in keys])
        return time.perf_counter() - started

    def _load(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Copy into the existing tensors, like loading a model's parameters."""
        for name, tensor in weights:
            if name not in self._own:
                self._own[name] = tensor.clone()
            self._own[name].copy_(tensor)
