"""Weights in TorchStore, for `weights.transport: torchstore`.

Every rank of the trainer has one storage volume in its own process. It puts whole flat buffers, one per data type,
because TorchStore's cost is per call rather than per byte. If several ranks have parts of a data type, their buffers
are the shards of one DTensor, padded to one length. Readers get every rank's shard, from all volumes at the same time.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torchstore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torchstore.transport import TensorSlice

from trainers.actors.actor import own_rank
from trainers.actors.remote import ActorDiedError, result
from trainers.compat import torchstore as compat  # patches torchstore before its first use
from trainers.model.parts import Part
from trainers.weights import shared
from trainers.weights.flat import Buffers, Layout
from trainers.weights.transport import Handles, Offer, Published, Sender, unpack


class VolumePerRank(torchstore.TorchStoreStrategy):  # type: ignore[misc]
    """TorchStore strategy with a volume in each process of the trainer. Each process puts into its own volume."""

    @classmethod
    def get_volume_id(cls) -> str:
        """Rank of the process that the volume is in."""
        return str(own_rank())

    @classmethod
    def get_client_id(cls) -> str:
        """Rank of this process among the trainer's."""
        return str(dist.get_rank() if dist.is_initialized() else 0)


async def open_store(processes: Any, count: int) -> None:
    """Open a new, empty store, whose volumes are in `count` processes of the trainer, in place of any previous one."""
    await compat.forget_store()
    await torchstore.initialize(num_storage_volumes=count, strategy=VolumePerRank(), mesh=processes)


async def close_store() -> None:
    """Disconnect from the store's volumes, which end with the trainer's processes."""
    await compat.forget_store()


def _shards(layouts: Sequence[Layout]) -> dict[torch.dtype, tuple[list[int], int]]:
    """Numbers of the processes that have parts of each data type, and the length of their padded buffers."""
    sizes = [layout.sizes for layout in layouts]
    dtypes = sorted({dtype for each in sizes for dtype in each}, key=str)
    return {
        dtype: ([n for n, each in enumerate(sizes) if each.get(dtype)], max(each.get(dtype, 0) for each in sizes))
        for dtype in dtypes
    }


class StoreSender(Sender):
    """One trainer process's side of a transfer through TorchStore.

    Only one version is uploaded at a time: await `upload` before the next `snapshot`. It drops the previous version.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__(dtype)
        self._number = dist.get_rank() if dist.is_initialized() else 0
        self._store = uuid.uuid4().hex
        """Prefix of the keys of this trainer's weights; that of the first rank is used."""
        self._snapshots = 0
        self._buffers: dict[torch.dtype, torch.Tensor] = {}
        """This process's buffers, padded."""
        self._published: Published | None = None
        self._meshes: dict[torch.dtype, DeviceMesh | None] = {}
        """Mesh of the ranks that have parts of a data type; None for a single rank."""
        self._uploaded: set[str] = set()
        """Keys of the version uploaded last."""

    def snapshot(self, parts: Sequence[Part]) -> Offer:
        """Copy this process's parts of the weights. Afterwards the original tensors may change."""
        self._snapshots += 1
        return replace(super().snapshot(parts), key=f"{self._store}/{self._snapshots}")

    def _pack(self, layout: Layout, parts: Sequence[Part]) -> Buffers:
        sizes = layout.sizes
        self._buffers = self._buffers or {dtype: torch.empty(size, dtype=dtype) for dtype, size in sizes.items()}
        layout.pack(parts, self._buffers)
        return {dtype: self._buffers[dtype][:size] for dtype, size in sizes.items()}

    def _handles(self, buffers: Buffers) -> Handles:
        return {}

    def publish(self, offers: Sequence[Offer]) -> Published:
        """Combine the snapshots of all processes into one version; `upload` makes it readable."""
        published = replace(super().publish(offers), handles=(), key=offers[0].key)
        if self._published is None or published.layouts != self._published.layouts:
            self._join(unpack(published.layouts))
        self._published = published
        return published

    def _join(self, layouts: Sequence[Layout]) -> None:
        """Pad this process's buffers to the length of the others', and form the meshes."""
        for dtype, (numbers, length) in _shards(layouts).items():
            self._meshes[dtype] = DeviceMesh("cpu", numbers) if len(numbers) > 1 else None
            if self._number in numbers and len(buffer := self._buffers[dtype]) < length:
                self._buffers[dtype] = torch.nn.functional.pad(buffer, (0, length - len(buffer)))

    async def upload(self, version: int) -> None:
        """Put this process's buffers, from which the first process drops the previous version afterwards.

        Raises:
            ActorDiedError: another process of the trainer died.
        """
        assert self._published is not None
        key = self._published.key
        for dtype, buffer in self._buffers.items():
            if len(buffer):
                mesh = self._meshes[dtype]
                await result(torchstore.put(f"{key}/{dtype}", buffer if mesh is None else _dtensor(buffer, mesh)))
        if self._number == 0:
            await result(torchstore.put(_by_number(version), self._published))
            uploaded = {_by_number(version), *(f"{key}/{dtype}" for dtype in self._meshes)}
            for other in self._uploaded - uploaded:
                await result(torchstore.delete(other))
            self._uploaded = uploaded


