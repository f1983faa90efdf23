"""Trajectories on disk: JSON lines, appended one whole record at a time.

A process killed while writing leaves at most one incomplete last line: readers skip it, and the next writer
cuts it off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from forge_env.errors import UsageError
from forge_env.trajectory import Trajectory


class TrajectoryWriter:
    """Appends trajectories to a file; every record is handed to the operating system as it is written."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab+")
        self._file.truncate(end_of_last_record(self._file.fileno()))

    def write(self, trajectory: Trajectory) -> None:
        """Append one record. Raises `OSError` when the disk is full."""
        self._file.write(json.dumps(trajectory.to_dict(), separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_trajectories(
    path: str | Path,
    *,
    on_damage: Callable[[str], object] | None = None,
    check: Callable[[Trajectory], object] = lambda trajectory: None,
) -> Iterator[Trajectory]:
    """The complete records of a file, in order; an incomplete last line is left out.

    Args:
        path: of the file.
        on_damage: is told of a line in the middle that is no trajectory, which is then left out.
        check: raises such an error as `from_dict` does for a trajectory that is none the reader can use.

    Raises:
        UsageError: there is such a line, and nobody to tell.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                trajectory = Trajectory.from_dict(json.loads(line))
                check(trajectory)
            except (ValueError, TypeError, KeyError, AttributeError) as error:  # by whatever is wrong with its shape
                damage = f"{path}, line {number} is no trajectory: {' '.join(str(error).split())[:200]}"
                if on_damage is None:
                    raise UsageError(damage, fix="delete that line") from error
                on_damage(damage)
                continue
            yield trajectory


def end_of_last_record(descriptor: int) -> int:
    """Offset just behind the last line feed, searched from the end."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - 65_536)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
