"""Versions of the weights: the trainer's ranks publish them, generators pull them, old versions are dropped.

The weights stay in the memory of the processes that publish them. The update message for a new version carries their
location (`Published`). TorchStore holds an index of the locations, for callers that know only the version number. A
reader maps the parts of each process, or fetches them if the process is on another machine.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torchstore

from trainers.actors.actor import ForgeActor, endpoint
from trainers.actors.processes import leave_as_it_stands
from trainers.actors.remote import ActorDiedError, result
from trainers.model.parts import Part
from trainers.weights import compat, shared  # compat patches torchstore before its first use
from trainers.weights.flat import Buffers, Flat, Layout

LAYOUT_KEY = "weights/layout"
_VERSIONS = "weights/v"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Offer:
    """One process's parts of a version.

    Attributes:
        handles: handles of its buffers, by data type.
        layout: layout of its parts; None if it is unchanged.
    """

    handles: Mapping[torch.dtype, shared.Handle]
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class Published:
    """Location of a version.

    Attributes:
        name: identifier of the layouts that describe the buffers.
        handles: handles of each process's buffers, by data type.
        layouts: layout of each process; None if they are in the index.
    """

    name: str
    handles: Sequence[Mapping[torch.dtype, shared.Handle]]
    layouts: Sequence[Layout] | None = None

    @property
    def nbytes(self) -> int:
        """Size of the weights in bytes."""
        return sum(handle.nbytes for handles in self.handles for handle in handles.values())


def _key(version: int) -> str:
    return f"{_VERSIONS}{version}"


class Keeper(ForgeActor):
    """Actor in the process that holds the index."""

    @endpoint
    async def setup(self) -> None:
        """Make the process exit without Python's slow clean-up; there is nothing else to set up."""
        leave_as_it_stands()


class WeightStore:
    """One process's client of the store. Only the process that owns the run calls `open` and `close`.

    If the process that holds the index dies, another can replace it (`open` again). The index is then empty until the
    trainer pushes again, and every client connects to the new process at its next call.

    Args:
        dtype: data type of floating-point tensors in snapshots, normally that of the generators; by default their own.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._layout: Layout | None = None
        """Layout of the parts that this process publishes."""
        self._newest: Buffers = {}
        self._before: Buffers = {}
        self._layouts: tuple[str, Sequence[Layout]] = "", ()
        """Identifier of the layouts, and the layout of each publishing process."""
        self._layouts_published = False
        self._landing: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        """Receive buffers for weights of other machines, by process number and data type; reused for every version."""

    async def open(self, keeper: Any) -> None:
        """Create the index in the process of `keeper`. The caller stops that process."""
        await compat.open_store(keeper._forge_proc_mesh)

    async def close(self) -> None:
        """Clear the index and disconnect from its process, so that another store can be opened."""
        await compat.forget_store()

    async def _reach(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Run an operation on the store. It is repeated once if the store's process was replaced since the last call.

        Raises:
            ActorDiedError: the store's process is gone and has not been replaced.
        """
        try:
            output: T = await result(operation())
        except ActorDiedError:
            torchstore.reset_client()
            self._layouts_published = False
            output = await result(operation())
        return output

    async def push(self, state: Mapping[str, torch.Tensor], version: int) -> int:
        """Publish the whole tensors `state` of this process as `version`; returns their size in bytes."""
        published = self.publish([self.snapshot(Part.all_of(state))])
        await self.put(published, version)
        return published.nbytes

    def snapshot(self, parts: Sequence[Part]) -> Offer:
        """Copy this process's parts of the weights for `publish`. Afterwards the original tensors may change.

        The copy overwrites the version before the last one, unless that is still being read.
        """
        previous = self._layout
        if self._layout is None:
            self._layout = Layout.of(parts, self._dtype)
        spare, self._before = self._before, self._newest
        free = spare and all(shared.reuse(buffer) for buffer in spare.values())
        self._newest = self._layout.pack(parts, spare if free else None)
        [handles] = Flat([self._layout], [self._newest]).handles
        return Offer(handles, self._layout if previous is None else None)

    def publish(self, offers: Sequence[Offer]) -> Published:
        """Combine the snapshots of all processes that have parts into one version, which can be taken from then on."""
        layouts = [offer.layout for offer in offers if offer.layout is not None]
        if layouts:
            self._layouts, self._layouts_published = (uuid.uuid4().hex, layouts), False
        return Published(self._layouts[0], [offer.handles for offer in offers], layouts or None)

    async def put(self, published: Published, version: int) -> None:
        """Enter the location of `version` into the index; raises as `pull` does."""
        await self._reach(lambda: self._put(replace(published, layouts=None), version))

    async def _put(self, published: Published, version: int) -> None:
        if not self._layouts_published:
            await torchstore.put(LAYOUT_KEY, self._layouts)
            self._layouts_published = True
        await torchstore.put(_key(version), published)

    async def find(self, version: int) -> Published:
        """Look up the location of `version` in the index; raises as `pull` does."""
        published: Published = await self._reach(lambda: compat.get(_key(version)))
        return published

    async def pull(self, version: int) -> Flat:
        """Return the tensors of `version`, read-only and valid until the next pull. A reference keeps their memory.

        They are views into the publishers' memory on the same machine, and into a local copy on other machines.

        Raises:
            KeyError: the store has no such version.
            OSError: the version was dropped in the meantime, or a publisher has ended or can't be reached.
            ActorDiedError: the store's process is gone.
        """
        return await self.take(await self.find(version))

    async def take(self, published: Published) -> Flat:
        """Return the tensors of a published version as `pull` does, given its location instead of its number."""
        if self._layouts[0] != published.name:
            known = published.layouts
            self._layouts = (
                await self._reach(lambda: compat.get(LAYOUT_KEY)) if known is None else (published.name, known)
            )
            self._landing.clear()
        keys = [(number, dtype) for number, each in enumerate(published.handles) for dtype in each]
        takes = (self._take(key, published.handles[key[0]][key[1]]) for key in keys)
        # on an error, wait for the others too: none may write into the receive buffers afterwards
        taken = await asyncio.gather(*takes, return_exceptions=True)
        buffers: list[dict[torch.dtype, torch.Tensor]] = [{} for _ in published.handles]
        for (number, dtype), each in zip(keys, taken, strict=True):
            if isinstance(each, BaseException):
                raise each
            buffers[number][dtype] = each
        return Flat(self._layouts[1], buffers)

    async def _take(self, place: tuple[int, torch.dtype], handle: shared.Handle) -> torch.Tensor:
        if handle.host == shared.host():
            return shared.attach(handle)
        self._landing[place] = await shared.fetch(handle, self._landing.get(place))
        return self._landing[place]

    async def versions(self) -> set[int]:
        """The published versions."""
        return {int(key.removeprefix(_VERSIONS)) for key in await torchstore.keys() if key.startswith(_VERSIONS)}

    async def drop(self, version: int) -> None:
        """Remove a version that is no longer needed from the index. Reads in progress can finish."""
        with suppress(KeyError):  # lost with the previous process of the index
            await result(torchstore.delete(_key(version)))

    async def drop_all_but(self, version: int) -> None:
        """Remove all other versions, left by a trainer that has died, from the index."""
        for other in await self.versions() - {version}:
            await self.drop(other)
