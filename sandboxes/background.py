"""Tasks that nobody awaits, but that somebody owns and can end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Background:
    """A set of running tasks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], *, to_its_end: bool = False) -> None:
        """Run `work`; with `to_its_end`, `cancel` does not stop it."""
        task: asyncio.Future[None] = asyncio.get_running_loop().create_task(work)
        if to_its_end:
            task = asyncio.ensure_future(_finish(task))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """Ask every task to stop."""
        for task in list(self._tasks):
            task.cancel()

    async def wait(self) -> None:
        """Wait until there is none, those that are started meanwhile included."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.sleep(0)  # their callbacks


async def _finish(task: asyncio.Future[None]) -> None:
    """Wait for `task` even when cancelled: a destruction is never left half done."""
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            continue
