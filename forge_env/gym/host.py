"""Where synchronous twins run their asynchronous environments: one event loop in a thread, one engine of a kind.

A thread, because the caller may itself run in an event loop (notebooks), and because a sandbox engine looks
after its warm sandboxes between two calls.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401 - its own end is registered by this, to come after ours
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from forge_env.errors import CODE_LIMIT_S
from forge_env.sandbox.engines import LazyEngine

T = TypeVar("T")


class Host:
    """An event loop in a daemon thread, and the sandbox engines of the environments on it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._engines: dict[str, tuple[LazyEngine, int]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self.loop.run_forever, name="forge-env-gym", daemon=True).start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result; an interrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        token = CODE_LIMIT_S.set(0.0)  # what runs over there has limits of its own
        try:
            return future.result()
        except BaseException:  # also a Ctrl-C: the other thread's work ends with the wait for it
            future.cancel()
            raise
        finally:
            CODE_LIMIT_S.reset(token)

    def borrow_engine(self, name: str) -> LazyEngine:
        """The engine `name`, shared by all that borrow it; it starts with the first sandbox."""
        with self._lock:
            engine, users = self._engines.get(name) or (LazyEngine(name), 0)
            self._engines[name] = (engine, users + 1)
        return engine

    def return_engine(self, name: str) -> None:
        """Undo one `borrow_engine`; the last closes the engine."""
        with self._lock:
            engine, users = self._engines.pop(name)
            if users > 1:
                self._engines[name] = (engine, users - 1)
        if users == 1:
            self.run(engine.close())

    def close_engines(self) -> None:
        """At exit: close what environments that were never closed have left."""
        if os.getpid() != self.pid:
            return  # a forked child has neither the thread nor the sandboxes
        for engine, _ in list(self._engines.values()):
            self.run(engine.close())


_host: Host | None = None


def get_host() -> Host:
    """The process's host; a forked child gets one of its own."""
    global _host
    if _host is None or _host.pid != os.getpid():
        _host = Host()
        # Not by `atexit`: by then no executor takes work any more, and engines close with the help of threads.
        threading._register_atexit(_host.close_engines)  # type: ignore[attr-defined]
    return _host
