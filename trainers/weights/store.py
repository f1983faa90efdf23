"""Versions of the weights in TorchStore: the trainer pushes, generators pull, old versions are dropped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torchstore

from trainers.actors.processes import start_processes
from trainers.weights import compat, shared  # compat patches torchstore before its first use
from trainers.weights.flat import Layout

LAYOUT_KEY = "weights/layout"
HOST_KEY = "weights/host"
_VERSIONS = "weights/v"

Buffers = Mapping[torch.dtype, torch.Tensor]
"""Flat, by data type."""


def _key(version: int, dtype: torch.dtype) -> str:
    return f"{_VERSIONS}{version}/{str(dtype).removeprefix('torch.')}"


class WeightStore:
    """One process's view of the store. `open` and `close` belong to the process that owns the run.

    Args:
        dtype: in which snapshots keep floating-point tensors: that of whoever computes with them; by default their own.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._layout: Layout | None = None
        self._layout_published = False
        self._met = False
        self._held: dict[int, Buffers] = {}
        self._spare: Buffers | None = None
        self._volumes: Any = None

    async def open(self) -> None:
        """Start the process that holds the weights."""
        self._volumes = await start_processes(1, "weights")
        await torchstore.initialize(mesh=self._volumes)
        await torchstore.put(HOST_KEY, shared.host())

    async def close(self) -> None:
        """Stop the store and its process."""
        if self._volumes is not None:
            await torchstore.shutdown()
            await self._volumes.stop()
            self._volumes = None

    async def _meet(self) -> None:
        """Learn, once, whether the store is on this machine, so that memory can be shared with it."""
        if not self._met:
            compat.share_memory(await torchstore.get(HOST_KEY) == shared.host())
            self._met = True

    async def push(self, state: Mapping[str, torch.Tensor], version: int) -> int:
        """Publish `state` as `version`; returns the bytes moved."""
        return await self.put(self.snapshot(state), version)

    def snapshot(self, state: Mapping[str, torch.Tensor]) -> Buffers:
        """A copy of `state` for `put`: from here on the weights may change.

        It lies where a version that was dropped lay, since fresh pages cost several times the copy.
        """
        if self._layout is None:
            self._layout = Layout.of(state, self._dtype)
        spare, self._spare = self._spare, None
        return self._layout.pack(state, spare)

    async def put(self, buffers: Buffers, version: int) -> int:
        """Publish a snapshot as `version`; returns the bytes moved."""
        await self._meet()
        if not self._layout_published:
            await torchstore.put(LAYOUT_KEY, self._layout)
            self._layout_published = True
        for dtype, buffer in buffers.items():
            await torchstore.put(_key(version, dtype), buffer)
        self._held[version] = buffers
        return sum(buffer.nbytes for buffer in buffers.values())

    async def pull(self, version: int) -> Iterable[tuple[str, torch.Tensor]]:
        """The tensors of `version`, as views into the store's own buffers: to be read, until the version is dropped."""
        await self._meet()
        if self._layout is None:
            self._layout = await torchstore.get(LAYOUT_KEY)
        buffers = {dtype: await torchstore.get(_key(version, dtype)) for dtype in self._layout.sizes}
        return self._layout.unpack(buffers)

    async def versions(self) -> set[int]:
        """The versions that are held."""
        return {
            int(key.split("/")[1].removeprefix("v")) for key in await torchstore.keys() if key.startswith(_VERSIONS)
        }

    async def drop(self, version: int) -> None:
        """Forget a version that nobody needs any more."""
        if self._layout is None:
            self._layout = await torchstore.get(LAYOUT_KEY)
        for dtype in self._layout.sizes:
            await torchstore.delete(_key(version, dtype))
        self._spare = self._held.pop(version, None)
