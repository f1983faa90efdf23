"""The token sequences of a batch as the trainer's processes see them: how large each is, then those one computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from forge_env.trajectory import Segment
from trainers.buffer.packed import NO_ADVANTAGE


def targets(segment: Segment) -> NDArray[np.intp]:
    """Positions of the tokens to be learned; the first token has no prediction and is never among them."""
    return np.flatnonzero(segment.mask[1:]) + 1


def at_targets(segment: Segment, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Values of the tokens to be learned, in order, at their positions, and 0 elsewhere, [T]."""
    whole = np.zeros(len(segment.token_ids), np.float32)
    whole[targets(segment)] = values
    return whole


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """How large the sequences of a batch are: all that is needed to say who computes what.

    Attributes:
        numbers: places in the batch of the N sequences that are computed, [N].
        lengths: their tokens, [N].
        targets: their tokens to be learned, [N].
        total_tokens: tokens to be learned of the batch as admitted, those of sequences without signal included.
        total_sequences: sequences likewise.
        not_finite: sequences that are left out of all this, since a log-probability of theirs is not finite.
    """

    numbers: NDArray[np.int64]
    lengths: NDArray[np.int64]
    targets: NDArray[np.int64]
    total_tokens: int
    total_sequences: int
    not_finite: int = 0

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Self:
        """A batch of which everything is computed."""
        return cls._of(segments, np.ones(len(segments), np.bool_))

    @classmethod
    def with_signal(cls, segments: Sequence[Segment]) -> Self:
        """A batch of which only sequences with an advantage are computed: the gradient of the others is 0."""
        found = [bool((np.abs(segment.advantages[targets(segment)]) > NO_ADVANTAGE).any()) for segment in segments]
        return cls._of(segments, np.array(found, np.bool_))

    def pick(self, segments: Sequence[Segment]) -> list[Segment]:
        """Those of the whole batch that are computed, [N]."""
        return [segments[number] for number in self.numbers.tolist()]

    @classmethod
    def _of(cls, segments: Sequence[Segment], computed: NDArray[np.bool_]) -> Self:
        finite = np.array([bool(np.isfinite(segment.logprobs).all()) for segment in segments], np.bool_)
        learned = np.array([len(targets(segment)) for segment in segments], np.int64)
        lengths = np.array([len(segment.token_ids) for segment in segments], np.int64)
        numbers = np.flatnonzero(finite & computed)
        total, count = int(learned[finite].sum()), int(finite.sum())
        return cls(numbers, lengths[numbers], learned[numbers], total, count, len(segments) - count)
