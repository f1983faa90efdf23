"""Access to published weights: maps shared memory, fetches over TCP, or gets from TorchStore."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import torch

from trainers.weights import shared
from trainers.weights.flat import Flat, Layout
from trainers.weights.transport import Published, unpack


class Reader:
    """One process's access to published versions, by either transport."""

    def __init__(self) -> None:
        self._packed: tuple[bytes, ...] = ()
        self._layouts: list[Layout] = []
        self._landing: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        """Receive buffers by process number and data type, which other processes can map; reused for every version."""
        self._store = ""
        """Name of the store that was read last; every trainer has its own."""

    async def take(self, published: Published) -> Flat:
        """Return the tensors of a version, read-only and valid until the next call. A reference keeps their memory.

        They are views into the ranks' memory if that is shared with this process, otherwise into a local copy.

        Raises:
            FileNotFoundError: the version was dropped in the meantime.
            OSError: a process of the trainer has ended or can't be reached.
        """
        if published.layouts != self._packed:
            self._packed, self._layouts = published.layouts, unpack(published.layouts)
            self._landing.clear()
        transfers: dict[tuple[int, torch.dtype], Coroutine[Any, Any, torch.Tensor]]
        if published.key is None:
            handles = enumerate(published.handles)
            transfers = {(n, dtype): self._share((n, dtype), each[dtype]) for n, each in handles for dtype in each}
        else:
            import torchstore

            from trainers.weights import store  # takes seconds

            if (name := published.key.partition("/")[0]) != self._store:
                self._store = name
                torchstore.reset_client()  # it may be connected to the volumes of a trainer that has died
            transfers = store.receive(published, self._layouts, self._landing)
        # on an error, wait for the others too: none may write into the receive buffers afterwards
        results = await asyncio.gather(*transfers.values(), return_exceptions=True)
        buffers: list[dict[torch.dtype, torch.Tensor]] = [{} for _ in self._layouts]
        for (number, dtype), each in zip(transfers, results, strict=True):
            if isinstance(each, BaseException):
                raise each
            buffers[number][dtype] = each
        return Flat(self._layouts, buffers)

    async def _share(self, key: tuple[int, torch.dtype], handle: shared.Handle) -> torch.Tensor:
        if handle.process.is_local:
            return shared.attach(handle)
        self._landing[key] = await shared.fetch(handle, self._landing.get(key))
        return self._landing[key]

    async def find(self, version: int) -> Published:
        """Look up a version by its number alone, which TorchStore can; raises as `take`."""
        from trainers.weights.store import find

        return await find(version)
