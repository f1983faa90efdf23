"""Work distribution: a batch is split over ranks by cost, and a rank's share over microbatches by tokens.

All plans depend on sizes alone, so every rank knows its share before it has any tokens.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from trainers.buffer.sequences import MOST_COPIES

Run = list[int]
"""Indices of a microbatch's sequences among those that are planned."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths of N sequences, and how many first tokens each shares with the one before it.

    In a row, tokens that neighbours share are there once. Sequences in lexicographic order share most.
    """

    lengths: Sequence[int]
    shared: Sequence[int]

    @classmethod
    def alone(cls, lengths: Sequence[int]) -> Sizes:
        """Sizes of sequences that share nothing."""
        return cls(lengths, [0] * len(lengths))

    def common(self, before: int, number: int) -> int:
        """First tokens that a sequence shares with an earlier one: what two share, all between them share."""
        return min(self.shared[before + 1 : number + 1], default=0)

    def joins(self, run: Sequence[int]) -> list[int]:
        """First tokens that each sequence of an ascending run shares with the one before it in the run."""
        return [0, *itertools.starmap(self.common, itertools.pairwise(run))][: len(run)]

    def cost(self, number: int, joined: int, quadratic: float) -> float:
        """Cost of a sequence whose first `joined` tokens are computed already; see `cost`."""
        return cost(self.lengths[number], quadratic) - cost(joined, quadratic)

    def work(self, runs: Iterable[Sequence[int]]) -> tuple[int, int]:
        """Tokens that ascending runs compute, and the squared lengths, in sum, that attention is proportional to."""
        pairs = [
            (self.lengths[number], joined) for run in runs for number, joined in zip(run, self.joins(run), strict=True)
        ]
        return sum(length - joined for length, joined in pairs), sum(length**2 - joined**2 for length, joined in pairs)


def chunks(ordered: Sequence[int], sizes: Sizes, max_tokens: int) -> list[Run]:
    """Split ascending sequences into consecutive runs of at most `max_tokens`; a longer sequence is a run of its own.

    Shared tokens count once, and all sequences of a run have at most `MOST_COPIES` times `max_tokens`.
    """
    result: list[Run] = []
    tokens = keys = 0
    for number, joined in zip(ordered, sizes.joins(ordered), strict=True):
        length = sizes.lengths[number]
        size = tokens + length - joined
        if result and size <= max_tokens and keys + length <= MOST_COPIES * max_tokens:
            result[-1].append(number)
            tokens, keys = size, keys + length
        else:
            result.append([number])
            tokens = keys = length
    return result


def even_chunks(ordered: Sequence[int], sizes: Sizes, max_tokens: int, count: int) -> list[Run]:
    """Split `ordered` into exactly `count` runs, with the largest as small as possible.

    Some runs are empty if there are too few sequences. `count` must be at least the number of runs of `chunks`.
    """
    low, high = 1, max_tokens
    while low < high:  # search for the smallest limit with at most `count` runs
        middle = (low + high) // 2
        if len(chunks(ordered, sizes, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    runs = chunks(ordered, sizes, low)
    return [*runs, *([] for _ in range(count - len(runs)))]


def families(sizes: Sizes, most: float, quadratic: float) -> list[Run]:
    """Divide sequences into runs that should stay together: each shares half of its tokens with the one before it.

    A run costs at most `most`, unless it is a single sequence.
    """
    result: list[Run] = []
    load = 0.0
    for number, (length, joined) in enumerate(zip(sizes.lengths, sizes.shared, strict=True)):
        more = sizes.cost(number, joined, quadratic)
        if result and 2 * joined >= length and load + more <= most:
            result[-1].append(number)
            load += more
        else:
            result.append([number])
            load = sizes.cost(number, 0, quadratic)
    return result


def shares(sizes: Sizes, ranks: int, quadratic: float) -> list[Run]:
    """Split sequences into `ranks` shares of nearly equal cost, `length + quadratic * length**2` per sequence.

    Longest processing time first (Graham 1969), over families of at most a quarter of a share, by which shares differ.
    """
    if ranks == 1:
        return [list(range(len(sizes.lengths)))]
    whole = sum(sizes.cost(number, joined, quadratic) for number, joined in enumerate(sizes.shared))
    costs = [
        (sum(sizes.cost(number, joined, quadratic) for number, joined in zip(run, sizes.joins(run), strict=True)), run)
        for run in families(sizes, whole / (4 * ranks), quadratic)
    ]
    result: list[Run] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    for more, run in sorted(costs, key=itemgetter(0), reverse=True):
        load, rank = heapq.heappop(loads)
        result[rank] += run
        heapq.heappush(loads, (load + more, rank))
    return result


def cost(length: int, quadratic: float) -> float:
    """Cost of one sequence, in units of the linear layers' cost of a token."""
    return length + quadratic * length**2


def plan(
    sizes: Sizes, max_tokens: int, *, ranks: int = 1, at_least: int = 1, quadratic: float = 0.0
) -> list[list[Run]]:
    """Plan the microbatches of each rank; every rank has the same number, since each pass is a collective.

    A rank with fewer sequences than microbatches has empty ones. If `at_least`, the number of parallel threads, is more
    than 1, the number of microbatches is a multiple of it, given enough sequences, and they are of similar size.
    """
    by_rank = [sorted(share) for share in shares(sizes, ranks, quadratic)]
    if ranks == at_least == 1:
        return [chunks(by_rank[0], sizes, max_tokens)]
    count = max(len(chunks(share, sizes, max_tokens)) for share in by_rank)
    planned = [even_chunks(share, sizes, max_tokens, -(-count // at_least) * at_least) for share in by_rank]
    return [[run for run in runs if run] for runs in planned] if ranks == 1 else planned


def split(count: int, parts: int, rng: random.Random) -> list[Run]:
    """Split `count` sequences randomly into `parts` minibatches of nearly equal size, none empty."""
    shuffled = list(range(count))
    rng.shuffle(shuffled)
    parts = min(parts, count)
    return [shuffled[part::parts] for part in range(parts)]
