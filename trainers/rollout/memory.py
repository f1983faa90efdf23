"""Memory near its end: new episodes wait before the kernel kills."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from forge_env import machine
from forge_env.run import Run

LOOK_S = 1.0
"""Between two looks while episodes wait."""


class MemoryGate:
    """Lets episodes begin while `watchdog.free_memory_gb` of this machine's memory, or of its control group's, is free.

    Those under way go on: their end is what frees memory. Where nothing does, nothing moves, and the watchdog ends the
    run with what `diagnose` says.
    """

    def __init__(self, run: Run, free_gb: Callable[[], float] | None = None) -> None:
        self._run = run
        self._least = run.config.watchdog.free_memory_gb
        self._free_gb = free_gb or machine.free_memory_gb
        self._waiting = 0

    async def room(self) -> None:
        """Wait until there is enough."""
        if self._enough():
            return
        self._run.warn(
            f"memory is short: no new episodes begin until {self._least:g} GiB (watchdog.free_memory_gb) are "
            "free. Close other programs, or lower grpo.max_off_policy_steps or generator.kv_cache_gb"
        )
        self._waiting += 1
        try:
            while not self._enough():  # noqa: ASYNC110 - no event tells of memory that is free again
                await asyncio.sleep(LOOK_S)
        finally:
            self._waiting -= 1

    def diagnose(self) -> str:
        """Why episodes wait, or nothing."""
        if not self._waiting:
            return ""
        return (
            f"new episodes wait for memory: {self._free_gb():.2f} GiB are free, watchdog.free_memory_gb={self._least:g}"
        )

    def _enough(self) -> bool:
        return not self._least or self._free_gb() >= self._least
