"""Segments of a batch for the trainer's processes: sizes of all segments, and selection of those of one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from forge_env.trajectory import Segment
from trainers.buffer.packed import NO_ADVANTAGE


def targets(segment: Segment) -> NDArray[np.intp]:
    """Positions of the tokens to be learned; the first token has no prediction and is never among them."""
    return np.flatnonzero(segment.mask[1:]) + 1


def at_targets(segment: Segment, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scatter the values of the tokens to be learned, in order, to their positions; 0 elsewhere, [T]."""
    whole = np.zeros(len(segment.token_ids), np.float32)
    whole[targets(segment)] = values
    return whole


LEAST_SHARED = 16
"""Shorter common beginnings of two sequences, such as the first tokens of a chat format, are not worth sharing."""
MOST_COPIES = 8
"""Maximum tokens of the sequences of a pass relative to its token limit: attention copies keys and values of shared
tokens for each sequence, which takes memory."""


def in_order(segments: Sequence[Segment]) -> list[int]:
    """Numbers of the segments in lexicographic order of their tokens: those that begin alike are neighbours."""
    keys = [segment.token_ids.astype(">u4").tobytes() for segment in segments]
    return sorted(range(len(segments)), key=keys.__getitem__)


def shared_with_previous(segments: Sequence[Segment]) -> NDArray[np.int64]:
    """Number of first tokens that each segment shares with the one before it, [N]; 0 if below `LEAST_SHARED`."""
    shared = np.zeros(len(segments), np.int64)
    for number, (before, segment) in enumerate(itertools.pairwise(segments), 1):
        length = min(len(before.token_ids), len(segment.token_ids))
        differs = before.token_ids[:length] != segment.token_ids[:length]
        shared[number] = differs.argmax() if differs.any() else length
    return np.where(shared < LEAST_SHARED, 0, shared)


Computed = Literal["all", "sequences", "segments"]
"""Segments of a batch that a trainer computes: `all`; those of `sequences` with an advantage at some token; only
`segments` with an advantage at some token."""


def in_batch(groups: Iterable[list[Segment]]) -> list[Segment]:
    """The segments of all groups of a batch, with episodes renumbered to be unique in the batch."""
    batch: list[Segment] = []
    for segments in groups:
        first = len(batch)  # a group has no more episodes than segments
        for segment in segments:
            if segment.episode is not None:
                segment.episode += first
        batch += segments
    return batch


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Sizes of the segments of a batch: all that ranks need to agree on who computes what.

    A segment is one row of tokens. A sequence, for losses, is an episode: one segment, or several if the episode forked
    or has several conversations.

    Attributes:
        numbers: positions in the batch of the N segments that are computed, in the order of `in_order`, [N].
        lengths: their tokens, [N].
        shared: number of first tokens that each has in common with the one before it (`shared_with_previous`), [N].
        targets: their tokens to be learned, [N].
        sequences: number of each segment's sequence, from 0, unique in the batch, [N].
        sequence_targets: tokens to be learned in each segment's whole sequence, [N].
        total_tokens: tokens to be learned in the admitted batch, including segments that aren't computed.
        total_sequences: sequences likewise.
        total_segments: segments of the batch, including those that are not finite.
        not_finite: segments with a log-probability that is not finite, which are left out of the totals.
    """

    numbers: NDArray[np.int64]
    lengths: NDArray[np.int64]
    shared: NDArray[np.int64]
    targets: NDArray[np.int64]
    sequences: NDArray[np.int64]
    sequence_targets: NDArray[np.int64]
    total_tokens: int
    total_sequences: int
    total_segments: int
    not_finite: int = 0

    @classmethod
    def of(cls, segments: Sequence[Segment], computed: Computed = "all") -> Self:
        """Sizes of a batch, with the segments that `computed` selects."""
        finite = np.array([bool(np.isfinite(segment.logprobs).all()) for segment in segments], np.bool_)
        learned = np.array([len(targets(segment)) for segment in segments], np.int64)
        lengths = np.array([len(segment.token_ids) for segment in segments], np.int64)
        sequences = _sequences(segments, finite)
        of_sequence = np.bincount(sequences[finite], learned[finite]).astype(np.int64)
        chosen = finite
        if computed != "all":
            chosen = finite & np.array([_has_advantage(segment) for segment in segments], np.bool_)
        if computed == "sequences":
            chosen = finite & np.isin(sequences, sequences[chosen])
        numbers = np.flatnonzero(chosen)
        numbers = numbers[in_order([segments[number] for number in numbers.tolist()])]
        return cls(
            numbers,
            lengths[numbers],
            shared_with_previous([segments[number] for number in numbers.tolist()]),
            learned[numbers],
            sequences[numbers],
            of_sequence[sequences[numbers]],
            int(learned[finite].sum()),
            len(of_sequence),
            len(segments),
            int((~finite).sum()),
        )

    def shared_among(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """`shared` of some of the segments among themselves; `places` are their ascending indices in `numbers`."""
        if not len(places):
            return self.shared[places]
        shared = np.zeros(len(places), np.int64)  # what two share, all between them share
        shared[1:] = np.minimum.reduceat(self.shared[: places[-1] + 1], places[:-1] + 1)
        return shared

    def pick(self, segments: Sequence[Segment]) -> list[Segment]:
        """The segments of the whole batch that are computed, [N]."""
        return [segments[number] for number in self.numbers.tolist()]


def _has_advantage(segment: Segment) -> bool:
    return bool((np.abs(segment.advantages[targets(segment)]) > NO_ADVANTAGE).any())


def _sequences(segments: Sequence[Segment], finite: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Number of each segment's sequence; sequences with finite segments come first."""
    numbers: dict[tuple[str, int], int] = {}
    keys = [
        ("alone", at) if segment.episode is None else ("episode", segment.episode)
        for at, segment in enumerate(segments)
    ]
    for at in [*np.flatnonzero(finite).tolist(), *np.flatnonzero(~finite).tolist()]:
        numbers.setdefault(keys[at], len(numbers))
    return np.array([numbers[key] for key in keys], np.int64)
