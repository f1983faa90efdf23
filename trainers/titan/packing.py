"""Work distribution: a batch is split over ranks by cost, and a rank's share over microbatches by tokens.

All plans depend on lengths alone, so every rank knows its share before it has any tokens.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass

Run = list[int]
"""Indices of a microbatch's sequences among those that are planned."""

ATTENTION_GRID = 2
"""For attention, packed sequences get a padded row each. This grid may have at most this many times the tokens allowed
in a microbatch."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Size limit of one forward-backward pass.

    Attributes:
        max_tokens: maximum tokens in a microbatch, padding included; a longer sequence gets a microbatch of its own.
        packed: whether sequences share a row; otherwise each has a row, padded to the longest.
    """

    max_tokens: int
    packed: bool

    def size(self, rows: int, width: int, tokens: int) -> int:
        """Tokens of the budget that `rows` sequences of at most `width` tokens, `tokens` in total, use."""
        return max(tokens, -(-rows * width // ATTENTION_GRID)) if self.packed else rows * width


def longest_first(numbers: Sequence[int], lengths: Sequence[int]) -> Run:
    """Sort by length, longest first, so that neighbours have similar lengths and little padding."""
    return sorted(numbers, key=lengths.__getitem__, reverse=True)


def chunks(ordered: Sequence[int], lengths: Sequence[int], budget: Budget) -> list[Run]:
    """Split `ordered`, longest first, into consecutive runs that fit the budget."""
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
    """Split `ordered` into exactly `count` runs, with the largest as small as possible.

    Some runs are empty if there are too few sequences. `count` must be at least the number of runs of `chunks`.
    """
    low, high = 1, budget.max_tokens
    while low < high:  # search for the smallest limit with at most `count` runs
        middle = (low + high) // 2
        if len(chunks(ordered, lengths, Budget(middle, budget.packed))) <= count:
            high = middle
        else:
            low = middle + 1
    runs = chunks(ordered, lengths, Budget(low, budget.packed))
    return [*runs, *([] for _ in range(count - len(runs)))]


def shares(lengths: Sequence[int], ranks: int, quadratic: float) -> list[Run]:
    """Split sequences into `ranks` shares of nearly equal cost, `length + quadratic * length**2` per sequence.

    Longest processing time first (Graham 1969): two shares differ by at most the cost of one sequence.
    """
    result: list[Run] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    for number in longest_first(range(len(lengths)), lengths):
        load, rank = heapq.heappop(loads)
        result[rank].append(number)
        heapq.heappush(loads, (load + cost(lengths[number], quadratic), rank))
    return result


def cost(length: int, quadratic: float) -> float:
    """Cost of one sequence, in units of the linear layers' cost of a token."""
    return length + quadratic * length**2


def plan(
    lengths: Sequence[int], budget: Budget, *, ranks: int = 1, at_least: int = 1, quadratic: float = 0.0
) -> list[list[Run]]:
    """Plan the microbatches of each rank; every rank has the same number, since each pass is a collective.

    A rank with fewer sequences than microbatches has empty ones. The plan depends on its arguments only, so ranks that
    know the lengths agree on it without communication.

    Args:
        at_least: minimum number of microbatches per rank, if there are enough sequences (for parallel threads).
    """
    by_rank = shares(lengths, ranks, quadratic)
    if at_least > 1:
        budget = Budget(min(budget.max_tokens, -(-sum(lengths) // (at_least * ranks))), budget.packed)
    if ranks == 1:
        return [chunks(by_rank[0], lengths, budget)]
    count = max(len(chunks(share, lengths, budget)) for share in by_rank)
    return [even_chunks(share, lengths, budget, count) for share in by_rank]


def split(count: int, parts: int, rng: random.Random) -> list[Run]:
    """Split `count` sequences randomly into `parts` minibatches of nearly equal size, none empty."""
    shuffled = list(range(count))
    rng.shuffle(shuffled)
    parts = min(parts, count)
    return [shuffled[part::parts] for part in range(parts)]
