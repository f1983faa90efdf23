"""Host of asynchronous environments behind synchronous adapters: an event loop in a thread, and shared engines.

A thread is needed because the caller may run in an event loop too (notebooks), and because a sandbox engine maintains
its warm sandboxes between calls.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401 - registers its shutdown first, so that it runs after ours
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
        """Run a coroutine and return its result; an interrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        token = CODE_LIMIT_S.set(0.0)  # code on the host's loop has separate limits
        try:
            return future.result()
        except BaseException:  # including Ctrl-C: stop the work when the caller stops waiting
            future.cancel()
            raise
        finally:
            CODE_LIMIT_S.reset(token)

    async def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine from another event loop; cancelling the caller cancels it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    def borrow_engine(self, name: str) -> LazyEngine:
        """Borrow the engine `name`, which is shared by all borrowers and starts with the first sandbox."""
        with self._lock:
            engine, users = self._engines.get(name) or (LazyEngine(name), 0)
            self._engines[name] = (engine, users + 1)
        return engine

    def return_engine(self, name: str) -> None:
        """Return a borrowed engine; the last return closes it."""
        with self._lock:
            engine, users = self._engines.pop(name)
            if users > 1:
                self._engines[name] = (engine, users - 1)
        if users == 1:
            self.run(engine.close())

    def close_engines(self) -> None:
        """Close the engines of environments that were never closed; called at exit."""
        if os.getpid() != self.pid:
            return  # a forked child has neither the thread nor the sandboxes
        for engine, _ in list(self._engines.values()):
            self.run(engine.close())


_host: Host | None = None


def get_host() -> Host:
    """Host of this process; a forked child gets a new one."""
    global _host
    if _host is None or _host.pid != os.getpid():
        _host = Host()
        # `atexit` would be too late: executors accept no work then, and engines need threads to close.
        threading._register_atexit(_host.close_engines)  # type: ignore[attr-defined]
    return _host
