"""Ctrl-C at commands that run an author's code: once stops in order, twice at once."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar

from forge_env.cli.main import INTERRUPTED

T = TypeVar("T")
HINT_AFTER_S = 1.0
"""Seconds after the first Ctrl-C in which the code should have ended."""


def run_until_interrupted(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, in which a second Ctrl-C ends the process even where a loop without `await` holds everything up.

    What sandboxes the process leaves behind then, the next command removes.

    Raises:
        KeyboardInterrupt: the first Ctrl-C; everything was closed.
    """
    pressed = 0

    async def attended() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def on_signal(number: int, frame: FrameType | None) -> None:
            nonlocal pressed
            pressed += 1
            if pressed > 1:
                os.write(2, b"stopped\n")
                os._exit(INTERRUPTED)
            loop.call_soon_threadsafe(task.cancel)
            hint.start()

        hint = threading.Timer(HINT_AFTER_S, os.write, (2, b"stopping; Ctrl-C again stops at once\n"))
        hint.daemon = True
        before = signal.signal(signal.SIGINT, on_signal)  # a handler of the event loop would have to wait for it
        try:
            return await work
        finally:
            hint.cancel()
            signal.signal(signal.SIGINT, before)

    try:
        return asyncio.run(attended())
    except asyncio.CancelledError:
        if pressed:
            raise KeyboardInterrupt from None
        raise
