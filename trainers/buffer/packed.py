"""A group as the buffer holds it: the tensors of its episodes in one block of bytes, read without a copy.

Between processes a group travels as that block, and in memory it costs a few hundred bytes over its tensors, where
lists of Python numbers cost seven times the tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forge_env.trajectory import Trajectory

FIXED = ("reward", "advantage", "turns", "tokens", "truncated")
"""Columns of every group's table; the environment's metrics come after them."""
NO_ADVANTAGE = 1e-8
"""Advantages no larger than this are none."""
_NAMES: dict[tuple[str, ...], tuple[str, ...]] = {}
_HEADER = struct.Struct("<qqqqqqqd")


@dataclass(frozen=True, slots=True)
class PackedSegment:
    """A token sequence to train on.

    Attributes:
        token_ids: prompt, sampled and observed tokens in order, int32 [T].
        mask: True where the policy sampled the token, bool [T].
        logprobs: log-probability when sampled, 0 elsewhere, float32 [T].
        versions: policy version that sampled it, -1 elsewhere, int32 [T].
        advantage: of its episode.
    """

    token_ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    advantage: float


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """The valid episodes of one task, ready to train on.

    Attributes:
        task_id: of the task.
        columns: names of the table's columns, `FIXED` first.
        data: header, table, segments, tokens; `pack` writes it.
    """

    task_id: str
    columns: tuple[str, ...]
    data: bytes

    def __post_init__(self) -> None:  # one copy of the names for all groups
        object.__setattr__(self, "columns", _NAMES.setdefault(self.columns, self.columns))

    def __reduce__(self) -> tuple[object, ...]:
        return PackedGroup, (self.task_id, self.columns, self.data)

    def _array(self, name: str) -> NDArray[np.generic]:
        kind, count, offset = _layout(*_HEADER.unpack_from(self.data)[:5])[name]
        return np.frombuffer(self.data, kind, count, offset)

    @property
    def table(self) -> NDArray[np.float64]:
        """One row for each episode, one column for each of `columns`, [E, C]."""
        return self._array("table").reshape(-1, len(self.columns))  # type: ignore[return-value]

    def column(self, name: str) -> NDArray[np.float64]:
        """One of `FIXED`, a value for each episode, [E]."""
        return self.table[:, FIXED.index(name)]

    @property
    def metrics(self) -> dict[str, NDArray[np.float64]]:
        """The environment's metrics, a value for each episode, [E]; 0 where an episode had none."""
        return {name: self.table[:, place] for place, name in enumerate(self.columns) if place >= len(FIXED)}

    @property
    def num_episodes(self) -> int:
        """Valid episodes, E."""
        return int(_HEADER.unpack_from(self.data)[0])

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return int(_HEADER.unpack_from(self.data)[4])

    @property
    def oldest_version(self) -> int:
        """Policy version of the oldest sampled token; -1: no token was sampled."""
        return int(_HEADER.unpack_from(self.data)[5])

    @property
    def has_signal(self) -> bool:
        """Whether any advantage differs from 0."""
        return bool(_HEADER.unpack_from(self.data)[6])

    @property
    def priority(self) -> float:
        """Mean size of the advantages."""
        return float(_HEADER.unpack_from(self.data)[7])

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors: what any form of it needs."""
        return len(self.data) - _HEADER.size

    def segments(self) -> list[PackedSegment]:
        """The token sequences of all episodes, in order."""
        tokens, sampled = _HEADER.unpack_from(self.data)[3:5]
        mask = np.unpackbits(self._array("mask"), count=tokens).astype(np.bool_)  # type: ignore[arg-type]
        logprobs, versions = np.zeros(tokens, np.float32), np.full(tokens, -1, np.int32)
        if sampled:
            logprobs[mask], versions[mask] = self._array("logprobs"), self._array("versions")
        token_ids, advantages = self._array("token_ids"), self.column("advantage")
        found, start = [], 0
        for length, episode in self._array("segments").reshape(-1, 2).tolist():
            part = slice(start, start + length)
            start += length
            found.append(
                PackedSegment(
                    token_ids[part],  # type: ignore[arg-type]
                    mask[part],
                    logprobs[part],
                    versions[part],
                    float(advantages[episode]),
                )
            )
        return found


def _layout(episodes: int, columns: int, segments: int, tokens: int, sampled: int) -> dict[str, tuple[str, int, int]]:
    """Where every array lies: name -> `(type, count, offset)`."""
    parts = (
        ("table", "<f8", episodes * columns),
        ("segments", "<i4", segments * 2),
        ("token_ids", "<i4", tokens),
        ("logprobs", "<f4", sampled),
        ("versions", "<i4", sampled),
        ("mask", "u1", -(-tokens // 8)),
    )
    places, offset = {}, _HEADER.size
    for name, kind, count in parts:
        places[name] = (kind, count, offset)
        offset += count * np.dtype(kind).itemsize
    return places


def pack(episodes: Sequence[Trajectory], advantages: Sequence[float]) -> PackedGroup:
    """Pack the valid episodes of one task with their advantages, [E]; their messages stay behind."""
    metrics = sorted({name for episode in episodes for name in episode.metrics})
    table = [
        [
            episode.reward,
            advantage,
            len(episode.turns),
            episode.num_sampled_tokens,
            episode.truncated,
            *(episode.metrics.get(name, 0.0) for name in metrics),
        ]
        for episode, advantage in zip(episodes, advantages, strict=True)
    ]
    segments = [(segment, number) for number, episode in enumerate(episodes) for segment in episode.segments()]
    mask = np.array([bit for segment, _ in segments for bit in segment.mask], np.bool_)
    arrays = (
        np.array(table, "<f8"),
        np.array([(len(segment.token_ids), number) for segment, number in segments], "<i4"),
        np.array([token for segment, _ in segments for token in segment.token_ids], "<i4"),
        np.array([value for segment, _ in segments for value in segment.logprobs], "<f4")[mask],
        np.array([version for segment, _ in segments for version in segment.versions], "<i4")[mask],
        np.packbits(mask),
    )
    columns = (*FIXED, *metrics)
    sizes = np.abs(np.array(advantages, np.float64))
    header = _HEADER.pack(
        len(table),
        len(columns),
        len(segments),
        mask.size,
        int(mask.sum()),
        min((episode.oldest_version for episode in episodes if episode.num_sampled_tokens), default=-1),
        bool((sizes > NO_ADVANTAGE).any()),
        float(sizes.mean()) if episodes else 0.0,
    )
    task_id = episodes[0].task_id if episodes else ""
    return PackedGroup(task_id, columns, header + b"".join(array.tobytes() for array in arrays))
