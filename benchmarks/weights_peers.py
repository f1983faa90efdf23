"""The sending and the receiving process of `benchmarks.weights` and `benchmarks.hosts`."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch

from trainers.actors.actor import ForgeActor, endpoint
from trainers.weights.flat import Part
from trainers.weights.store import Published, WeightStore


class _Peer(ForgeActor):
    """What both are.

    Args:
        threads: that it computes with; None: as many as there are cores.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads

    @endpoint
    async def setup(self) -> None:
        """Connect."""
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        self._store = WeightStore()


class Sender(_Peer):
    """Pushes weights as a trainer does, and sends the same bytes over plain TCP."""

    @endpoint
    async def prepare(self, megabytes: float) -> None:
        """Have weights of this size."""
        from benchmarks.weights import tensors

        self._entering: asyncio.Task[None] | None = None
        self._state = tensors(megabytes)

    @endpoint
    async def push(self, version: int) -> tuple[Published, float]:
        """Publish the weights, as a trainer does: where they lie, and seconds; the index has them later."""
        started = time.perf_counter()
        published = self._store.publish([self._store.snapshot(Part.all_of(self._state))])
        self._entering = asyncio.create_task(self._enter(published, version))
        return published, time.perf_counter() - started

    async def _enter(self, published: Published, version: int) -> None:
        await self._store.put(published, version)
        if version > 1:
            await self._store.drop(version - 1)

    @endpoint
    async def entered(self) -> None:
        """Wait until the index has them, and the version before is forgotten."""
        assert self._entering is not None
        await self._entering

    @endpoint
    async def serve(self, host: str, count: int) -> int:
        """Send so many bytes to the next one who connects; the port."""
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
    """Pulls weights as a generator does."""

    def __init__(self, threads: int | None = None) -> None:
        super().__init__(threads)
        self._own: dict[str, Any] = {}

    @endpoint
    async def pull(self, published: Published) -> float:
        """Have every tensor of a version in this process's own; returns seconds."""
        started = time.perf_counter()
        self._load(await self._store.take(published))
        return time.perf_counter() - started

    @endpoint
    async def copy(self, host: str, port: int, count: int) -> float:
        """Seconds until so many bytes have come over TCP, into memory that is there already."""
        into = memoryview(bytearray(count))
        into[:] = bytes(count)
        started, got = time.perf_counter(), 0
        with socket.create_connection((host, port)) as connection:
            while got < count:
                got += connection.recv_into(into[got:])
        return time.perf_counter() - started

    @endpoint
    async def pull_one_by_one(self, keys: list[str]) -> float:
        """As `pull`, for tensors put under keys of their own."""
        import torchstore

        started = time.perf_counter()
        self._load([(key.removeprefix("single/"), await torchstore.get(key)) for key in keys])
        return time.perf_counter() - started

    def _load(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Copy into the tensors of the time before, as a model's parameters are filled."""
        for name, tensor in weights:
            if name not in self._own:
                self._own[name] = tensor.clone()
            self._own[name].copy_(tensor)
