"""A bound on the memory of the pages: what was read from files is dropped again, the least recently used first.

A folder may have any number of runs, each with files near the limits of `forge_env.reading`, which take ten times their
size in memory once they are parsed.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path

from forge_env.files import NewLines
from forge_env.reading import LARGEST_TABLE

SMALLEST = 1 << 14
"""Bytes that a file counts as at least."""


class Memory:
    """Contents of files in memory.

    Args:
        largest: maximum bytes of the files together. The latest one may be larger: it is the only one then.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._used: OrderedDict[Hashable, tuple[float, Callable[[], object]]] = OrderedDict()
        self._lock = threading.Lock()

    def use(self, key: Hashable, path: Path, drop: Callable[[], object], *, most: float = math.inf) -> None:
        """Record that a file's content is used, and drop that of others beyond the limit. Call it before reading.

        Args:
            most: maximum bytes that the content counts as.
            drop: removes the content from memory. It is called without the lock, perhaps in another thread.
        """
        try:
            size = max(SMALLEST, min(path.stat().st_size, most))
        except OSError:
            return
        dropped = []
        with self._lock:
            self._used[key] = (size, drop)
            self._used.move_to_end(key)
            total = sum(used for used, _ in self._used.values())
            while total > self._largest and len(self._used) > 1:
                _, (used, forget) = self._used.popitem(last=False)
                total -= used
                dropped.append(forget)
        for forget in dropped:
            forget()


TABLES = Memory(2 * LARGEST_TABLE)
"""Metrics, trained groups, timelines and vocabularies of all runs."""


class Followed(ABC):
    """The content of a file to which lines are appended, read as it grows; dropped for others, and read again.

    Args:
        path: the file.
        most: maximum bytes that the content counts as.
        limits: those of `NewLines`.
    """

    def __init__(self, path: Path, *, most: float = math.inf, **limits: int) -> None:
        self._lines = NewLines(path, **limits)
        self._most = most
        self._lock = threading.Lock()

    def update(self) -> None:
        """Read new lines."""
        TABLES.use(self, self._lines.path, self._drop, most=self._most)
        with self._lock:
            self._take(self._lines.read(self._begin_again))

    def _drop(self) -> None:
        with self._lock:
            self._lines.forget()
            self._begin_again()

    @abstractmethod
    def _take(self, lines: Iterator[bytes]) -> None: ...

    @abstractmethod
    def _begin_again(self) -> None: ...
