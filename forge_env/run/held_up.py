"""An event loop that is held up notices nothing any more, not even a signal's first request: a thread does.

Code without an `await` holds it up: a tool that waits for the network, an endless loop of an environment.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager

from forge_env.display.terminal import duration

logger = logging.getLogger(__name__)
BEAT_S = 1.0
"""How often the loop says that it turns."""
STARVED_S = 5.0
"""The most that counts between two looks: a process that was stopped, or starved, has held nothing up."""


class LoopGuard(AbstractContextManager["LoopGuard"]):
    """Inside, the running event loop is watched.

    Args:
        warn_s: seconds of standstill until the log has the stack that holds it up.
        end_s: seconds until the process is ended; 0: never.
        tell: told what is wrong, in words, by the loop when it turns again; by the thread before the end.
    """

    def __init__(self, warn_s: float, end_s: float, tell: Callable[[str], object]) -> None:
        self._warn_s = warn_s
        self._end_s = end_s
        self._tell = tell
        self._beats = 0
        self._over = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._runner = threading.get_ident()

    def __enter__(self) -> LoopGuard:
        self._beat()
        threading.Thread(target=self._watch, name="forge-env-loop-guard", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._next.cancel()

    def _beat(self) -> None:
        self._beats += 1
        self._next = self._loop.call_later(BEAT_S, self._beat)

    def _watch(self) -> None:
        still, seen, looked = 0.0, self._beats, time.monotonic()
        warned = False
        while not self._over.wait(BEAT_S):
            now = time.monotonic()
            if self._beats != seen:
                still, seen, warned = 0.0, self._beats, False
            else:
                still += min(now - looked, STARVED_S)
            looked = now
            if still < self._warn_s:
                continue
            if not warned:
                warned = True
                text = f"the event loop was held up for more than {duration(still)} by {self._by()}"
                logger.warning("%s\n%s", text, "".join(self._stack().format()))
                self._loop.call_soon_threadsafe(self._tell, text)
            if self._end_s and still >= self._end_s:
                self._end(f"ended: the event loop is held up for {duration(still)} by {self._by()}")

    def _end(self, text: str) -> None:
        logger.error("%s\n%s", text, "".join(self._stack().format()))
        try:
            self._tell(text)
        finally:
            os._exit(1)

    def _stack(self) -> traceback.StackSummary:
        return traceback.extract_stack(sys._current_frames()[self._runner])

    def _by(self) -> str:
        innermost = self._stack()[-1]
        return f"{innermost.name} ({innermost.filename}:{innermost.lineno})"
