"""Memory check before new episodes, so that they wait rather than trigger the kernel's out-of-memory killer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from forge_env import machine
from forge_env.run import Run

LOOK_S = 1.0
"""Seconds between two checks while episodes wait."""


class MemoryGate:
    """Lets episodes start only while `watchdog.free_memory_gb` GiB of memory are free.

    That is memory of this machine, or of its control group. Running episodes continue, since memory is freed when they
    end. If no memory becomes free, the run makes no progress, and the watchdog ends it with the message of `diagnose`.

    Args:
        run: the run, for its configuration and warnings.
        free_gb: returns the free memory in GiB; None: `machine.free_memory_gb`.
    """

    def __init__(self, run: Run, free_gb: Callable[[], float] | None = None) -> None:
        self._run = run
        self._least = run.config.watchdog.free_memory_gb
        self._free_gb = free_gb or machine.free_memory_gb
        self._waiting = 0

    async def room(self) -> None:
        """Wait until enough memory is free."""
        if self._enough():
            return
        self._run.warn(
            f"memory is short: no new episodes begin until {self._least:g} GiB (watchdog.free_memory_gb) are "
            "free. Close other programs, or lower grpo.max_off_policy_steps or generator.kv_cache_gb"
        )
        self._waiting += 1
        try:
            while not self._enough():  # noqa: ASYNC110 - there is no event for freed memory
                await asyncio.sleep(LOOK_S)
        finally:
            self._waiting -= 1

    def diagnose(self) -> str:
        """Why episodes wait for memory; empty if none do."""
        if not self._waiting:
            return ""
        return (
            f"new episodes wait for memory: {self._free_gb():.2f} GiB are free, watchdog.free_memory_gb={self._least:g}"
        )

    def _enough(self) -> bool:
        return not self._least or self._free_gb() >= self._least
