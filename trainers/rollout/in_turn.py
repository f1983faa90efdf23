"""Processing of groups in order of admission, for estimators with state that each group changes."""

from __future__ import annotations

import asyncio


class InTurn:
    """Lets groups proceed in order of their index, whatever order their episodes end in; does nothing unless `active`.

    In synchronous mode a step waits for all of its groups anyway, so this costs no time, and an estimator that carries
    state from group to group sees them in the same order in every run.
    """

    def __init__(self, active: bool) -> None:
        self._active = active
        self._open: set[int] = set()
        self._waiting: dict[int, asyncio.Future[None]] = {}

    def begin(self, index: int) -> None:
        """Mark a group as in progress: groups with a higher index wait for it."""
        if self._active:
            self._open.add(index)

    async def wait(self, index: int) -> None:
        """Wait until all groups with a lower index are done."""
        if index in self._open and index != min(self._open):
            self._waiting[index] = asyncio.get_running_loop().create_future()
            try:
                await self._waiting[index]
            finally:
                del self._waiting[index]

    def done(self, index: int) -> None:
        """Mark a group as done: it was added, replaced or dropped."""
        self._open.discard(index)
        waiting = self._waiting.get(min(self._open, default=-1))
        if waiting is not None and not waiting.done():
            waiting.set_result(None)
