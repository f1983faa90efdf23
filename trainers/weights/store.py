"""Weights in TorchStore, for `weights.transport: torchstore`.

Every rank of the trainer has one storage volume in its own process. It puts flat buffers, one per data type, in pieces:
every call has a cost, and large messages block both processes. If several ranks have parts of a data type, their pieces
are the shards of DTensors, padded to one length. Readers get every rank's shards, from all volumes at the same time.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torchstore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torchstore.transport import TensorSlice

from trainers.actors.remote import ActorDiedError, result
from trainers.compat import torchstore as compat  # patches torchstore before its first use
from trainers.model.parts import Part
from trainers.weights import shared
from trainers.weights.flat import Buffers, Layout
from trainers.weights.transport import Handles, Offer, Published, Sender, unpack

T = TypeVar("T")
PIECE = 16 << 20
"""Most bytes of a message. While a process unpacks one it can't answer Monarch, which takes it for dead after 10 s."""


class VolumePerRank(torchstore.TorchStoreStrategy):  # type: ignore[misc]
    """TorchStore strategy with a volume in each process of the trainer. Each process puts into its own volume."""

    @classmethod
    def get_volume_id(cls) -> shared.Process:
        """Process that the volume is in, for readers to watch."""
        return shared.this_process()

    get_client_id = get_volume_id


async def open_store(processes: Any, count: int) -> None:
    """Open a new, empty store, whose volumes are in `count` processes of the trainer, in place of any previous one."""
    await compat.forget_store()
    await torchstore.initialize(num_storage_volumes=count, strategy=VolumePerRank(), mesh=processes)


close_store = compat.forget_store
"""Disconnect from the store's volumes, which end with the trainer's processes."""


def _shards(layouts: Sequence[Layout]) -> dict[torch.dtype, tuple[list[int], int]]:
    """Numbers of the processes that have parts of each data type, and the length of their padded buffers."""
    sizes = [layout.sizes for layout in layouts]
    dtypes = sorted({dtype for each in sizes for dtype in each}, key=str)
    return {
        dtype: ([n for n, each in enumerate(sizes) if each.get(dtype)], max(each.get(dtype, 0) for each in sizes))
        for dtype in dtypes
    }


def _pieces(key: str, dtype: torch.dtype, length: int) -> Iterator[tuple[str, slice]]:
    """Key and range of each piece of a buffer of this length."""
    step = PIECE // dtype.itemsize
    for start in range(0, length, step):
        yield f"{key}/{dtype}/{start}", slice(start, min(start + step, length))


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
        self._shards: dict[torch.dtype, tuple[list[int], int]] = {}
        """See `_shards`."""
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
        self._shards = _shards(layouts)
        for dtype, (numbers, length) in self._shards.items():
            self._meshes[dtype] = DeviceMesh("cpu", numbers) if len(numbers) > 1 else None
            if self._number in numbers and len(buffer := self._buffers[dtype]) < length:
                self._buffers[dtype] = torch.nn.functional.pad(buffer, (0, length - len(buffer)))

    async def upload(self, version: int) -> None:
        """Put this process's buffers, from which the first process drops the previous version afterwards."""
        assert self._published is not None
        uploaded = {_by_number(version)}
        for dtype, (numbers, length) in self._shards.items():
            mesh = self._meshes[dtype]
            for name, piece in _pieces(str(self._published.key), dtype, length):
                uploaded.add(name)
                if self._number in numbers:
                    values = self._buffers[dtype][piece].clone()  # a view is sent with all that it is a view of
                    await result(torchstore.put(name, values if mesh is None else _dtensor(values, mesh)))
        if self._number == 0:
            await result(torchstore.put(_by_number(version), self._published))
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
        client = await result(torchstore.client())
        published: Published = await _while_alive(client.strategy.volume_id_to_coord, client.get(_by_number(version)))
    except ActorDiedError as error:
        raise ConnectionError(str(error)) from error
    except (FileNotFoundError, AssertionError) as error:
        raise FileNotFoundError(f"TorchStore has no version {version} of the weights") from error
    return published


def receive(
    published: Published, layouts: Sequence[Layout], landing: dict[tuple[int, torch.dtype], torch.Tensor]
) -> dict[tuple[int, torch.dtype], Coroutine[Any, Any, torch.Tensor]]:
    """Transfers of all buffers of a version, by process number and data type.

    `layouts` has that of each process of the trainer, and `landing` the receive buffers, to which missing ones are
    added.
    """
    transfers = {}
    for dtype, (numbers, length) in _shards(layouts).items():
        for index, number in enumerate(numbers):
            size = layouts[number].sizes[dtype]
            if (number, dtype) not in landing:
                landing[number, dtype] = shared.empty(size, dtype)
            getting = _get(str(published.key), landing[number, dtype], length, index, len(numbers))
            transfers[number, dtype] = _while_alive([published.processes[number]], getting)
    return transfers


async def _get(key: str, into: torch.Tensor, length: int, index: int, count: int) -> torch.Tensor:
    """Get the buffer of one of `count` processes into a tensor of its size, which was padded to `length`."""
    for name, piece in _pieces(key, into.dtype, length):
        if len(part := into[piece]):
            size = piece.stop - piece.start
            box = TensorSlice((index * size,), (), (count * size,), (len(part),), (count,))
            await torchstore.get(name, part, box if count > 1 else None)
    return into


async def _while_alive(processes: Iterable[shared.Process], transfer: Awaitable[T]) -> T:
    """Run a transfer that needs all of these processes; errors as in `Reader.take`."""
    getting: asyncio.Future[Any] = asyncio.ensure_future(result(transfer))
    # Monarch takes two minutes to report a death.
    ending: list[asyncio.Future[Any]] = [asyncio.ensure_future(each.end()) for each in processes]
    try:
        await asyncio.wait([getting, *ending], return_when=asyncio.FIRST_COMPLETED)
        if not getting.done():
            raise ConnectionError("a process of the trainer has ended")
        value: T = getting.result()
    except KeyError as error:
        raise FileNotFoundError(shared.DROPPED) from error
    except ActorDiedError as error:
        raise ConnectionError(str(error)) from error
    finally:
        for task in (getting, *ending):
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
    return value
