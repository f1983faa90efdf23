"""Who computes what: a batch over ranks by cost, a rank's share over microbatches by tokens."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass

from trainers.titan.batch import TokenSequence

ATTENTION_GRID = 2
"""Packed sequences get a row each in attention, padded to the longest: at most this many times the tokens allowed."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What fits into one forward-backward pass.

    Attributes:
        max_tokens: tokens in a microbatch, padding included; one longer sequence alone may exceed it.
        packed: sequences share a row; otherwise each has one, padded to the longest.
    """

    max_tokens: int
    packed: bool

    def size(self, rows: int, width: int, tokens: int) -> int:
        """Tokens' worth of room that `rows` sequences of at most `width` tokens, `tokens` together, take up."""
        return max(tokens, -(-rows * width // ATTENTION_GRID)) if self.packed else rows * width


def longest_first(sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
    """Sorted by length, so that neighbours are alike and little is padding."""
    return sorted(sequences, key=lambda sequence: len(sequence.token_ids), reverse=True)


def chunks(ordered: Sequence[TokenSequence], budget: Budget) -> list[list[TokenSequence]]:
    """Consecutive runs of `ordered`, longest first, as long as the budget allows."""
    result: list[list[TokenSequence]] = []
    width = tokens = 0
    for sequence in ordered:
        length = len(sequence.token_ids)
        if result and budget.size(len(result[-1]) + 1, max(width, length), tokens + length) <= budget.max_tokens:
            result[-1].append(sequence)
            width, tokens = max(width, length), tokens + length
        else:
            result.append([sequence])
            width = tokens = length
    return result


def even_chunks(ordered: Sequence[TokenSequence], budget: Budget, count: int) -> list[list[TokenSequence]]:
    """Exactly `count` runs, the largest as small as it can be; some are empty where there are too few sequences.

    `count` must be at least what `chunks` needs.
    """
    low, high = 1, budget.max_tokens
    while low < high:  # the smallest limit that gives at most `count` runs
        middle = (low + high) // 2
        if len(chunks(ordered, Budget(middle, budget.packed))) <= count:
            high = middle
        else:
            low = middle + 1
    runs = chunks(ordered, Budget(low, budget.packed))
    return [*runs, *([] for _ in range(count - len(runs)))]


def shares(sequences: Sequence[TokenSequence], ranks: int, quadratic: float) -> list[list[TokenSequence]]:
    """A partition into `ranks` shares of nearly equal cost, `length + quadratic * length**2` a sequence.

    Longest processing time first (Graham 1969): two shares differ by no more than the cost of one sequence.
    """
    result: list[list[TokenSequence]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    for sequence in longest_first(sequences):
        load, rank = heapq.heappop(loads)
        result[rank].append(sequence)
        heapq.heappush(loads, (load + cost(len(sequence.token_ids), quadratic), rank))
    return result


def cost(length: int, quadratic: float) -> float:
    """Work of one sequence, in tokens' worth of linear layers."""
    return length + quadratic * length**2


def plan(
    sequences: Sequence[TokenSequence], budget: Budget, *, ranks: int = 1, at_least: int = 1, quadratic: float = 0.0
) -> list[list[list[TokenSequence]]]:
    """For each rank its microbatches; every rank has the same number of them, since each pass is a collective.

    A rank with fewer sequences than microbatches has empty ones. The plan depends on its arguments only, so ranks
    that know the batch agree on it without a word.

    Args:
        at_least: microbatches a rank where there are enough sequences (for threads side by side).
    """
    ordered = [longest_first(share) for share in shares(sequences, ranks, quadratic)]
    if at_least > 1:
        total = sum(len(sequence.token_ids) for sequence in sequences)
        budget = Budget(min(budget.max_tokens, -(-total // (at_least * ranks))), budget.packed)
    if ranks == 1:
        return [chunks(ordered[0], budget)]
    count = max(len(chunks(share, budget)) for share in ordered)
    return [even_chunks(share, budget, count) for share in ordered]


def split(sequences: Sequence[TokenSequence], parts: int, rng: random.Random) -> list[list[TokenSequence]]:
    """A random partition into `parts` minibatches of nearly equal size, none empty."""
    shuffled = list(sequences)
    rng.shuffle(shuffled)
    parts = min(parts, len(shuffled))
    return [shuffled[part::parts] for part in range(parts)]
