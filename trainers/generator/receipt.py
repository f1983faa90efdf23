"""What a generator signs for: a hash of the tokens it sampled, checked again where they are trained on.

The engine makes it of what it sampled, before anything else sees that. It travels beside the tokens, through reply,
episode and buffer, and the trainer makes it once more of what it is about to train on. A token's share depends on the
token, the one before it and its log-probability, so text that was tokenized again, shifted, or mixed with other
tokens has another sum. The shares of the tokens are added modulo 2**64: the receipt of a sequence is the sum of those
of its replies, wherever one ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_env.trajectory import Segment

_ODD, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
"""Of splitmix64 (Steele, Lea, Flood 2014)."""


def receipt(prompt_ids: NDArray[Any], token_ids: NDArray[Any], logprobs: NDArray[Any]) -> int:
    """Of a completion: `token_ids` [N] sampled after `prompt_ids` [P], with log-probabilities float32 [N]."""
    whole = np.concatenate([prompt_ids[-1:], token_ids])
    before = whole[:-1] if len(whole) > len(token_ids) else np.concatenate([whole[:1], whole[:-1]])
    return int(_shares(before, token_ids, logprobs).sum(dtype=np.uint64))


def _shares(before: NDArray[Any], tokens: NDArray[Any], logprobs: NDArray[Any]) -> NDArray[np.uint64]:
    """Of each token, [N]."""
    pairs = before.astype(np.uint32).astype(np.uint64)
    pairs <<= np.uint64(32)
    pairs |= tokens.astype(np.uint32)
    pairs *= _ODD
    pairs ^= pairs >> np.uint64(29)
    pairs += logprobs.astype(np.float32).view(np.uint32)
    pairs *= _MIX
    pairs ^= pairs >> np.uint64(32)
    return pairs


@dataclass(frozen=True, slots=True)
class Audit:
    """What was found of token sequences that are about to be trained on.

    Attributes:
        sequences: looked at.
        tokens: to be learned in them.
        altered: sequences whose tokens are not those that were sampled, or that would learn others.
        unsigned: sequences that no generator has signed for.
    """

    sequences: int
    tokens: int
    altered: int
    unsigned: int


def receipts_of(segments: Sequence[Segment]) -> list[int]:
    """Of all tokens of each sequence that have a policy version: those that were sampled."""
    lengths = [len(segment) for segment in segments]
    tokens, logprobs, versions = (
        np.concatenate([getattr(segment, name) for segment in segments])
        for name in ("token_ids", "logprobs", "versions")
    )
    starts = np.cumsum([0, *lengths[:-1]])
    before = np.roll(tokens, 1)
    before[starts] = tokens[starts]  # a first token has none before it
    shares = _shares(before, tokens, logprobs)
    shares[versions < 0] = 0
    totals = np.cumsum(np.concatenate([np.zeros(1, np.uint64), shares]), dtype=np.uint64)
    return [int(own) for own in totals[starts + lengths] - totals[starts]]


def audit(segments: Iterable[Segment]) -> Audit:
    """Compare sequences with their receipts."""
    found = list(segments)
    if not found:
        return Audit(0, 0, 0, 0)
    made = receipts_of(found)
    altered = sum(
        segment.receipt is not None and (own != segment.receipt or bool((segment.mask & (segment.versions < 0)).any()))
        for segment, own in zip(found, made, strict=True)
    )
    learned = sum(int(segment.mask.sum()) for segment in found)
    return Audit(len(found), learned, altered, sum(segment.receipt is None for segment in found))
