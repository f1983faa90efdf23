"""Layouts of packed rows: which tokens belong to which sequence.

Sequences follow one another in a row. A sequence may share its first tokens with the one before it; these are in the
row once, so the row is a tree: `[a b c d] [a b e]` is the row `a b c d e`, in which `e` follows `b`. The *path* of a
sequence is where its tokens are, and its *branch* the tokens that it adds to the row.

With context parallelism, a rank has a part of the row, and the keys and values of the whole (`Row.part`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

GRID = 1.5
"""Maximum size of an attention grid relative to the tokens in it; sequences that need more padding get another grid."""


@dataclass(frozen=True, slots=True)
class Row:
    """S token sequences in a row of T tokens.

    Attributes:
        lengths: their tokens, [S].
        shared: leading tokens of each sequence with queries elsewhere: in the one before, or on another rank, [S].
        starts: index of the first token of each branch, [S].
        paths: indices of the keys and values of each sequence's tokens; on a single rank, of the tokens themselves.
    """

    lengths: NDArray[np.int64]
    shared: NDArray[np.int64]
    starts: NDArray[np.int64]
    paths: list[NDArray[np.int64]]
    gathered: bool = False

    @classmethod
    def of(cls, lengths: Sequence[int], shared: Sequence[int] | None = None) -> Row:
        """Build the row of sequences of these lengths; `shared` is 0 by default."""
        sizes = np.array(lengths, np.int64)
        common = np.zeros(len(sizes), np.int64) if shared is None else np.array(shared, np.int64)
        added = sizes - common
        starts = added.cumsum() - added
        paths: list[NDArray[np.int64]] = []
        for start, length, count in zip(starts.tolist(), sizes.tolist(), common.tolist(), strict=True):
            branch = np.arange(start, start + length - count)
            paths.append(np.concatenate([paths[-1][:count], branch]) if count else branch)
        return cls(sizes, common, starts, paths)

    def __len__(self) -> int:
        """T, the number of tokens."""
        return int((self.lengths - self.shared).sum())

    def part(self, pieces: Sequence[range], keys: NDArray[np.int64]) -> Row:
        """Reduce a row to the tokens in `pieces`, in their order; `keys` has the index of each token's keys, [T]."""
        starts, shared, paths = [], [], []
        first = 0
        for piece in pieces:
            for number in self.branches:
                start, joined = int(self.starts[number]), int(self.shared[number])
                begin = max(piece.start, start)
                end = min(piece.stop, start + int(self.lengths[number]) - joined)
                if begin < end:
                    starts.append(first + begin - piece.start)
                    shared.append(joined + begin - start)
                    paths.append(keys[self.paths[number][: joined + end - start]])
            first += len(piece)
        return Row(np.array([len(path) for path in paths]), np.array(shared), np.array(starts), paths, gathered=True)

    @property
    def branches(self) -> list[int]:
        """Numbers of the sequences that add tokens to the row."""
        numbers: list[int] = np.flatnonzero(self.lengths > self.shared).tolist()
        return numbers


@dataclass(frozen=True, slots=True)
class Paths:
    """The paths of S branches one after the other, K tokens, for layers in which a token depends on all before it.

    Attributes:
        lengths: number of tokens of each path, [S].
        positions: position of each token on its path, [K] int64.
        take: index in the row of each token, [K] int64. None: the paths are the branches, in the order of the row.
        last: where on the paths the tokens of the row are as part of a branch, [T] int64; None like `take`.
    """

    lengths: list[int]
    positions: torch.Tensor
    take: torch.Tensor | None = None
    last: torch.Tensor | None = None

    @classmethod
    def of(cls, row: Row, device: torch.device) -> Paths:
        """Build the paths of a row."""
        paths = [row.paths[number] for number in row.branches]
        lengths = [len(path) for path in paths]
        position = np.concatenate([np.arange(length) for length in lengths])
        positions = torch.from_numpy(position).to(device)
        if not row.gathered and not row.shared.any():
            return cls(lengths, positions)
        take = np.concatenate(paths)
        last = np.flatnonzero(position >= np.repeat(row.shared[row.branches], lengths))
        return cls(lengths, positions, torch.from_numpy(take).to(device), torch.from_numpy(last).to(device))


