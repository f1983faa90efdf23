"""What a test may leave in shared memory: nothing."""

from __future__ import annotations

import time

from benchmarks.chaos.runs import left_in_shared_memory, shared_memory

__all__ = ["assert_no_shared_memory", "shared_memory"]

PATIENCE_S = 60.0


def assert_no_shared_memory(before: set[str]) -> None:
    """Nothing but what was there before. multiprocessing's tracker removes its segments last of all, untold."""
    deadline = time.monotonic() + PATIENCE_S
    while left := left_in_shared_memory(before):
        assert time.monotonic() < deadline, f"left in shared memory: {left}"
        time.sleep(0.1)
