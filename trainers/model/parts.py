"""Parts of tensors, as the processes of a trainer have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor, which begins at `start`: its range of indices in each dimension, possibly all of them.

    Attributes:
        whole: shape of the whole tensor.
        tensor: values of the box; with `rows`, the tensor that contains its rows.
        rows: indices of the rows of `tensor` that form the box, in the box's order, int64 [R]; None: `tensor` is the
            box.
    """

    name: str
    start: Shape
    whole: Shape
    tensor: torch.Tensor
    rows: torch.Tensor | None = None

    @classmethod
    def all_of(cls, state: Mapping[str, torch.Tensor]) -> list[Part]:
        """Parts that are whole tensors."""
        return [cls(name, (0,) * item.dim(), tuple(item.shape), item.detach()) for name, item in state.items()]

    @property
    def shape(self) -> Shape:
        """Shape of the box."""
        shape = tuple(self.tensor.shape)
        return shape if self.rows is None else (len(self.rows), *shape[1:])

    @property
    def values(self) -> torch.Tensor:
        """Values of the box."""
        return self.tensor if self.rows is None else self.tensor.index_select(0, self.rows.to(self.tensor.device))

    @property
    def box(self) -> tuple[slice, ...]:
        """Slices of the whole tensor that the box covers."""
        return tuple(slice(first, first + size) for first, size in zip(self.start, self.shape, strict=True))

    def put(self, values: torch.Tensor) -> None:
        """Overwrite the box with `values`, which have its shape."""
        values = values.to(self.tensor.device)  # otherwise torch converts them before the copy, on the CPU
        if self.rows is None:
            self.tensor.copy_(values)
        else:
            self.tensor.index_copy_(0, self.rows.to(self.tensor.device), values.to(self.tensor.dtype))
