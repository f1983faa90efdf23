"""A group as the buffer holds it: the tensors of its episodes in one block of bytes, read without a copy.

Between processes a group travels as that block, and in memory it costs a few hundred bytes over its tensors, where
lists of Python numbers cost seven times the tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_env.errors import UsageError
from forge_env.trajectory import Segment, Trajectory, runs

FIXED = ("reward", "advantage", "turns", "tokens", "truncated")
"""Columns of every group's table; the environment's metrics come after them."""
NO_ADVANTAGE = 1e-8
"""Advantages no larger than this are none."""
_NAMES: dict[tuple[str, ...], tuple[str, ...]] = {}
_FORMAT = 0x32_70_65_66
"""First in every block: what an older version wrote is told from this."""
_HEADER = struct.Struct("<11qd")


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A group without its tokens: what the figures of a training step are made of.

    Attributes:
        task_id: of the task.
        columns: names of the table's columns, `FIXED` first.
        table: one row for each episode, one column for each of `columns`, [E, C].
        has_signal: whether any token to be learned has an advantage that differs from 0.
        members: which episodes of the group the rows are: "0", "3", or with the seat that was played "3/white", [E].
            Empty in what an older version packed.
    """

    task_id: str
    columns: tuple[str, ...]
    table: NDArray[np.float64]
    has_signal: bool
    members: tuple[str, ...] = ()

    def column(self, name: str) -> NDArray[np.float64]:
        """One of `FIXED`, a value for each episode, [E]."""
        return self.table[:, FIXED.index(name)]

    @property
    def metrics(self) -> dict[str, NDArray[np.float64]]:
        """The environment's metrics, a value for each episode, [E]; 0 where an episode had none."""
        return {name: self.table[:, place] for place, name in enumerate(self.columns) if place >= len(FIXED)}


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """The valid episodes of one task, ready to train on.

    Attributes:
        task_id: of the task.
        columns: names of the table's columns, `FIXED` first.
        data: header, table, segments, tokens; `pack` writes it.
        members: as in `GroupRecord`.
        receipts: `Segment.receipt` of each segment; empty in groups packed by an older version.
        episodes: `Segment.episode` of each segment; empty in groups packed by an older version.
    """

    task_id: str
    columns: tuple[str, ...]
    data: bytes
    members: tuple[str, ...] = ()
    receipts: tuple[int | None, ...] = ()
    episodes: tuple[int, ...] = ()

    def __post_init__(self) -> None:  # one copy of the names for all groups
        object.__setattr__(self, "columns", _NAMES.setdefault(self.columns, self.columns))
        object.__setattr__(self, "members", _NAMES.setdefault(self.members, self.members))
        if self._header[0] != _FORMAT:
            raise UsageError("a group was packed by another version of forge-env", fix="start a new run")

    def __reduce__(self) -> tuple[object, ...]:
        return PackedGroup, (self.task_id, self.columns, self.data, self.members, self.receipts, self.episodes)

    @property
    def _header(self) -> tuple[Any, ...]:
        return _HEADER.unpack_from(self.data)

    def _array(self, name: str) -> NDArray[Any]:
        kind, count, offset = _layout(*self._header[1:9])[name]
        return np.frombuffer(self.data, kind, count, offset)

    @property
    def record(self) -> GroupRecord:
        """All but the tokens."""
        table = self._array("table").reshape(-1, len(self.columns))
        return GroupRecord(self.task_id, self.columns, table, self.has_signal, self.members)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return int(self._header[5])

    @property
    def oldest_version(self) -> int:
        """Policy version of the oldest sampled token; -1: no token was sampled."""
        return int(self._header[9])

    @property
    def has_signal(self) -> bool:
        """Whether any token to be learned has an advantage that differs from 0."""
        return bool(self._header[10])

    @property
    def priority(self) -> float:
        """Mean over the episodes of the mean size of their tokens' advantages."""
        return float(self._header[11])

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors: what any form of it needs."""
        return len(self.data) - _HEADER.size

    def segments(self) -> list[Segment]:
        """The token sequences of all episodes, in order."""
        tokens, sampled = self._header[4:6]
        place = np.unpackbits(self._array("sampled"), count=tokens).astype(np.bool_)
        mask = place
        if self._header[6]:  # not all that was sampled is to be learned
            mask = np.unpackbits(self._array("learned"), count=tokens).astype(np.bool_)
        logprobs, advantages = np.zeros(tokens, np.float32), np.zeros(tokens, np.float32)
        versions = np.full(tokens, -1, np.int32)
        logprobs[place] = self._array("logprobs")
        versions[place] = _unpack_runs(self._array("versions"), sampled)
        advantages[place] = _unpack_runs(self._array("advantages"), sampled, np.float32)
        token_ids = self._array("token_ids")
        found, start = [], 0
        for length in self._array("segments").tolist():
            part = slice(start, start + length)
            start += length
            found.append(Segment(token_ids[part], mask[part], logprobs[part], versions[part], advantages[part]))
        for segment, receipt in zip(found, self.receipts, strict=False):
            segment.receipt = receipt
        for segment, episode in zip(found, self.episodes, strict=False):
            segment.episode = episode
        return found


def _layout(
    episodes: int, columns: int, segments: int, tokens: int, sampled: int, learned: int, versions: int, advantages: int
) -> dict[str, tuple[str, int, int]]:
    """Where every array lies: name -> `(type, count, offset)`."""
    parts = (
        ("table", "<f8", episodes * columns),
        ("segments", "<i4", segments),
        ("token_ids", "<i4", tokens),
        ("logprobs", "<f4", sampled),
        ("versions", "<i4", versions),
        ("advantages", "<i4", advantages),
        ("sampled", "u1", -(-tokens // 8)),
        ("learned", "u1", learned),
    )
    places, offset = {}, _HEADER.size
    for name, kind, count in parts:
        places[name] = (kind, count, offset)
        offset += count * np.dtype(kind).itemsize
    return places


def _pack_runs(values: NDArray[Any]) -> NDArray[np.int32]:
    """Values of 4 bytes as their runs, lengths and then values, or as they are where that is shorter."""
    plain: NDArray[np.int32] = values.view("<i4")
    found, lengths = runs(plain)
    return np.concatenate([lengths, found], dtype="<i4", casting="same_kind") if 2 * len(found) < len(plain) else plain


def _unpack_runs(packed: NDArray[np.int32], count: int, kind: Any = np.int32) -> NDArray[Any]:
    if len(packed) != count:
        lengths, values = packed.reshape(2, -1)
        packed = np.repeat(values, lengths)
    return packed.view(kind)


def pack(
    episodes: Sequence[Trajectory],
    advantages: Sequence[NDArray[np.float32]],
    masks: Sequence[NDArray[np.bool_]] | None = None,
) -> PackedGroup:
    """Pack the valid episodes of one task; their messages stay behind.

    Args:
        episodes: the episodes, [E].
        advantages: for each of them, one for every token it sampled, in the order of its turns, float32 [N].
        masks: likewise whether the token is to be learned, bool [N]; others are context. None: all are.

    Raises:
        UsageError: an episode has more or fewer advantages than sampled tokens, or the turns of its seats are mixed.
    """
    for episode, values in zip(episodes, advantages, strict=True):
        _check(episode, len(values))
    metrics = sorted({name for episode in episodes for name in episode.metrics})
    if masks is None:
        masks = [np.ones(len(values), np.bool_) for values in advantages]
    sizes = [np.abs(values[mask]) for values, mask in zip(advantages, masks, strict=True)]
    table = [
        [
            episode.reward,
            float(values.mean(dtype=np.float64)) if len(values) else 0.0,
            len(episode.turns),
            episode.num_sampled_tokens,
            episode.truncated,
            *(episode.metrics.get(name, 0.0) for name in metrics),
        ]
        for episode, values in zip(episodes, advantages, strict=True)
    ]
    by_episode = [episode.segments() for episode in episodes]
    segments = [segment for found in by_episode for segment in found]
    sampled = _joined([segment.mask for segment in segments], np.bool_)
    learned = sampled.copy()
    learned[sampled] = _joined(masks, np.bool_)
    versions = _pack_runs(_joined([segment.versions for segment in segments], "<i4")[sampled])
    packed_advantages = _pack_runs(_joined(advantages, "<f4"))
    learned_bits = np.packbits(learned) if (learned != sampled).any() else np.empty(0, np.uint8)
    arrays = (
        np.array(table, "<f8"),
        np.array([len(segment) for segment in segments], "<i4"),
        _joined([segment.token_ids for segment in segments], "<i4"),
        _joined([segment.logprobs for segment in segments], "<f4")[sampled],
        versions,
        packed_advantages,
        np.packbits(sampled),
        learned_bits,
    )
    columns = (*FIXED, *metrics)
    header = _HEADER.pack(
        _FORMAT,
        len(table),
        len(columns),
        len(segments),
        sampled.size,
        int(sampled.sum()),
        len(learned_bits),
        len(versions),
        len(packed_advantages),
        min((episode.oldest_version for episode in episodes if episode.num_sampled_tokens), default=-1),
        any((values > NO_ADVANTAGE).any() for values in sizes),
        sum(float(values.mean()) for values in sizes if len(values)) / max(len(sizes), 1),
    )
    task_id = episodes[0].task_id if episodes else ""
    members = tuple(map(_member, episodes))
    receipts = tuple(segment.receipt for segment in segments)
    numbers = tuple(number for number, found in enumerate(by_episode) for _ in found)
    data = header + b"".join(array.tobytes() for array in arrays)
    return PackedGroup(task_id, columns, data, members, receipts, numbers)


def _member(episode: Trajectory) -> str:
    _, slash, seat = episode.id.partition("/")  # `Trajectory.by_seat`
    return "" if episode.member is None else f"{episode.member}{slash}{seat}"


def _check(episode: Trajectory, advantages: int) -> None:
    seats = [seat for seat, _ in groupby(turn.seat for turn in episode.turns)]
    if len(seats) > len(set(seats)):
        raise UsageError(f"the turns of the seats of {episode.id!r} are mixed", fix="pack what Group.by_seat gives")
    if advantages != episode.num_sampled_tokens:
        raise UsageError(
            f"{advantages} advantages for {episode.num_sampled_tokens} sampled tokens of {episode.id!r}",
            fix="give one for each sampled token of an episode",
        )


def _joined(arrays: Sequence[NDArray[Any]], kind: Any) -> NDArray[Any]:
    return np.concatenate([np.empty(0, kind), *arrays], dtype=kind)
