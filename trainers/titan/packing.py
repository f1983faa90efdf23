"""Who computes what: a batch over ranks by cost, a rank's share over microbatches by tokens.

Everything here goes by lengths alone, so that every rank knows its share before it has a single token.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass

Run = list[int]
"""Sequences, by their place among those that are planned."""

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


def longest_first(numbers: Sequence[int], lengths: Sequence[int]) -> Run:
    """Sorted by length, so that neighbours are alike and little is padding."""
    return sorted(numbers, key=lengths.__getitem__, reverse=True)


def chunks(ordered: Sequence[int], lengths: Sequence[int], budget: Budget) -> list[Run]:
    """Consecutive runs of `ordered`, longest first, as long as the budget allows."""
    result: list[Run] = []
    width = tokens = 0
    for number in ordered:
        length = lengths[number]
        if result and budget.size(len(result[-1]) + 1, max(width, length), tokens + length) <= budget.max_tokens:
            result[-1].append(number)
            width, tokens = max(width, length), tokens + length
        else:
            result.append([number])
            width = tokens = length
    return result


def even_chunks(ordered: Sequence[int], lengths: Sequence[int], budget: Budget, count: int) -> list[Run]:
    """Exactly `count` runs, the largest as small as it can be; some are empty where there are too few sequences.

    `count` must be at least what `chunks` needs.
    """
    low, high = 1, budget.max_tokens
    while low < high:  # the smallest limit that gives at most `count` runs
        middle = (low + high) // 2
        if len(chunks(ordered, lengths, Budget(middle, budget.packed))) <= count:
            high = middle
        else:
            low = middle + 1
    runs = chunks(ordered, lengths, Budget(low, budget.packed))
    return [*runs, *([] for _ in range(count - len(runs)))]


def shares(lengths: Sequence[int], ranks: int, quadratic: float) -> list[Run]:
    """A partition into `ranks` shares of nearly equal cost, `length + quadratic * length**2` a sequence.

    Longest processing time first (Graham 1969): two shares differ by no more than the cost of one sequence.
    """
    result: list[Run] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    for number in longest_first(range(len(lengths)), lengths):
        load, rank = heapq.heappop(loads)
        result[rank].append(number)
        heapq.heappush(loads, (load + cost(lengths[number], quadratic), rank))
    return result


def cost(length: int, quadratic: float) -> float:
    """Work of one sequence, in tokens' worth of linear layers."""
    return length + quadratic * length**2


def plan(
    lengths: Sequence[int], budget: Budget, *, ranks: int = 1, at_least: int = 1, quadratic: float = 0.0
) -> list[list[Run]]:
    """For each rank its microbatches; every rank has the same number of them, since each pass is a collective.

    A rank with fewer sequences than microbatches has empty ones. The plan depends on its arguments only, so ranks
    that know the lengths agree on it without a word.

    Args:
        at_least: microbatches a rank where there are enough sequences (for threads side by side).
    """
    by_rank = shares(lengths, ranks, quadratic)
    if at_least > 1:
        budget = Budget(min(budget.max_tokens, -(-sum(lengths) // (at_least * ranks))), budget.packed)
    if ranks == 1:
        return [chunks(by_rank[0], lengths, budget)]
    count = max(len(chunks(share, lengths, budget)) for share in by_rank)
    return [even_chunks(share, lengths, budget, count) for share in by_rank]


def split(count: int, parts: int, rng: random.Random) -> list[Run]:
    """A random partition of `count` sequences into `parts` minibatches of nearly equal size, none empty."""
    shuffled = list(range(count))
    rng.shuffle(shuffled)
    parts = min(parts, count)
    return [shuffled[part::parts] for part in range(parts)]