@dataclass(frozen=True, slots=True)
class Grid:
    """Queries and keys of R branches as rows of equal length; padding slots hold copies that no real token attends to.

    Attributes:
        query_width: length of the longest branch, Lq.
        key_width: length of the longest path, Lk.
        queries: index of the token copied to each slot of the queries, [R * Lq] int64.
        keys: index of the token copied to each slot of the keys, [R * Lk] int64.
        mask: keys that each query attends to, [R, 1, Lq, Lk] bool. None: the same slots as queries and keys, causal.
    """

    rows: int
    query_width: int
    key_width: int
    queries: torch.Tensor
    keys: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Mapping of the T tokens of a packed row to grids of attention, one of which has a row for each branch.

    `slots` is the slot of each token among the queries of all grids, one grid after the other, [T] int64.
    """

    grids: tuple[Grid, ...]
    slots: torch.Tensor
    paths: Paths

    @classmethod
    def of(cls, row: Row, device: torch.device) -> PackedLayout:
        """Build the layout of a row."""
        slots, grids, first = np.empty(len(row), np.int64), [], 0
        for members in _similar(row):
            grid, own = _grid(row, members, device)
            slots[own] = first + np.flatnonzero(_real(row, members))
            first += grid.rows * grid.query_width
            grids.append(grid)
        return cls(tuple(grids), torch.from_numpy(slots).to(device), Paths.of(row, device))


def _similar(row: Row) -> list[list[int]]:
    """Divide the branches into grids: whole sequences and others, the longest first."""
    result: list[list[int]] = []
    widths, real = (0, 0), 0
    for number in sorted(row.branches, key=lambda each: (row.shared[each] > 0, -row.lengths[each])):
        key = int(row.lengths[number])
        query = key - int(row.shared[number])
        new = max(widths[0], query), max(widths[1], key)
        more = real + query + 2 * key
        joins = bool(result) and (row.shared[result[-1][0]] > 0) == (row.shared[number] > 0)
        if joins and (len(result[-1]) + 1) * (new[0] + 2 * new[1]) <= GRID * more:
            result[-1].append(number)
            widths, real = new, more
        else:
            result.append([number])
            widths, real = (query, key), query + 2 * key
    return result


def _real(row: Row, members: Sequence[int]) -> NDArray[np.bool_]:
    """Which slots of the members' queries are no padding, [R, Lq]."""
    added = (row.lengths - row.shared)[members]
    return np.arange(added.max()) < added[:, None]


def _grid(row: Row, members: Sequence[int], device: torch.device) -> tuple[Grid, NDArray[np.int64]]:
    """Build a grid; returns also the indices of its real tokens, in the order of their slots."""
    lengths, shared = row.lengths[members], row.shared[members]
    query_width, key_width = int((lengths - shared).max()), int(lengths.max())
    query = np.minimum(shared[:, None] + np.arange(query_width), lengths[:, None] - 1)  # positions on the path
    queries = row.starts[members][:, None] + query - shared[:, None]
    key = np.minimum(np.arange(key_width), lengths[:, None] - 1)
    paths = np.zeros((len(members), key_width), np.int64)
    for at, number in enumerate(members):
        paths[at, : lengths[at]] = row.paths[number]
    mask = None
    if shared.any():
        mask = torch.from_numpy(np.arange(key_width) <= query[:, :, None])[:, None].to(device)
    keys = np.take_along_axis(paths, key, 1)
    taken, seen = (torch.from_numpy(each.ravel()).to(device) for each in (queries, keys))
    grid = Grid(len(members), query_width, key_width, taken, seen, mask)
    return grid, queries[_real(row, members)]


@dataclass(frozen=True, slots=True)
class VarlenLayout:
    """Boundaries of the branches in a packed row and of their paths, for variable-length kernels on a GPU.

    Attributes:
        bounds: index of the first token of each of the S branches, then the number of tokens, [S + 1] int32.
        width: length of the longest branch.
        keys: indices of the tokens of all paths, one after the other, [K] int64. None: the paths are the branches.
        key_bounds: index in `keys` of the first token of each path, then their number, [S + 1] int32.
        key_width: length of the longest path.
    """

    bounds: torch.Tensor
    width: int
    keys: torch.Tensor | None
    key_bounds: torch.Tensor
    key_width: int
    paths: Paths

    @classmethod
    def of(cls, row: Row, device: torch.device) -> VarlenLayout:
        """Build the layout of a row."""
        sizes, added = row.lengths[row.branches], (row.lengths - row.shared)[row.branches]

        def bounds(of: NDArray[np.int64]) -> torch.Tensor:
            return torch.from_numpy(np.concatenate([[0], of.cumsum()]).astype(np.int32)).to(device)

        branches, paths = bounds(added), Paths.of(row, device)
        if paths.take is None:
            return cls(branches, int(added.max()), None, branches, int(added.max()), paths)
        return cls(branches, int(added.max()), paths.take, bounds(sizes), int(sizes.max()), paths)


RowLayout = PackedLayout | VarlenLayout
"""Layout of a packed row on a single rank."""


def layout_of(row: Row, device: torch.device, *, padded: bool = False) -> RowLayout:
    """Build the layout of a row, in the form that attention on this device needs; `padded`: in grids on any device."""
    return (VarlenLayout if device.type == "cuda" and not padded else PackedLayout).of(row, device)


@dataclass(frozen=True, slots=True)
class ContextLayout:
    """Layout of this rank's queries in a packed row that `degree` ranks of a process group split.

    `row` also has the keys of the whole row, in rank order.
    """

    row: RowLayout
    group: Any
    degree: int
