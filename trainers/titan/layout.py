"""Layouts of packed rows: which tokens belong to which sequence."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Mapping of the T tokens of a packed row to a grid with one right-padded row for each of its S sequences.

    Attributes:
        rows: S, the number of sequences.
        width: L, the length of the longest sequence.
        take: index of the token copied to each slot of the [S, L] grid, [S * L] int64; padding slots repeat some token.
        slots: slot of each token, [T] int64.
    """

    rows: int
    width: int
    take: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PackedLayout:
        """Build the layout of a row in which sequences of these lengths follow one another."""
        rows, width = len(lengths), max(lengths)
        sizes = torch.tensor(lengths)
        starts = sizes.cumsum(0) - sizes
        column = torch.arange(width)
        take = (starts[:, None] + torch.minimum(column, sizes[:, None] - 1)).flatten()
        slots = torch.arange(rows * width).view(rows, width)[column < sizes[:, None]]
        return cls(rows, width, take.to(device), slots.to(device))

    @property
    def padding(self) -> float:
        """Fraction of the grid that is padding."""
        return 1 - len(self.slots) / len(self.take)


@dataclass(frozen=True, slots=True)
class VarlenLayout:
    """Boundaries of the sequences in a packed row, for variable-length attention kernels on a GPU.

    Attributes:
        bounds: index of the first token of each of the S sequences, then the number of tokens, [S + 1] int32.
        width: length of the longest sequence.
    """

    bounds: torch.Tensor
    width: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> VarlenLayout:
        """Build the layout of a row in which sequences of these lengths follow one another."""
        bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        return cls(bounds.to(device), max(lengths))


RowLayout = PackedLayout | VarlenLayout
"""Layout of a packed row on a single rank."""


def layout_of(lengths: Sequence[int], device: torch.device) -> RowLayout:
    """Build the layout of a row of sequences of these lengths, in the form that attention on this device needs."""
    return (VarlenLayout if device.type == "cuda" else PackedLayout).of(lengths, device)


@dataclass(frozen=True, slots=True)
class ContextLayout:
    """Attention layout of this rank's t tokens in a packed row whose T tokens are split over `degree` ranks.

    Attributes:
        visible: attention mask, [t, T] bool, with keys in rank order.
        group: process group of those ranks (`torch.distributed`).
        degree: number of those ranks.
    """

    visible: torch.Tensor
    group: Any
    degree: int