def _dtensor(buffer: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A vector whose shards are the buffers of the mesh's ranks."""
    shape = torch.Size([len(buffer) * mesh.size()])
    return DTensor.from_local(buffer, mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,))


def _by_number(version: int) -> str:
    return f"version/{version}"


async def find(version: int) -> Published:
    """Look up a version by its number; see `Reader.find`."""
    torchstore.reset_client()  # the store may be another one by now
    try:
        published: Published = await result(torchstore.get(_by_number(version)))
    except (KeyError, AssertionError) as error:
        raise FileNotFoundError(f"TorchStore has no version {version} of the weights") from error
    except ActorDiedError as error:
        raise ConnectionError(str(error)) from error
    return published


def receive(
    published: Published, layouts: Sequence[Layout], landing: dict[tuple[int, torch.dtype], torch.Tensor]
) -> dict[tuple[int, torch.dtype], Coroutine[Any, Any, torch.Tensor]]:
    """Transfers of all buffers of a version, by process number and data type.

    Args:
        published: the version.
        layouts: layout of each process of the trainer.
        landing: receive buffers; missing ones are added.
    """
    transfers = {}
    for dtype, (numbers, length) in _shards(layouts).items():
        for index, number in enumerate(numbers):
            size = layouts[number].sizes[dtype]
            if (number, dtype) not in landing:
                landing[number, dtype] = shared.empty(size, dtype)
            box = TensorSlice((index * length,), (), (length * len(numbers),), (size,), (len(numbers),))
            transfers[number, dtype] = _get(
                f"{published.key}/{dtype}",
                landing[number, dtype],
                box if len(numbers) > 1 else None,
                published.processes[number],
            )
    return transfers


async def _get(key: str, into: torch.Tensor, box: TensorSlice | None, process: shared.Process) -> torch.Tensor:
    """Get a buffer, or a shard of a DTensor, from a process into a tensor of its size; errors as in `Reader.take`."""
    getting = asyncio.ensure_future(result(torchstore.get(key, into, box)))
    ending = asyncio.ensure_future(process.end())  # Monarch takes two minutes to report a death here
    try:
        await asyncio.wait([getting, ending], return_when=asyncio.FIRST_COMPLETED)
        if not getting.done():
            raise ConnectionError("a process of the trainer has ended")
        await getting
    except KeyError as error:
        raise FileNotFoundError(shared.DROPPED) from error
    except ActorDiedError as error:
        raise ConnectionError(str(error)) from error
    finally:
        getting.cancel()
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
    return into
