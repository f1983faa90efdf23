"""Transfer of new weights from the trainer's processes to their readers: generators and a lagging reference model.

    every rank of the trainer    Sender.snapshot(parts) -> Offer           a copy, so training can continue
                                 Sender.publish(offers) -> Published       the update message carries it
                                 Sender.upload(version)                    TorchStore only
    reader                       Reader.take(published) -> Flat            in `trainers.weights.reader`

The recipe's `weights.transport` chooses between two transports (docs/decisions/weights-transport.md):

    shared       The weights stay in the memory of the ranks. Readers on the same machine map it; others fetch the
                 bytes over TCP (`trainers.weights.shared`, `trainers.weights.network`).
    torchstore   Every rank puts its weights into TorchStore, from which readers get them (`trainers.weights.store`).
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from trainers.model.parts import Part
from trainers.weights import shared
from trainers.weights.flat import Buffers, Layout

Handles = Mapping[torch.dtype, shared.Handle]
"""Handles of one process's buffers, by data type."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One process's parts of a version: their packed layout, the same for every version of a model, and their bytes.

    `handles` are those of its buffers; with TorchStore there are none, but a `key` that it proposes for the version.
    """

    layout: bytes
    nbytes: int
    handles: Handles = field(default_factory=dict)
    key: str | None = None
    process: shared.Process = field(default_factory=shared.this_process)


@dataclass(frozen=True, slots=True)
class Published:
    """Location of a version, complete for readers that have seen no version before: what each process offers.

    `key` is the prefix of the weights' keys in TorchStore; None if they are in shared memory.
    """

    layouts: tuple[bytes, ...]
    nbytes: int
    handles: tuple[Handles, ...] = ()
    key: str | None = None
    processes: tuple[shared.Process, ...] = ()


def pack(layout: Layout) -> bytes:
    """Compress a layout: it travels with every version and is read once."""
    return zlib.compress(pickle.dumps(layout))


def unpack(layouts: Sequence[bytes]) -> list[Layout]:
    """Return the layouts that `pack` compressed."""
    return [pickle.loads(zlib.decompress(each)) for each in layouts]


class Sender:
    """One trainer process's side of a transfer through shared memory; floating-point tensors are sent in `dtype`."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._layout: Layout | None = None
        """Layout of the parts that this process publishes."""
        self._newest: Buffers = {}
        self._before: Buffers = {}

    def snapshot(self, parts: Sequence[Part]) -> Offer:
        """Copy this process's parts of the weights. Afterwards the original tensors may change.

        The copy overwrites the version before the last one, unless that is still being read.
        """
        if self._layout is None:
            self._layout = Layout.of(parts, self._dtype)
        buffers = self._pack(self._layout, parts)
        return Offer(self._packed, sum(each.nbytes for each in buffers.values()), self._handles(buffers))

    @cached_property
    def _packed(self) -> bytes:
        assert self._layout is not None
        return pack(self._layout)

    def _pack(self, layout: Layout, parts: Sequence[Part]) -> Buffers:
        spare, self._before = self._before, self._newest
        free = spare and all(shared.reuse(buffer) for buffer in spare.values())
        self._newest = layout.pack(parts, spare if free else None)
        return self._newest

    def _handles(self, buffers: Buffers) -> Handles:
        return {dtype: shared.handle(each) for dtype, each in buffers.items()}

    def publish(self, offers: Sequence[Offer]) -> Published:
        """Combine the snapshots of all processes into one version. With TorchStore, every process must call this."""
        return Published(
            tuple(offer.layout for offer in offers),
            sum(offer.nbytes for offer in offers),
            tuple(offer.handles for offer in offers),
            processes=tuple(offer.process for offer in offers),
        )

    async def upload(self, version: int) -> None:
        """Make the published version readable, which it is at once in shared memory."""
