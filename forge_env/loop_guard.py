"""Watchdog thread for a blocked event loop, which can't notice anything by itself, not even the first Ctrl-C.

Code without an `await` blocks the loop: a tool that waits for the network, an endless loop of an environment.
Environment code is broken off when it has used up its time (`code_timeout_s`) or when the user interrupts. If the loop
runs in the main thread, a signal of our own makes Python run `_poked` inside that code, which raises. In another
thread, as in an actor's process, Python is asked to raise an exception there; the running code is then identified by
its stack alone.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from forge_env import interrupts
from forge_env.errors import CODE_BLOCK, CODE_LIMIT_S, HeldUpError, author_place, is_environments
from forge_env.figures import duration

logger = logging.getLogger(__name__)
BEAT_S = 1.0
"""Interval of the loop's heartbeat, in seconds."""
STARVED_S = 5.0
"""Maximum time counted between two looks, in seconds, so that a process that was stopped or starved isn't blamed."""
POKE = signal.SIGURG
"""The signal that interrupts the main thread: by default it does nothing, and no library is known to use it."""


class LoopGuard(AbstractContextManager["LoopGuard"]):
    """Watch the running event loop inside the block; if none runs yet, watch only environment code.

    Args:
        warn_s: seconds without progress until the blocking stack is logged; infinite if no loop runs.
        end_s: seconds until the process is ended; 0: never.
        tell: called with a description of the problem, by the loop when it runs again; by the watchdog thread before it
            ends the process, and if `at_once`.
        at_once: `tell` may be called by any thread.
        code_s: if the loop does not run in the main thread, seconds after which environment code is broken off; 0:
            never.
    """

    def __init__(
        self,
        warn_s: float,
        end_s: float,
        tell: Callable[[str], object],
        *,
        at_once: bool = False,
        code_s: float = 0.0,
    ) -> None:
        self._code_s = code_s
        self._warn_s = warn_s
        self._end_s = end_s
        self._tell = tell
        self._beats = 0
        self._over = threading.Event()
        self._loop = _running_loop()
        self._runner = threading.get_ident()
        self._at_once = at_once
        self._pokes = threading.current_thread() is threading.main_thread()
        self._handler_before: Any = None
        self._held: tuple[int, object, object] = (-1, None, None)
        """The blocking code at the last poke: heartbeats by then, the running task, and its block of code."""
        self._held_s = 0.0
        self._poked_at = 0.0
        self._in_poke = False

    def __enter__(self) -> LoopGuard:
        if self._pokes:
            self._handler_before = signal.signal(POKE, self._poked)
        self._beat()
        self._watcher = threading.Thread(target=self._watch, name="forge-env-loop-guard", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._loop is not None:
            self._next.cancel()
        self._watcher.join()  # or it might poke later code
        if self._pokes:
            signal.signal(POKE, self._handler_before or signal.SIG_DFL)

    def _beat(self) -> None:
        if self._loop is None:
            return
        self._beats += 1
        self._next = self._loop.call_later(BEAT_S, self._beat)

    def _watch(self) -> None:
        still, seen, looked = 0.0, self._beats, time.monotonic()
        warned, breaks_at = False, self._code_s
        while not self._over.wait(BEAT_S):
            now = time.monotonic()
            if self._beats != seen:
                still, seen, warned, breaks_at = 0.0, self._beats, False, self._code_s
            else:
                still += min(now - looked, STARVED_S)
            looked = now
            if still and self._pokes and (self._loop is not None or is_environments(self._stack())):
                signal.pthread_kill(self._runner, POKE)
            elif self._code_s and still >= breaks_at and self._break_off():
                breaks_at = still + self._code_s  # if the code continues in spite of it, try again
            if still < self._warn_s:
                continue
            if not warned:
                warned = True
                stack = self._stack()
                text = f"the event loop was blocked for more than {duration(still)} by {author_place(stack)}"
                logger.warning("%s\n%s", text, "".join(stack.format()))
                if self._at_once or self._loop is None:
                    self._tell(text)
                else:
                    self._loop.call_soon_threadsafe(self._tell, text)
            if self._end_s and still >= self._end_s:
                self._end(f"ended: the event loop was blocked for {duration(still)}", self._stack())

    def _poked(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal in the main thread, in the context of the running code; raise there if its time is over."""
        if self._in_poke:  # the handler itself takes longer than a beat, as it reads source files
            return
        self._in_poke = True
        try:
            self._check_time(frame)
        finally:
            self._in_poke = False

    def _check_time(self, frame: FrameType | None) -> None:
        loop = _running_loop()
        task = None if loop is None else asyncio.current_task(loop)
        now, held = time.monotonic(), (self._beats, task, CODE_BLOCK.get())
        if held != self._held:
            self._held, self._held_s, self._poked_at = held, 0.0, now
            return
        self._held_s += min(now - self._poked_at, STARVED_S)
        self._poked_at = now
        if not (limit_s := CODE_LIMIT_S.get()):
            return
        if interrupts.requested():
            raise HeldUpError(f"was interrupted in {author_place(traceback.extract_stack(frame))}")
        if self._held_s >= limit_s:
            self._held_s = 0.0  # if the code continues in spite of it, try again
            location = author_place(traceback.extract_stack(frame))
            raise HeldUpError(f"blocked all other work for {limit_s:g} s, in {location}")

    def _break_off(self) -> bool:
        """Raise an exception in the loop's thread if it runs environment code; return whether it does."""
        stack = self._stack()
        if not is_environments(stack):
            return False
        text = f"blocked all other work for {self._code_s:g} s, in {author_place(stack)}"
        logger.warning("code of the environment %s", text)  # the episode gets the error when its group ends
        held_up = type(HeldUpError.__name__, (HeldUpError,), {"__str__": lambda self: text})  # Python takes a class
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._runner), ctypes.py_object(held_up))
        return True

    def _end(self, what: str, stack: traceback.StackSummary) -> None:
        text = f"{what} by {author_place(stack)}"
        logger.error("%s\n%s", text, "".join(stack.format()))
        try:
            self._tell(text)
        finally:
            os._exit(1)

    def _stack(self) -> traceback.StackSummary:
        return traceback.extract_stack(sys._current_frames()[self._runner])


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
