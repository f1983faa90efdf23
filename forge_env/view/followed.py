"""Files to which lines are appended, read as they grow."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from forge_env.files import NewLines


class Followed(ABC):
    """The content of a file to which lines are appended, read as it grows.

    Args:
        path: the file.
        limits: those of `NewLines`.
    """

    def __init__(self, path: Path, **limits: int) -> None:
        self.size = 0
        """Bytes read so far. Their parsed content takes about ten times as much memory."""
        self._lines = NewLines(path, **limits)
        self._lock = threading.Lock()

    def update(self) -> None:
        """Read new lines."""
        with self._lock:
            self._take(self._counted(self._lines.read(self._restart)))

    def _counted(self, lines: Iterator[bytes]) -> Iterator[bytes]:
        for line in lines:
            self.size += len(line)
            yield line

    def _restart(self) -> None:
        self.size = 0
        self._begin_again()

    @abstractmethod
    def _take(self, lines: Iterator[bytes]) -> None: ...

    @abstractmethod
    def _begin_again(self) -> None: ...
