"""Handling of Ctrl-C, SIGTERM and SIGHUP: the first finishes and saves, the second cancels, the third exits."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
INTERRUPTED = 130
"""Exit code of an interrupted command."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHOW_CURSOR = b"\x1b[?25h"
HINT_AFTER_S = 1.0
"""Seconds after a cancellation until a hint says that the work is still stopping."""
CLEAN_UP_S = 10.0
"""Seconds of a grace period reserved for clean-up after cancelling, before the platform kills the process; half of a
short grace period."""
TERM_GRACE_S = 10.0
"""Seconds from a SIGTERM to an evaluation's end, as long as `docker stop` waits; its first half finishes samples."""
LAST_S = 1.0
"""Seconds before the end of a grace period at which the process exits unconditionally."""


_requested = 0


def requested() -> bool:
    """Whether a signal has requested that the running work end."""
    return _requested > 0


def say(text: str) -> None:
    """Write a line to stderr; a closed stderr is ignored."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def run_until_interrupted(
    work: Coroutine[Any, Any, T],
    *,
    finish: Callable[[], str | None] | None = None,
    tell: Callable[[str], object] = say,
    grace_s: float = 0.0,
) -> T:
    """`asyncio.run` with handling of interrupts.

    The first signal lets current work finish. The second signal, or the first if there is nothing to finish, cancels
    `work`. One more exits the process at once, even if code blocks the event loop. The next command removes the
    sandboxes and temporary files that such an exit leaves behind.

    Args:
        finish: starts an orderly end and returns a description of the work being finished ("the samples under way"),
            or None if there is nothing to finish now. None: there is never anything to finish.
        grace_s: seconds from a SIGTERM until its sender kills the process. All work ends within that time: finished if
            there is enough time, otherwise cancelled. 0: no kill is expected.

    Raises:
        KeyboardInterrupt: `work` was cancelled by a signal; everything was closed.
    """
    interruption = _Interruption(finish, tell, grace_s)
    try:
        return asyncio.run(interruption.attend(work))
    except asyncio.CancelledError:
        if interruption.cancelled:
            raise KeyboardInterrupt from None
        raise


class _Interruption:
    """State of the signal handling around some work; the arguments are those of `run_until_interrupted`."""

    def __init__(self, finish: Callable[[], str | None] | None, tell: Callable[[str], object], grace_s: float) -> None:
        self._finish = finish
        self._tell = tell
        self._grace_s = grace_s
        self._steps = 1 if finish is None else 2
        self._received = 0
        self.cancelled = False

    async def attend(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the work while handling signals."""
        task = asyncio.current_task()
        assert task is not None
        self._loop, self._task = asyncio.get_running_loop(), task
        self._hint = threading.Timer(HINT_AFTER_S, self._tell, ("stopping; Ctrl-C again stops at once",))
        self._graces = _graces(self._grace_s, lambda: self._loop.call_soon_threadsafe(self._cut_short))
        for timer in (self._hint, *self._graces):
            timer.daemon = True
        # Not `loop.add_signal_handler`: its handlers can't run while code blocks the event loop.
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()  # set by `nohup`
        previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS if number not in ignored}
        try:
            return await work
        finally:
            if self._received:  # else `asyncio.run` waits for threads blocked in downloads or locks
                self._loop.set_default_executor(ThreadPoolExecutor(1))
            global _requested
            _requested = 0
            for timer in (self._hint, *self._graces):
                timer.cancel()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        global _requested
        self._received += 1
        _requested = self._received
        if number == signal.SIGTERM and self._received == 1:
            for timer in self._graces:
                timer.start()
        if self.cancelled or self._received > self._steps:
            _end_the_process()
        if self._received == self._steps:
            self._hint.start()
        self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        """Start an orderly end on the first signal if possible; otherwise cancel."""
        if self._received == 1 and self._finish is not None and (what := self._finish()) is not None:
            self._tell(f"finishing {what}; Ctrl-C again stops now")
        else:
            self._cancel()

    def _cut_short(self) -> None:
        if not self.cancelled:
            self._tell(f"not finished {self._grace_s:g} s after SIGTERM, less the time for clean-up: stopping now")
            self._cancel()

    def _cancel(self) -> None:
        if not self.cancelled:
            self.cancelled = True
            self._task.cancel()


def _graces(grace_s: float, cut_short: Callable[[], object]) -> list[threading.Timer]:
    """Timers that a SIGTERM starts: the first cancels the work, the second exits the process unconditionally."""
    if not grace_s:
        return []
    cancel_after = max(grace_s - CLEAN_UP_S, grace_s / 2)
    end_after = max(grace_s - LAST_S, (grace_s + cancel_after) / 2)
    return [threading.Timer(cancel_after, cut_short), threading.Timer(end_after, _end_the_process)]


def _end_the_process() -> None:
    with suppress(OSError):
        os.write(2, b"stopped\n")
    with suppress(OSError):  # a live display may have hidden the cursor, and stdout may be redirected to a log
        os.write(os.open("/dev/tty", os.O_WRONLY | os.O_NOCTTY), SHOW_CURSOR)
    os._exit(INTERRUPTED)
