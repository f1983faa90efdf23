"""Concurrency helpers: running coroutines together, functions in threads, fair use of an event loop, and thread-safe
parsing."""

from __future__ import annotations

import ast
import asyncio
import contextvars
import ctypes
import inspect
import math
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Literal, TypeAlias, TypeVar, overload

from forge_env.errors import HeldUpError

S = TypeVar("S")
T = TypeVar("T")
PARSE_TRIES = 20
"""Maximum attempts of `parse_python`. The race that fails one lasts microseconds; two failures in a row are rare."""
SHARE = 0.1
"""Fraction of an event loop's time that one client gets while others need it too."""
BURST_S = 0.5
"""Seconds of work that a client may request at once."""
MAX_IDLE_THREADS = 256
"""Maximum idle threads kept for later calls; any beyond that end with their call."""


async def gather_or_cancel(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines together and return their results in order.

    The first failure cancels the others, waits for them, and is raised unwrapped.
    """
    if len(coroutines) == 1:  # nothing to overlap: no task needed
        return [await coroutines[0]]
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
    return [task.result() for task in tasks]


async def for_each(items: Iterable[S], work: Callable[[S], Coroutine[Any, Any, object]], *, limit: int) -> None:
    """Run `work` on every item, at most `limit` at once; the first failure cancels the others and is raised unwrapped.

    Items are drawn only when a slot is free, so memory depends on `limit` and not on the number of items, which may be
    infinite. Each call runs in its own task, and so in its own context.
    """
    room = asyncio.Semaphore(limit)

    async def one(item: S) -> None:
        try:
            await work(item)
        finally:
            room.release()

    remaining = iter(items)
    try:
        async with asyncio.TaskGroup() as group:
            while True:
                await room.acquire()
                try:
                    item = next(remaining)
                except StopIteration:
                    break
                group.create_task(one(item))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__


async def to_its_end(work: asyncio.Future[T]) -> T:
    """Await `work` to completion; a cancellation of this task in the meantime is raised afterwards."""
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


class Pace:
    """Rate limiter for one client's work on an event loop: a burst of `BURST_S`, then `SHARE` of the time."""

    def __init__(self) -> None:
        self._next_at = -math.inf

    def charge(self, seconds: float, *, alone: bool = False) -> float:
        """Schedule work.

        Args:
            alone: no other client needs the event loop; the work may begin at once, but uses up the burst.

        Returns:
            Seconds until the work may begin; 0 or less means at once.
        """
        now = asyncio.get_running_loop().time()
        begin = max(self._next_at, now - BURST_S / SHARE)
        self._next_at = begin + seconds / SHARE
        if alone:
            begin = self._next_at = min(self._next_at, now)
        return begin - now

    async def turn(self, seconds: float) -> None:
        """Schedule work and wait until it may begin."""
        if (delay := self.charge(seconds)) > 0:
            await asyncio.sleep(delay)


async def settled(value: Any) -> Any:
    """Await a value if it is awaitable, else return it: authors may write functions with or without `async`."""
    return await value if inspect.isawaitable(value) else value


@overload
def parse_python(source: str) -> ast.Module: ...
@overload
def parse_python(source: str, mode: Literal["eval"]) -> ast.Expression: ...
def parse_python(source: str, mode: Literal["exec", "eval"] = "exec") -> ast.AST:
    """`ast.parse`, safe with other threads.

    CPython 3.11 shares one recursion counter between threads. If a garbage collection during a parse lets another
    thread parse, the counter is wrong and the first parse fails with SystemError (CPython issue 106905). The source is
    valid, so it is parsed again.
    """
    tries = 1
    while True:
        try:
            return ast.parse(source, mode=mode)
        except SystemError:
            if tries == PARSE_TRIES:
                raise
            tries += 1
        except (RecursionError, MemoryError) as error:
            raise SyntaxError("nested too deeply") from error


Outcome: TypeAlias = tuple[Any, BaseException | None]
_IDLE: list[SimpleQueue[Callable[[], None] | None]] = []
"""Queues of the idle threads, which wait for their next function; None ends a thread.

A new thread starts whenever none is idle, so calls that never return can't exhaust the pool.
"""
os.register_at_fork(after_in_child=_IDLE.clear)  # a forked child doesn't have the parent's threads


class Running(Future[Outcome]):
    """A function that runs in a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.ident: int | None = None
        self.has_ended = False
        self.broken_off = False
        self._raised = threading.Event()

    def break_off(self) -> None:
        """Raise `HeldUpError` in the function as soon as it runs Python code; once, and not after it has ended.

        Code that blocks in a C library, or that catches every exception, continues anyway.
        """
        if self.broken_off or self.ident is None:
            return
        # Set before `has_ended` is read: a function that ends later waits for `_raised` in `end`.
        self.broken_off = True
        try:
            if not self.has_ended:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(HeldUpError))
        finally:
            self._raised.set()

    def end(self) -> bool:
        """Finish a function, in its own thread; return whether the thread may run another.

        A `HeldUpError` that arrives after the function's end is caught here.
        """
        self.has_ended = True
        if not self.broken_off:
            return True
        try:
            self._raised.wait()
            for _ in range(2):
                pass  # Python raises a pending exception at a backward jump at the latest
        except HeldUpError:
            pass
        return False


def start_in_thread(function: Callable[[], Any]) -> Running:
    """Run `function` in a daemon thread of its own; the future can't be cancelled.

    Threads are reused: there are at most as many as calls ran at the same time. asyncio's default pool would be
    exhausted by calls that timed out but still occupy threads, and would delay the interpreter's exit. Here such a
    call continues in the background until it ends or is broken off, and its result is dropped.
    """
    running = Running()
    running.set_running_or_notify_cancel()
    context = contextvars.copy_context()
    try:
        inbox = _IDLE.pop()  # the most recently used thread has a warm stack; `pop` and `append` are atomic
    except IndexError:
        inbox = SimpleQueue()
        threading.Thread(target=_work, args=[inbox], name="forge-env-tool", daemon=True).start()

    def job() -> None:
        result: Outcome = None, None
        reusable = False
        try:
            running.ident = threading.get_ident()
            try:
                result = context.run(function), None
            except BaseException as error:  # noqa: BLE001 - handed to the awaiting task, which raises it
                result = None, error
            reusable = running.end()
        except HeldUpError as error:  # raised after the function ended, before `running.end()` returned
            result = None, error
            running.end()
        if reusable and len(_IDLE) < MAX_IDLE_THREADS:
            _IDLE.append(inbox)  # before the caller wakes, so that its next call can use this thread
        else:
            inbox.put(None)
        running.set_result(result)

    inbox.put(job)
    return running


def _work(inbox: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := inbox.get()) is not None:
        job()


async def result_of(outcome: Future[Outcome]) -> Any:
    """Await a function run by `start_in_thread`: return its result, or raise its exception."""
    value, error = await asyncio.wrap_future(outcome)
    if error is not None:
        raise error
    return value
