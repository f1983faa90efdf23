"""The rehearsal's event loop, whose clock jumps to the next timer, with functions of threads run at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from trainers.rehearsal.clock import SimulatedLoop

T = TypeVar("T")


class VirtualTimeLoop(SimulatedLoop):
    """Seconds pass only in `time()`."""

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run the function now: threads would take real time."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  for the task that awaits it
            future.set_exception(error)
        return future


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time; raises `StalledError` if nothing can go on."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
