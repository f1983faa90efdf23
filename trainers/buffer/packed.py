"""Storage format of a group in the buffer: the tensors of its episodes in one block of bytes, read without a copy.

Processes send each other this block. In memory a group takes a few hundred bytes more than its tensors; lists of
Python numbers would take seven times as much as the tensors.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from forge_env.errors import UsageError
from forge_env.trajectory import Segment, Trajectory, runs

FIXED = ("reward", "advantage", "turns", "tokens", "truncated", "cut_replies")
"""First columns of every group's table; the environment's metrics follow them."""
NO_ADVANTAGE = 1e-8
"""Absolute advantages up to this value count as 0."""
_NAMES: dict[tuple[str, ...], tuple[str, ...]] = {}
_FORMAT = 0x33_70_65_66
"""First value of every block; blocks written by older versions have another one."""
_HEADER = struct.Struct("<11qd")


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A group without its tokens: the data for a training step's metrics.

    Attributes:
        columns: names of the table's columns, `FIXED` first.
        table: one row per episode, one column for each of `columns`, [E, C].
        has_signal: whether any token to be learned has an advantage other than 0.
        members: number of each row's episode in the group, with its seat if it has one: "0", "3" or "3/white", [E].
        digest: hash of the tokens, log-probs, versions, advantages and masks.
        credit: the advantages and masks as text, with which `repack` rebuilds the group from its episodes.
    """

    task_id: str
    columns: tuple[str, ...]
    table: NDArray[np.float64]
    has_signal: bool
    members: tuple[str, ...] = ()
    digest: str = ""
    credit: str = ""

    def column(self, name: str) -> NDArray[np.float64]:
        """Values of a column of `FIXED`, one per episode, [E]."""
        return self.table[:, FIXED.index(name)]

    @property
    def metrics(self) -> dict[str, NDArray[np.float64]]:
        """The environment's metrics, one value per episode, [E]; 0 for episodes that lack the metric."""
        return {name: self.table[:, index] for index, name in enumerate(self.columns) if index >= len(FIXED)}


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """The valid episodes of one task, ready to train on.

    Attributes:
        data: header, table, segment lengths and token data, written by `pack`.
        members: as in `GroupRecord`.
        receipts: `Segment.receipt` of each segment.
        episodes: `Segment.episode` of each segment.
    """

    task_id: str
    columns: tuple[str, ...]
    data: bytes
    members: tuple[str, ...]
    receipts: tuple[int | None, ...]
    episodes: tuple[int, ...]

    def __post_init__(self) -> None:  # groups with equal names share one tuple
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
        """Summary of the group without its tokens."""
        table = self._array("table").reshape(-1, len(self.columns))
        return GroupRecord(self.task_id, self.columns, table, self.has_signal, self.members, self.digest, self._credit)

    @property
    def digest(self) -> str:
        """Hash of everything that is trained on: all arrays but the table."""
        start = _layout(*self._header[1:9])["segments"][2]
        return blake2b(self.data[start:], digest_size=8).hexdigest()

    @property
    def _credit(self) -> str:
        parts = (self._array("advantages"), self._array("learned"))
        return ",".join(base64.b64encode(zlib.compress(part.tobytes())).decode() if len(part) else "" for part in parts)

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return int(self._header[5])

    @property
    def oldest_version(self) -> int:
        """Policy version of the oldest sampled token; -1 if no token was sampled."""
        return int(self._header[9])

    @property
    def has_signal(self) -> bool:
        """Whether any token to be learned has an advantage other than 0."""
        return bool(self._header[10])

    @property
    def priority(self) -> float:
        """Mean over episodes of the mean absolute advantage of their tokens."""
        return float(self._header[11])

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors: the minimum in any storage format."""
        return len(self.data) - _HEADER.size

    def segments(self) -> list[Segment]:
        """The token sequences of all episodes, in order."""
        tokens, sampled = self._header[4:6]
        is_sampled = np.unpackbits(self._array("sampled"), count=tokens).astype(np.bool_)
        mask = is_sampled
        if self._header[6]:  # some sampled tokens are not to be learned
            mask = np.unpackbits(self._array("learned"), count=tokens).astype(np.bool_)
        logprobs, advantages = np.zeros(tokens, np.float32), np.zeros(tokens, np.float32)
        versions = np.full(tokens, -1, np.int32)
        logprobs[is_sampled] = self._array("logprobs")
        versions[is_sampled] = _unpack_runs(self._array("versions"), sampled)
        advantages[is_sampled] = _unpack_runs(self._array("advantages"), sampled, np.float32)
        token_ids = self._array("token_ids")
        segments, start = [], 0
        for length in self._array("segments").tolist():
            part = slice(start, start + length)
            start += length
            segments.append(Segment(token_ids[part], mask[part], logprobs[part], versions[part], advantages[part]))
        for segment, receipt, episode in zip(segments, self.receipts, self.episodes, strict=True):
            segment.receipt, segment.episode = receipt, episode
        return segments


def _layout(
    episodes: int, columns: int, segments: int, tokens: int, sampled: int, learned: int, versions: int, advantages: int
) -> dict[str, tuple[str, int, int]]:
    """Layout of the arrays in the block: name -> `(type, count, offset in bytes)`."""
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
    layout, offset = {}, _HEADER.size
    for name, kind, count in parts:
        layout[name] = (kind, count, offset)
        offset += count * np.dtype(kind).itemsize
    return layout


def _pack_runs(values: NDArray[Any]) -> NDArray[np.int32]:
    """Run-length encode 4-byte values as run lengths followed by run values; unchanged if that isn't shorter."""
    plain: NDArray[np.int32] = values.view("<i4")
    heads, lengths = runs(plain)
    return np.concatenate([lengths, heads], dtype="<i4", casting="same_kind") if 2 * len(heads) < len(plain) else plain


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
    """Pack the valid episodes of one task, without their messages.

    Args:
        advantages: for each episode the advantages of its N sampled tokens, in the order of its turns, float32 [N].
        masks: for each episode, which of its N sampled tokens are to be learned, bool [N]; the others are context.
            None: all.

    Raises:
        UsageError: an episode has more or fewer advantages than sampled tokens, or the turns of its seats are mixed.
    """
    for episode, values in zip(episodes, advantages, strict=True):
        _check(episode, len(values))
    metrics = sorted({name for episode in episodes for name in episode.metrics})
    if masks is None:
        masks = [np.ones(len(values), np.bool_) for values in advantages]
    sizes = [np.abs(values[mask]) for values, mask in zip(advantages, masks, strict=True)]
    table = [_row(episode, values, metrics) for episode, values in zip(episodes, advantages, strict=True)]
    by_episode = [episode.segments() for episode in episodes]
    segments = [segment for parts in by_episode for segment in parts]
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
    numbers = tuple(number for number, parts in enumerate(by_episode) for _ in parts)
    data = header + b"".join(array.tobytes() for array in arrays)
    return PackedGroup(task_id, columns, data, members, receipts, numbers)


