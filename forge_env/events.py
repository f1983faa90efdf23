"""Progress events of a run or an evaluation. Displays, reports and tests subscribe; the work doesn't know them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

logger = logging.getLogger(__name__)
TICK_S = 0.25
"""Seconds between updates while nothing happens."""


class Subscriber:
    """Receiver of events; each method does nothing unless a subclass overrides it."""

    def update(self) -> None:
        """Handle a change of the state, or the next tick; subscribers limit how often they act on it."""

    def event(self, text: str) -> None:
        """Handle an important event that is also part of the state."""

    def note(self, text: str) -> None:
        """Handle a message that is not part of the state."""

    def ended(self, wall_s: float) -> None:
        """Handle the end of the work, when its files are complete.

        Args:
            wall_s: wall time of the work in seconds, including earlier processes.
        """

    def close(self) -> None:
        """Release resources; no further events follow."""


class Events:
    """Publisher that passes each event to all subscribers.

    A subscriber that raises is removed with a warning in the log: a failing display must not end the work.
    """

    def __init__(self, *subscribers: Subscriber) -> None:
        self._subscribers = list(subscribers)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Add a subscriber; its first event is an update."""
        self._subscribers.append(subscriber)
        self._send(subscriber, lambda to: to.update())

    def update(self) -> None:
        """Announce a change of the state."""
        self._publish(lambda to: to.update())

    def event(self, text: str) -> None:
        """Announce an important event that is also part of the state."""
        self._publish(lambda to: to.event(text))

    def note(self, text: str) -> None:
        """Send a message that is not part of the state."""
        self._publish(lambda to: to.note(text))

    def ended(self, wall_s: float) -> None:
        """Announce that the work has ended and its files are complete."""
        self._publish(lambda to: to.ended(wall_s))

    def close(self) -> None:
        """Close all subscribers."""
        self._publish(lambda to: to.close())

    def _publish(self, send: Callable[[Subscriber], object]) -> None:
        for subscriber in tuple(self._subscribers):
            self._send(subscriber, send)

    def _send(self, subscriber: Subscriber, send: Callable[[Subscriber], object]) -> None:
        if subscriber not in self._subscribers:
            return  # an event that it published itself has failed
        try:
            send(subscriber)
        except Exception as error:  # an error of a display (a closed pipe, rich) must not end the work
            self._subscribers.remove(subscriber)
            shown = None if isinstance(error, OSError) else error
            name = type(subscriber).__name__
            logger.warning("%s failed and was closed: %s: %s", name, type(error).__name__, error, exc_info=shown)
            with suppress(Exception):  # restores the cursor, if that still works
                subscriber.close()


@asynccontextmanager
async def ticking(events: Events) -> AsyncIterator[None]:
    """Announce an update every `TICK_S` seconds during the block, so that displayed times advance."""

    async def tick() -> None:
        while True:
            await asyncio.sleep(TICK_S)
            events.update()

    task = asyncio.create_task(tick())
    try:
        yield
    finally:
        task.cancel()
