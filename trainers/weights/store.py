"""Versions of the weights in TorchStore: the trainer pushes, generators pull, old versions are dropped."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torchstore

from trainers.actors.actor import ForgeActor
from trainers.actors.remote import ActorDiedError, result
from trainers.weights import compat, shared  # compat patches torchstore before its first use
from trainers.weights.flat import Flat, Layout

LAYOUT_KEY = "weights/layout"
_VERSIONS = "weights/v"

Buffers = Mapping[torch.dtype, torch.Tensor]
"""Flat, by data type."""
T = TypeVar("T")


def _key(version: int, dtype: torch.dtype) -> str:
    return f"{_VERSIONS}{version}/{str(dtype).removeprefix('torch.')}"


class Keeper(ForgeActor):
    """In the process that holds the weights."""


class WeightStore:
    """One process's view of the store. `open` and `close` belong to the process that owns the run.

    The process that holds the weights may die and another take its place (`open` again): what was in it is gone until
    the trainer pushes again, and every view finds the new one at its next call.

    Args:
        dtype: in which snapshots keep floating-point tensors: that of whoever computes with them; by default their own.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._layout: Layout | None = None
        self._layout_published = False
        self._held: dict[int, Buffers] = {}
        self._spare: Buffers | None = None
        self._landing: dict[torch.dtype, torch.Tensor] = {}
        """Where the bytes of another machine are put: of each version in the place of the one before."""

    async def open(self, keeper: Any) -> None:
        """Keep the weights in the process of `keeper` from here on; it is the caller's to end."""
        await compat.open_store(keeper._forge_proc_mesh)

    async def close(self) -> None:
        """Forget the store, so that another can be opened; what it held goes with the process that holds it."""
        await compat.forget_store()

    async def _reach(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Do what needs the store; once more where its process has been replaced since the last time.

        Raises:
            ActorDiedError: its process is gone, and no other has taken its place yet.
        """
        try:
            found: T = await result(operation())
        except ActorDiedError:
            torchstore.reset_client()
            self._layout_published = False
            found = await result(operation())
        return found

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
        """Publish a snapshot as `version`; returns the bytes moved. Errors as in `pull`."""
        await self._reach(lambda: self._put(buffers, version))
        self._held[version] = buffers
        return sum(buffer.nbytes for buffer in buffers.values())

    async def _put(self, buffers: Buffers, version: int) -> None:
        if not self._layout_published:
            await torchstore.put(LAYOUT_KEY, self._layout)
            self._layout_published = True
        for dtype, buffer in buffers.items():
            await torchstore.put(_key(version, dtype), buffer)

    async def pull(self, version: int) -> Flat:
        """The tensors of `version`: to be read, until the version is dropped or another is pulled.

        They are views into the trainer's own buffers on its machine, and into a copy on others.

        Raises:
            KeyError: the store has no such version.
            ActorDiedError: the store's process is gone.
        """
        return await self._reach(lambda: self._pull(version))

    async def _pull(self, version: int) -> Flat:
        if self._layout is None:
            self._layout = await compat.get(LAYOUT_KEY)
        buffers = {}
        for dtype in self._layout.sizes:
            buffers[dtype] = buffer = await compat.get(_key(version, dtype), self._landing.get(dtype))
            if not shared.borrowed(buffer):
                self._landing[dtype] = buffer
        return Flat(self._layout, buffers)

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
            with suppress(KeyError):  # it went with the process that held it
                await result(torchstore.delete(_key(version, dtype)))
        self._spare = self._held.pop(version, None)

    async def drop_all_but(self, version: int) -> None:
        """Forget every other version: those of a trainer that is gone."""
        for other in await self.versions() - {version}:
            await self.drop(other)
