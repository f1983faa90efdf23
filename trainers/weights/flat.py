"""A state dict as a few flat buffers: transfers cost per tensor, not per byte, until tensors are large."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from trainers.weights import shared


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies: its name, shape, and offset in the buffer of its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The plan of a flattened state dict: the same for every version of one model."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, state: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> Layout:
        """The layout of `state`, one buffer per dtype, in the order of its names.

        Args:
            dtype: of floating-point tensors in the buffers, by default their own.
        """
        used: dict[torch.dtype, int] = {}
        entries = []
        for name, tensor in state.items():
            kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            offset = used.get(kind, 0)
            entries.append(Entry(name, tuple(tensor.shape), kind, offset, tensor.numel()))
            used[kind] = offset + tensor.numel()
        return cls(tuple(entries))

    @property
    def sizes(self) -> dict[torch.dtype, int]:
        """Elements in the buffer of each dtype."""
        sizes: dict[torch.dtype, int] = {}
        for entry in self.entries:
            sizes[entry.dtype] = max(sizes.get(entry.dtype, 0), entry.offset + entry.numel)
        return sizes

    def pack(
        self, state: Mapping[str, torch.Tensor], into: Mapping[torch.dtype, torch.Tensor] | None = None
    ) -> Mapping[torch.dtype, torch.Tensor]:
        """Copy `state` into flat buffers on the CPU, in memory that other processes can map; by default fresh ones."""
        buffers = into or {dtype: shared.empty(size, dtype) for dtype, size in self.sizes.items()}
        for entry in self.entries:
            target = buffers[entry.dtype][entry.offset : entry.offset + entry.numel]
            target.copy_(state[entry.name].detach().reshape(-1))
        return buffers

    def unpack(self, buffers: Mapping[torch.dtype, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Named views into the buffers; nothing is copied."""
        for entry in self.entries:
            flat = buffers[entry.dtype][entry.offset : entry.offset + entry.numel]
            yield entry.name, flat.view(entry.shape)


@dataclass(frozen=True, slots=True)
class Flat:
    """A state dict that lies in flat buffers; iterating over it gives named views into them.

    Attributes:
        layout: of the tensors.
        buffers: by dtype.
    """

    layout: Layout
    buffers: Mapping[torch.dtype, torch.Tensor]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.layout.unpack(self.buffers)

    @classmethod
    def of(cls, state: Mapping[str, torch.Tensor]) -> Flat:
        """A copy of `state`, in memory that other processes can map."""
        layout = Layout.of(state)
        return cls(layout, layout.pack(state))
