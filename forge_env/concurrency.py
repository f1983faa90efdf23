"""Waiting for several coroutines at once, and for functions in threads."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
MAX_IDLE_THREADS = 256
"""Threads kept for later calls; those of a larger crowd end when their call does."""


async def gather_or_cancel(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; the first failure cancels the others, waits for them, and is raised as it is."""
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
    return [task.result() for task in tasks]


async def to_its_end(work: asyncio.Future[T]) -> T:
    """Await `work`, however often this task is cancelled meanwhile; only then is it cancelled."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    result = work.result()
    if cancelled is not None:
        raise cancelled
    return result


class _Worker:
    """A daemon thread that runs one function after the other, and waits in the pool between two."""

    def __init__(self) -> None:
        self.retired = False
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._work, name="forge-env-tool", daemon=True).start()

    def start(self, job: Callable[[], None]) -> None:
        """Have `job` run; it must not raise."""
        self._inbox.put(job)

    def _work(self) -> None:
        while not self.retired:
            self._inbox.get()()


class _Pool:
    """Threads that are idle now. One is added whenever none is, so calls that never end can't make it run dry."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []

    def take(self) -> _Worker:
        try:
            return self._idle.pop()  # the one used last: its stack is warm. `pop` and `append` are atomic
        except IndexError:
            return _Worker()

    def give_back(self, worker: _Worker) -> None:
        if len(self._idle) < MAX_IDLE_THREADS:
            self._idle.append(worker)
        else:
            worker.retired = True

    def forget(self) -> None:
        """In a forked child: the threads are the parent's."""
        self._idle.clear()


_POOL = _Pool()
os.register_at_fork(after_in_child=_POOL.forget)


async def run_in_thread(function: Callable[[], Any]) -> Any:
    """Run `function` in a daemon thread, which no other call uses meanwhile.

    Threads are kept for the next call: there are as many as calls ever ran at once. asyncio's own pool would run dry
    when calls that timed out keep its threads, and would hold up the interpreter's exit; Python can't end a thread, so
    such a call goes on in the background, its result is dropped, and its thread is used again when it does end.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()
    worker = _POOL.take()

    def deliver(outcome: tuple[Any, BaseException | None]) -> None:
        if not done.done():
            done.set_result(outcome)

    def job() -> None:
        try:
            outcome: tuple[Any, BaseException | None] = (context.run(function), None)
        except BaseException as error:  # noqa: BLE001 - handed to the awaiting task, which raises it
            outcome = (None, error)
        _POOL.give_back(worker)  # before the caller wakes, so that its next call finds this thread
        try:
            loop.call_soon_threadsafe(deliver, outcome)
        except RuntimeError:
            return  # the loop was closed: nobody waits any more

    worker.start(job)
    value, error = await done
    if error is not None:
        raise error
    return value
