"""Priority queues of groups, one per policy version of their oldest token, in the order of a sampling rule."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Generic

from trainers.buffer.types import G, Held

# sort key of the sampling rule, sequence number of the admission, group
Entry = tuple[float, int, Held[G]]


class Pool(Generic[G]):
    """One heap per version, so that old groups are reached without looking at the others.

    With V versions, n groups in the pool and P groups picked, `pick` takes O(V + P log n). V is at most the staleness
    bound plus one.
    """

    def __init__(self) -> None:
        self._heaps: dict[int, list[Entry[G]]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Held[G]]:
        return (held for heap in self._heaps.values() for _, _, held in heap)

    def entries(self) -> Iterator[tuple[float, Held[G]]]:
        """Sort keys and groups by version, key and order of admission: equal for pools with equal contents."""
        for version in sorted(self._heaps):
            yield from ((key, held) for key, _, held in sorted(self._heaps[version], key=_place))

    def count(self, version: int) -> int:
        """Number of groups of that version."""
        return len(self._heaps.get(version, ()))

    def put(self, key: float, held: Held[G]) -> None:
        """Add a group; the smallest key is picked first."""
        heapq.heappush(self._heaps.setdefault(held.version, []), (key, held.index, held))
        self._size += 1

    def pick(self, size: int, quotas: Sequence[tuple[int, int]] = ()) -> list[Held[G]]:
        """Remove and return the first `size` groups in the order of the rule, subject to the quotas.

        Args:
            size: number of groups; the pool must have at least as many.
            quotas: `(version, count)` by ascending version: at least `count` of the groups must have that version or
                an older one. The pool must be able to satisfy them.
        """
        heads: list[tuple[float, int, int]] = []
        picked: list[Held[G]] = []
        waiting = sorted(self._heaps, reverse=True)
        for version, count in quotas:
            if len(picked) == size:
                return picked
            while waiting and waiting[-1] <= version:
                self._expose(heads, waiting.pop())
            while len(picked) < count:
                picked.append(self._next(heads))
        if len(picked) < size:
            heads += [(*self._heaps[version][0][:2], version) for version in waiting]
            heapq.heapify(heads)
            while len(picked) < size:
                picked.append(self._next(heads))
        return picked

    def _expose(self, heads: list[tuple[float, int, int]], version: int) -> None:
        key, index, _ = self._heaps[version][0]
        heapq.heappush(heads, (key, index, version))

    def _next(self, heads: list[tuple[float, int, int]]) -> Held[G]:
        version = heapq.heappop(heads)[2]
        heap = self._heaps[version]
        held = heapq.heappop(heap)[2]
        if heap:
            self._expose(heads, version)
        else:
            del self._heaps[version]
        self._size -= 1
        return held

    def drop_last(self, version: int, count: int) -> list[Held[G]]:
        """Remove and return the `count` groups of `version` that would be picked last."""
        ordered = sorted(self._heaps.pop(version, ()), key=_place)
        rest = ordered[: max(0, len(ordered) - count)]
        if rest:
            self._heaps[version] = rest  # sorted, hence a heap
        self._size -= len(ordered) - len(rest)
        return [held for _, _, held in ordered[len(rest) :]]

    def drop_before(self, version: int) -> int:
        """Remove all groups older than `version`; returns their number."""
        old = [each for each in self._heaps if each < version]
        dropped = sum(len(self._heaps.pop(each)) for each in old)
        self._size -= dropped
        return dropped

    def drop(self, unwanted: set[int]) -> None:
        """Remove the groups with these indices."""
        entries = [(key, held) for key, held in self.entries() if held.index not in unwanted]
        self.clear()
        for key, held in entries:
            self.put(key, held)

    def clear(self) -> None:
        """Remove everything."""
        self._heaps.clear()
        self._size = 0


def _place(entry: Entry[G]) -> tuple[float, int]:
    return entry[:2]
