"""What a test may leave in shared memory: nothing."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 60.0


def shared_memory() -> set[str]:
    """What lies in shared memory and no living process has in use: other tests run beside this one.

    Semaphores are left out: they may be of this very process, whose libraries make some.
    """
    used: set[int] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # the process has ended meanwhile
            used.update(int(found) for found in re.findall(r" (\d+) +/dev/shm/", maps.read_text()))
    found = set()
    for path in Path("/dev/shm").iterdir():
        with suppress(FileNotFoundError):
            if path.stat().st_ino not in used and not path.name.startswith("sem."):
                found.add(path.name)
    return found


def assert_no_shared_memory(before: set[str]) -> None:
    """Nothing but what was there before. multiprocessing's tracker removes its segments last of all, untold."""
    deadline = time.monotonic() + PATIENCE_S
    while left := shared_memory() - before:
        assert time.monotonic() < deadline, f"left in shared memory: {left}"
        time.sleep(0.1)
