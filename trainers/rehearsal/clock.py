"""An event loop whose clock jumps: when every task waits for a time, the earliest of these times comes at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from forge_env.errors import ForgeError

T = TypeVar("T")


class StalledError(ForgeError):
    """Every task waits for another one, so that simulated time can't go on."""


class _Leap(selectors.SelectSelector):
    """A selector that advances a clock by the timeout instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise StalledError("every part of the simulated run waits for another one")
        self.now += max(0.0, timeout)
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Event loop on simulated time: `asyncio.sleep`, timeouts and `loop.time` take no real time."""

    def __init__(self) -> None:
        self._leap = _Leap()
        super().__init__(self._leap)

    def time(self) -> float:
        """Simulated seconds since the loop was created."""
        return self._leap.now


def simulate(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on simulated time.

    Raises:
        StalledError: nothing can happen any more.
    """
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(work)
