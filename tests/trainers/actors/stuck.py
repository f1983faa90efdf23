"""An actor that holds its own process up."""

from __future__ import annotations

import time

from trainers.actors.actor import ForgeActor, concurrent_endpoint


class Stuck(ForgeActor):
    """Answers, unless it is told to hold its event loop up."""

    @concurrent_endpoint
    async def ping(self) -> None:
        """Answer."""

    @concurrent_endpoint
    async def hold_up(self) -> None:
        """Block the event loop for longer than any test."""
        count_sheep()


def count_sheep() -> None:
    time.sleep(600)
