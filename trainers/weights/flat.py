"""Weights as a few flat buffers: transfers cost per tensor, not per byte, until tensors are large.

Whoever publishes weights has parts of tensors, or all of them, and packs them into one buffer per data type. Whoever
reads them has the buffers of all that published, and makes whole tensors of the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from trainers.weights import shared

Buffers = Mapping[torch.dtype, torch.Tensor]
"""Flat, by data type."""
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor, or all of it.

    Attributes:
        name: of the tensor.
        start: the box's first index in each dimension.
        whole: shape of the tensor.
        tensor: the box; or, with `rows`, what it is taken from.
        rows: which rows of `tensor` are the box, in its order, int64 [R]; None: all as they are.
    """

    name: str
    start: Shape
    whole: Shape
    tensor: torch.Tensor
    rows: torch.Tensor | None = None

    @classmethod
    def all_of(cls, state: Mapping[str, torch.Tensor]) -> list[Part]:
        """Whole tensors."""
        return [cls(name, (0,) * item.dim(), tuple(item.shape), item.detach()) for name, item in state.items()]

    @property
    def shape(self) -> Shape:
        """Of the box."""
        shape = tuple(self.tensor.shape)
        return shape if self.rows is None else (len(self.rows), *shape[1:])

    @property
    def values(self) -> torch.Tensor:
        """The box itself."""
        return self.tensor if self.rows is None else self.tensor.index_select(0, self.rows.to(self.tensor.device))

    @property
    def box(self) -> tuple[slice, ...]:
        """Where it is in the whole tensor."""
        return tuple(slice(first, first + size) for first, size in zip(self.start, self.shape, strict=True))

    def put(self, values: torch.Tensor) -> None:
        """Make it these, of its shape."""
        if self.rows is None:
            self.tensor.copy_(values)
        else:
            self.tensor.index_copy_(0, self.rows.to(self.tensor.device), values.to(self.tensor))


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one part lies: which it is of which tensor, and its offset in the buffer of its data type."""

    name: str
    start: Shape
    whole: Shape
    shape: Shape
    dtype: torch.dtype
    offset: int

    @property
    def end(self) -> int:
        """Offset behind it."""
        return self.offset + prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """The plan of what one process publishes: the same for every version of one model."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, parts: Sequence[Part], dtype: torch.dtype | None = None) -> Layout:
        """The layout of `parts`, one buffer per data type, in their order.

        Args:
            dtype: of floating-point tensors in the buffers, by default their own.
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
        """Elements in the buffer of each data type."""
        sizes: dict[torch.dtype, int] = {}
        for entry in self.entries:
            sizes[entry.dtype] = max(sizes.get(entry.dtype, 0), entry.end)
        return sizes

    def pack(self, parts: Sequence[Part], into: Buffers | None = None) -> Buffers:
        """Copy `parts` into flat buffers on the CPU, in memory that other processes can map; by default fresh ones."""
        buffers = into or {dtype: shared.empty(size, dtype) for dtype, size in self.sizes.items()}
        for entry, part in zip(self.entries, parts, strict=True):
            buffers[entry.dtype][entry.offset : entry.end].view(entry.shape).copy_(part.values)
        return buffers

    def unpack(self, buffers: Buffers) -> Iterator[tuple[Entry, torch.Tensor]]:
        """Each part as a view into the buffers; nothing is copied."""
        for entry in self.entries:
            yield entry, buffers[entry.dtype][entry.offset : entry.end].view(entry.shape)


@dataclass(frozen=True, slots=True)
class Flat:
    """Weights that lie in flat buffers of one process or of several; iterating over them gives named whole tensors.

    A tensor that one process has whole is a view into its buffer. One that several share is put together when its turn
    comes: no more than one such copy is made here at a time.

    Attributes:
        layouts: of each process.
        buffers: likewise.
    """

    layouts: Sequence[Layout]
    buffers: Sequence[Buffers]

    @classmethod
    def of(cls, state: Mapping[str, torch.Tensor]) -> Flat:
        """A copy of `state`, in memory that other processes can map."""
        parts = Part.all_of(state)
        layout = Layout.of(parts)
        return cls([layout], [layout.pack(parts)])

    @property
    def handles(self) -> list[dict[torch.dtype, shared.Handle]]:
        """Of the buffers, for processes that take the weights from this one."""
        return [{dtype: shared.handle(each) for dtype, each in buffers.items()} for buffers in self.buffers]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        parts: dict[str, list[tuple[Entry, torch.Tensor]]] = {}
        for layout, buffers in zip(self.layouts, self.buffers, strict=True):
            for entry, tensor in layout.unpack(buffers):
                parts.setdefault(entry.name, []).append((entry, tensor))
        for name, found in parts.items():
            yield name, _joined(found)


def _joined(parts: Sequence[tuple[Entry, torch.Tensor]]) -> torch.Tensor:
    """A whole tensor of its parts.

    Raises:
        ValueError: they are not all of it.
    """
    entry, tensor = parts[0]
    if entry.shape == entry.whole:
        return tensor
    if (found := sum(prod(part.shape) for part, _ in parts)) != prod(entry.whole):
        raise ValueError(f"{entry.name} has {prod(entry.whole)} elements, of which {found} were published")
    joined = torch.empty(entry.whole, dtype=tensor.dtype)
    for part, tensor in parts:
        box = tuple(slice(first, first + size) for first, size in zip(part.start, part.shape, strict=True))
        joined[box].copy_(tensor)
    return joined
