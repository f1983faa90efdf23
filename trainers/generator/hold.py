"""Which requests a replica takes while its weights are held, and when those from before have ended.

The replica itself decides: whoever sends requests, from whichever process, may not know yet that its weights are held.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from trainers.generator.types import WeightsHeldError


class Hold:
    """Counts the requests that are not for held weights.

    Attributes:
        quiet: set while none of them is under way.
    """

    def __init__(self) -> None:
        self.quiet = asyncio.Event()
        self.quiet.set()
        self._held = False
        self._ordinary = 0

    def begin(self) -> None:
        """Refuse ordinary requests from here on."""
        self._held = True

    def end(self) -> None:
        """Take all requests again."""
        self._held = False

    @contextmanager
    def request(self, *, held: bool) -> Iterator[None]:
        """A request is under way.

        Raises:
            WeightsHeldError: it is an ordinary one, and the weights are held.
        """
        if held:
            yield
            return
        if self._held:
            raise WeightsHeldError("the weights of this replica are held")
        self._ordinary += 1
        self.quiet.clear()
        try:
            yield
        finally:
            self._ordinary -= 1
            if not self._ordinary:
                self.quiet.set()
