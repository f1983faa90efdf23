"""Weights packed into a few flat buffers, because the cost of small transfers is per tensor rather than per byte.

A publishing process has whole tensors or parts of them, and packs these into one buffer per data type. A reader maps or
fetches the buffers of all publishing processes and assembles whole tensors from the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from trainers.model.parts import Part, Shape
from trainers.weights import shared

Buffers = Mapping[torch.dtype, torch.Tensor]
"""Flat buffers by data type."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Position of a part: in its tensor, and in the flat buffer of its data type (offset in elements)."""

    name: str
    start: Shape
    whole: Shape
    shape: Shape
    dtype: torch.dtype
    offset: int

    @property
    def end(self) -> int:
        """Offset of the first element after the part."""
        return self.offset + prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """Positions of all parts that one process publishes: the same for every version of one model."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, parts: Sequence[Part], dtype: torch.dtype | None = None) -> Layout:
        """The layout of `parts`, one buffer per data type, in their order; `dtype` is that of floating-point tensors
        there.
        """
        used: dict[torch.dtype, int] = {}
        entries = []
        for part in parts:
            kind = dtype if dtype is not None and part.tensor.is_floating_point() else part.tensor.dtype
            entry = Entry(part.name, part.start, part.whole, part.shape, kind, used.get(kind, 0))
            entries.append(entry)
            used[kind] = entry.end
        return cls(tuple(entries))

    @property
    def sizes(self) -> dict[torch.dtype, int]:
        """Number of elements in the buffer of each data type."""
        sizes: dict[torch.dtype, int] = {}
        for entry in self.entries:
            sizes[entry.dtype] = max(sizes.get(entry.dtype, 0), entry.end)
        return sizes

    def pack(self, parts: Sequence[Part], into: Buffers | None = None) -> Buffers:
        """Copy `parts` into `into`, by default new flat buffers in CPU memory that other processes can map."""
        buffers = into or {dtype: shared.empty(size, dtype) for dtype, size in self.sizes.items()}
        if not into and any(part.tensor.is_cuda for part in parts):
            for buffer in buffers.values():
                shared.pin(buffer)
        for entry, part in zip(self.entries, parts, strict=True):
            values = part.values
            if values.is_cuda:  # `copy_` would copy before converting, so twice the bytes, and convert on the CPU
                values = values.to(entry.dtype)
            buffers[entry.dtype][entry.offset : entry.end].view(entry.shape).copy_(values)
        return buffers

    def unpack(self, buffers: Buffers) -> Iterator[tuple[Entry, torch.Tensor]]:
        """Yield each part as a view into the buffers, without copying."""
        for entry in self.entries:
            yield entry, buffers[entry.dtype][entry.offset : entry.end].view(entry.shape)


@dataclass(frozen=True, slots=True)
class Flat:
    """Weights in the flat buffers of one or several processes. Iteration yields names and whole tensors.

    A tensor that one process has whole is a view into its buffer. A tensor split between processes is assembled on
    `device` (None: the CPU) when the iteration reaches it, so at most one such copy is made at a time.
    """

    layouts: Sequence[Layout]
    buffers: Sequence[Buffers]
    device: torch.device | None = None

    @classmethod
    def of(cls, state: Mapping[str, torch.Tensor]) -> Flat:
        """A copy of `state`, in memory that other processes can map."""
        parts = Part.all_of(state)
        layout = Layout.of(parts)
        return cls([layout], [layout.pack(parts)])

    @property
    def handles(self) -> list[dict[torch.dtype, shared.Handle]]:
        """Handles of the buffers, for processes that take the weights from this one."""
        return [{dtype: shared.handle(each) for dtype, each in buffers.items()} for buffers in self.buffers]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        parts: dict[str, list[tuple[Entry, torch.Tensor]]] = {}
        for layout, buffers in zip(self.layouts, self.buffers, strict=True):
            for entry, tensor in layout.unpack(buffers):
                parts.setdefault(entry.name, []).append((entry, tensor))
        for name, entries in parts.items():
            _check_complete(name, entries)
        for name, entries in parts.items():
            yield name, _joined(entries, self.device)


def _check_complete(name: str, parts: Sequence[tuple[Entry, torch.Tensor]]) -> None:
    """Raise ValueError if parts of a tensor are missing."""
    size = prod(parts[0][0].whole)
    if (published := sum(prod(part.shape) for part, _ in parts)) != size:
        raise ValueError(
            f"{name} has {size} elements, of which {published} were published: give `Sender.publish` the offers of "
            "all of the trainer's processes"
        )


def _joined(parts: Sequence[tuple[Entry, torch.Tensor]], device: torch.device | None) -> torch.Tensor:
    """Assemble a whole tensor from its parts; a single part is not copied."""
    entry, tensor = parts[0]
    if entry.shape == entry.whole:
        return tensor
    joined = torch.empty(entry.whole, dtype=tensor.dtype, device=device)
    for part, tensor in parts:
        box = tuple(slice(first, first + size) for first, size in zip(part.start, part.shape, strict=True))
        joined[box].copy_(tensor)
    return joined
