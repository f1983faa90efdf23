"""Where the sequences of a packed row lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where the T tokens of a packed row lie once each of its S sequences has a right-padded row of its own.

    Attributes:
        rows: S, number of sequences.
        width: L, longest of them.
        take: the token in each slot of the [S, L] grid, [S * L] int64; a padding slot repeats some token.
        slots: the slot of each token, [T] int64.
    """

    rows: int
    width: int
    take: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PackedLayout:
        """The layout of sequences of these lengths, one after another in a row."""
        rows, width = len(lengths), max(lengths)
        sizes = torch.tensor(lengths)
        starts = sizes.cumsum(0) - sizes
        column = torch.arange(width)
        take = (starts[:, None] + torch.minimum(column, sizes[:, None] - 1)).flatten()
        slots = torch.arange(rows * width).view(rows, width)[column < sizes[:, None]]
        return cls(rows, width, take.to(device), slots.to(device))

    @property
    def padding(self) -> float:
        """Share of the grid that is padding."""
        return 1 - len(self.slots) / len(self.take)


@dataclass(frozen=True, slots=True)
class ContextLayout:
    """What this rank's t tokens of a packed row may see of all T, which lie on `degree` ranks.

    Attributes:
        visible: [t, T] bool, keys in the order of ranks.
        group: those ranks (a `torch.distributed` process group).
        degree: how many they are.
    """

    visible: torch.Tensor
    group: Any
    degree: int
