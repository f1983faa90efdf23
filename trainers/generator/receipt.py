"""Receipts: hashes of sampled tokens, with which the trainer verifies that batch tokens equal sampled tokens.

The engine computes a receipt from the tokens it sampled, before other code sees them. It accompanies the tokens through
reply, episode and buffer, and the trainer computes it again from the tokens it is about to train on. Each token
contributes a hash of itself, the token before it and its log-probability, so text that was tokenized again, shifted, or
mixed with other tokens gives another sum. Contributions are added modulo 2**64, so the receipt of a sequence is the sum
of its replies' receipts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_env.trajectory import Segment

_ODD, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
"""Constants of splitmix64 (Steele, Lea, Flood 2014)."""


def receipt(prompt_ids: NDArray[Any], token_ids: NDArray[Any], logprobs: NDArray[Any]) -> int:
    """Receipt of a completion: `token_ids` [N] sampled after `prompt_ids` [P], with `logprobs` float32 [N]."""
    whole = np.concatenate([prompt_ids[-1:], token_ids])
    before = whole[:-1] if len(whole) > len(token_ids) else np.concatenate([whole[:1], whole[:-1]])
    return int(_shares(before, token_ids, logprobs).sum(dtype=np.uint64))


def _shares(before: NDArray[Any], tokens: NDArray[Any], logprobs: NDArray[Any]) -> NDArray[np.uint64]:
    """Each token's contribution to a receipt, [N]."""
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
    """Numbers of sequences of a training batch that were compared with their receipts, and of their learned tokens.

    In `altered` ones the tokens are not the sampled ones, or tokens that were not sampled contribute to the loss;
    `unsigned` ones have no receipt.
    """

    sequences: int
    tokens: int
    altered: int
    unsigned: int


def receipts_of(segments: Sequence[Segment]) -> list[int]:
    """Compute the receipt of each sequence from its sampled tokens, which are those with a policy version."""
    lengths = [len(segment) for segment in segments]
    tokens, logprobs, versions = (
        np.concatenate([getattr(segment, name) for segment in segments])
        for name in ("token_ids", "logprobs", "versions")
    )
    starts = np.cumsum([0, *lengths[:-1]])
    before = np.roll(tokens, 1)
    before[starts] = tokens[starts]  # no token precedes the first one
    shares = _shares(before, tokens, logprobs)
    shares[versions < 0] = 0
    totals = np.cumsum(np.concatenate([np.zeros(1, np.uint64), shares]), dtype=np.uint64)
    return [int(total) for total in totals[starts + lengths] - totals[starts]]


def audit(segments: Iterable[Segment]) -> Audit:
    """Compare sequences with their receipts."""
    batch = list(segments)
    if not batch:
        return Audit(0, 0, 0, 0)
    receipts = receipts_of(batch)
    altered = sum(
        segment.receipt is not None and (now != segment.receipt or bool((segment.mask & (segment.versions < 0)).any()))
        for segment, now in zip(batch, receipts, strict=True)
    )
    learned = sum(int(segment.mask.sum()) for segment in batch)
    return Audit(len(batch), learned, altered, sum(segment.receipt is None for segment in batch))