def _row(episode: Trajectory, advantages: NDArray[np.float32], metrics: Sequence[str]) -> list[float]:
    """Row of a group's table: the columns of `FIXED`, then these metrics."""
    return [
        episode.reward,
        float(advantages.mean(dtype=np.float64)) if len(advantages) else 0.0,
        len(episode.turns),
        episode.num_sampled_tokens,
        episode.truncated,
        episode.cut_replies,
        *(episode.metrics.get(name, 0.0) for name in metrics),
    ]


def repack(episodes: Sequence[Trajectory], credit: str) -> PackedGroup:
    """Pack recorded episodes with recorded advantages and masks, as `pack` did.

    Args:
        episodes: the episodes in the order of `GroupRecord.members`.

    Raises:
        ValueError: the text doesn't fit the episodes' tokens.
    """
    counts = [episode.num_sampled_tokens for episode in episodes]
    advantages, learned = (_unzipped(part, 4 * sum(counts)) for part in credit.split(","))
    values = _unpack_runs(np.frombuffer(advantages, "<i4"), sum(counts), np.float32)
    if len(values) != sum(counts):
        raise ValueError(f"{len(values)} advantages for {sum(counts)} tokens")
    ends = np.cumsum(counts, dtype=np.int64)[:-1]
    masks = None
    if learned:
        sampled = _joined([part.mask for episode in episodes for part in episode.segments()], np.bool_)
        bits = np.unpackbits(np.frombuffer(learned, np.uint8), count=len(sampled)).astype(np.bool_)
        masks = np.split(bits[sampled], ends)
    return pack(episodes, np.split(values, ends), masks)


def _unzipped(text: str, largest: int) -> bytes:
    content = base64.b64decode(text, validate=True)
    return zlib.decompressobj().decompress(content, max(largest, 64)) if content else b""


def _member(episode: Trajectory) -> str:
    _, slash, seat = episode.id.partition("/")  # `Trajectory.by_seat` appends the seat
    return "" if episode.member is None else f"{episode.member}{slash}{seat}"


def _check(episode: Trajectory, advantages: int) -> None:
    seats = [seat for seat, _ in groupby(turn.seat for turn in episode.turns)]
    if len(seats) > len(set(seats)):
        raise UsageError(f"{episode.id!r} mixes turns of several seats", fix="pack the episodes of Group.by_seat")
    if advantages != episode.num_sampled_tokens:
        raise UsageError(
            f"{advantages} advantages for {episode.num_sampled_tokens} sampled tokens of {episode.id!r}",
            fix="give one for each sampled token of an episode",
        )


def _joined(arrays: Sequence[NDArray[Any]], kind: Any) -> NDArray[Any]:
    return np.concatenate([np.empty(0, kind), *arrays], dtype=kind)


# --- the buffer's file in a checkpoint; loading an untrusted one executes no code

FIELDS = ("task_id", "columns", "members", "receipts", "episodes")
"""Fields of a group besides its data."""


def save_buffer(state: dict[str, Any], file: Path) -> None:
    """Write a buffer's `state_dict` as a safetensors file: the groups' bytes, and everything else as JSON metadata."""
    blocks: dict[str, NDArray[np.uint8]] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, PackedGroup):
            name = str(len(blocks))
            blocks[name] = np.frombuffer(value.data, np.uint8)
            return {"group": name, **{each: getattr(value, each) for each in FIELDS}}
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    save_file(blocks, file, metadata={"state": json.dumps(plain(state))})


def load_buffer(file: Path) -> dict[str, Any]:
    """Read a file written by `save_buffer`. Step numbers, which are dictionary keys, are strings in the result."""

    def restore(value: Any) -> Any:
        if isinstance(value, dict) and "group" in value:
            data = blocks.get_tensor(value["group"]).tobytes()
            lists = {name: tuple(value[name]) for name in FIELDS[1:]}
            return PackedGroup(task_id=value["task_id"], data=data, **lists)
        if isinstance(value, dict):
            return {key: restore(item) for key, item in value.items()}
        return [restore(item) for item in value] if isinstance(value, list) else value

    try:
        with safe_open(file, framework="np") as blocks:
            state: dict[str, Any] = restore(json.loads(blocks.metadata()["state"]))
    except (SafetensorError, ValueError, KeyError, TypeError, struct.error) as error:  # depends on the missing part
        raise UsageError(
            f"{file} is damaged: {error}", fix="delete this checkpoint's folder to continue from the previous one"
        ) from error
    return state
