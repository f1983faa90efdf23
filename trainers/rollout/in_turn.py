"""Groups in the order of their admission, where what one leaves behind changes the next."""

from __future__ import annotations

import asyncio


class InTurn:
    """Lets groups pass by index, however they end; does nothing where it is not `active`.

    In synchronous mode a step waits for all of its groups anyway, so this costs no time, and an estimator that
    remembers something from group to group sees them in the same order in every run.
    """

    def __init__(self, active: bool) -> None:
        self._active = active
        self._open: set[int] = set()
        self._waiting: dict[int, asyncio.Future[None]] = {}

    def begin(self, index: int) -> None:
        """A group is under way: those after it wait for it."""
        if self._active:
            self._open.add(index)

    async def wait(self, index: int) -> None:
        """Wait until every group before this one is done."""
        if index in self._open and index != min(self._open):
            self._waiting[index] = asyncio.get_running_loop().create_future()
            try:
                await self._waiting[index]
            finally:
                del self._waiting[index]

    def done(self, index: int) -> None:
        """A group is added, replaced or dropped."""
        self._open.discard(index)
        waiting = self._waiting.get(min(self._open, default=-1))
        if waiting is not None and not waiting.done():
            waiting.set_result(None)
