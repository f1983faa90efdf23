"""Versions of the weights: the trainer's ranks publish, generators pull, old versions are dropped.

The weights stay where they were packed, in memory of the processes that publish them. Where the parts of a version lie
(`Published`) travels with the word that there is one. TorchStore has the index of it, for whoever was told no more than
a version's number. Whoever pulls maps the parts, or fetches them from another machine, from each process.
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
from trainers.weights import compat, shared  # compat patches torchstore before its first use
from trainers.weights.flat import Buffers, Flat, Layout, Part

LAYOUT_KEY = "weights/layout"
_VERSIONS = "weights/v"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Offer:
    """What one process has of a version.

    Attributes:
        handles: of its buffers, by data type.
        layout: of its parts; None: as it was.
    """

    handles: Mapping[torch.dtype, shared.Handle]
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class Published:
    """Where a version lies.

    Attributes:
        name: of the layouts it goes with.
        handles: of each process's buffers.
        layouts: of each process; None: the index has them.
    """

    name: str
    handles: Sequence[Mapping[torch.dtype, shared.Handle]]
    layouts: Sequence[Layout] | None = None

    @property
    def nbytes(self) -> int:
        """Of the weights."""
        return sum(handle.nbytes for handles in self.handles for handle in handles.values())


def _key(version: int) -> str:
    return f"{_VERSIONS}{version}"


class Keeper(ForgeActor):
    """In the process that holds the index."""

    @endpoint
    async def setup(self) -> None:
        """There is nothing to set up."""
        leave_as_it_stands()


class WeightStore:
    """One process's view of the store. `open` and `close` belong to the process that owns the run.

    The process that holds the index may die and another take its place (`open` again): nothing is published then until
    the trainer pushes again, and every view finds the new one at its next call.

    Args:
        dtype: in which snapshots keep floating-point tensors: that of whoever computes with them; by default their own.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._layout: Layout | None = None
        """Of what this process publishes."""
        self._newest: Buffers = {}
        self._before: Buffers = {}
        self._layouts: tuple[str, Sequence[Layout]] = "", ()
        """Of all that publish, and their name."""
        self._layouts_published = False
        self._landing: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        """Where the bytes of other machines are put: of each version in the place of the one before."""

    async def open(self, keeper: Any) -> None:
        """Keep the index in the process of `keeper` from here on; it is the caller's to end."""
        await compat.open_store(keeper._forge_proc_mesh)

    async def close(self) -> None:
        """Forget the store, so that another can be opened."""
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
            self._layouts_published = False
            found = await result(operation())
        return found

    async def push(self, state: Mapping[str, torch.Tensor], version: int) -> int:
        """Publish `state`, which this process has whole, as `version`; its bytes."""
        published = self.publish([self.snapshot(Part.all_of(state))])
        await self.put(published, version)
        return published.nbytes

    def snapshot(self, parts: Sequence[Part]) -> Offer:
        """A copy of what this process has of the weights, for `publish`: from here on they may change.

        It lies where the version before the last one lay, unless somebody still reads that.
        """
        told = self._layout
        if self._layout is None:
            self._layout = Layout.of(parts, self._dtype)
        spare, self._before = self._before, self._newest
        free = spare and all(shared.reuse(buffer) for buffer in spare.values())
        self._newest = self._layout.pack(parts, spare if free else None)
        [handles] = Flat([self._layout], [self._newest]).handles
        return Offer(handles, self._layout if told is None else None)

    def publish(self, offers: Sequence[Offer]) -> Published:
        """The snapshots of all processes that have parts as one version, which can be taken from now on."""
        layouts = [offer.layout for offer in offers if offer.layout is not None]
        if layouts:
            self._layouts, self._layouts_published = (uuid.uuid4().hex, layouts), False
        return Published(self._layouts[0], [offer.handles for offer in offers], layouts or None)

    async def put(self, published: Published, version: int) -> None:
        """Enter what was published as `version` into the index. Errors as in `pull`."""
        await self._reach(lambda: self._put(replace(published, layouts=None), version))

    async def _put(self, published: Published, version: int) -> None:
        if not self._layouts_published:
            await torchstore.put(LAYOUT_KEY, self._layouts)
            self._layouts_published = True
        await torchstore.put(_key(version), published)

    async def find(self, version: int) -> Published:
        """Where `version` lies; raises as `pull` does."""
        published: Published = await self._reach(lambda: compat.get(_key(version)))
        return published

    async def pull(self, version: int) -> Flat:
        """The tensors of `version`: to be read, until another is pulled. Whoever keeps them keeps their memory.

        On the machine of those who published them they are views into their memory, on others into a copy.

        Raises:
            KeyError: the store has no such version.
            OSError: it was dropped meanwhile, or who published it is gone or can't be reached.
            ActorDiedError: the store's process is gone.
        """
        return await self.take(await self.find(version))

    async def take(self, published: Published) -> Flat:
        """As `pull`, of what `publish` gave, here or elsewhere."""
        if self._layouts[0] != published.name:
            known = published.layouts
            self._layouts = (
                await self._reach(lambda: compat.get(LAYOUT_KEY)) if known is None else (published.name, known)
            )
            self._landing.clear()
        places = [(number, dtype) for number, each in enumerate(published.handles) for dtype in each]
        takes = (self._take(place, published.handles[place[0]][place[1]]) for place in places)
        # waits for all, whatever happens: nobody may write into the landing any more
        taken = await asyncio.gather(*takes, return_exceptions=True)
        buffers: list[dict[torch.dtype, torch.Tensor]] = [{} for _ in published.handles]
        for (number, dtype), each in zip(places, taken, strict=True):
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
        """The versions that are published."""
        return {int(key.removeprefix(_VERSIONS)) for key in await torchstore.keys() if key.startswith(_VERSIONS)}

    async def drop(self, version: int) -> None:
        """Forget a version that nobody needs any more; who reads it may come to its end."""
        with suppress(KeyError):  # it went with the process that held the index
            await result(torchstore.delete(_key(version)))

    async def drop_all_but(self, version: int) -> None:
        """Forget every other version: those of a trainer that is gone."""
        for other in await self.versions() - {version}:
            await self.drop(other)
