"""Waiting for several coroutines at once, for functions in threads, and for a share of an event loop; parsing beside
threads."""

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
"""Each is a moment of some microseconds; two in a row are rare."""
SHARE = 0.1
"""Share of an event loop's time that one client gets while others need it too."""
BURST_S = 0.5
"""Seconds of work that a client may ask for at once."""
MAX_IDLE_THREADS = 256
"""Threads kept for later calls; those of a larger crowd end when their call does."""


async def gather_or_cancel(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; the first failure cancels the others, waits for them, and is raised as it is."""
    if len(coroutines) == 1:  # nothing to overlap: spare the task
        return [await coroutines[0]]
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
    return [task.result() for task in tasks]


async def for_each(items: Iterable[S], work: Callable[[S], Coroutine[Any, Any, object]], *, limit: int) -> None:
    """Run `work` on every item, at most `limit` at once; the first failure cancels the others and is raised as it is.

    Items are taken as there is room for them, so memory depends on `limit` and not on the number of items, which may be
    endless. Each call has a task, and so a context, of its own.
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


class Pace:
    """Spaces out the work that one client asks of an event loop: `SHARE` of the time, after `BURST_S` at once."""

    def __init__(self) -> None:
        self._next_at = -math.inf

    def charge(self, seconds: float, *, alone: bool = False) -> float:
        """Add work.

        Args:
            seconds: estimated time that it takes.
            alone: no other client needs the event loop; the work may begin at once, but uses up the burst.

        Returns:
            Seconds until the work may begin; 0 or less: at once.
        """
        now = asyncio.get_running_loop().time()
        begin = max(self._next_at, now - BURST_S / SHARE)
        self._next_at = begin + seconds / SHARE
        if alone:
            begin = self._next_at = min(self._next_at, now)
        return begin - now

    async def turn(self, seconds: float) -> None:
        """Add work, and wait until it may begin."""
        if (delay := self.charge(seconds)) > 0:
            await asyncio.sleep(delay)


async def settled(value: Any) -> Any:
    """What an author's function returned, awaited where it is a coroutine: an author may leave the `async` out."""
    return await value if inspect.isawaitable(value) else value


@overload
def parse_python(source: str) -> ast.Module: ...
@overload
def parse_python(source: str, mode: Literal["eval"]) -> ast.Expression: ...
def parse_python(source: str, mode: Literal["exec", "eval"] = "exec") -> ast.AST:
    """`ast.parse`, safe beside other threads.

    CPython 3.11 counts the depth of its tree in one place for all threads. Where a collection in the middle lets
    another parse run, the count is off and the first one fails with SystemError (CPython issue 106905). The source is
    not at fault, so it is parsed again.

    Raises:
        SyntaxError, ValueError: as `ast.parse` does.
    """
    for _ in range(PARSE_TRIES - 1):
        try:
            return ast.parse(source, mode=mode)
        except SystemError:
            continue
    return ast.parse(source, mode=mode)


Outcome: TypeAlias = tuple[Any, BaseException | None]
"""What a function returned, or what it raised."""
_IDLE: list[SimpleQueue[Callable[[], None] | None]] = []
"""Where threads that are idle now wait for their next function; None ends one.

A thread is added whenever none is idle, so calls that never end can't make it run dry.
"""
os.register_at_fork(after_in_child=_IDLE.clear)  # the threads are the parent's


class Running(Future[Outcome]):
    """A function that runs in a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.ident: int | None = None
        """Of the thread, once it has begun."""
        self.has_ended = False
        self.broken_off = False
        self._raised = threading.Event()

    def break_off(self) -> None:
        """Have `HeldUpError` raised in it as soon as it runs Python code; once, and not after its end.

        Code that waits in a C library, or catches everything, goes on all the same.
        """
        if self.broken_off or self.ident is None:
            return
        self.broken_off = True  # before the look at its end: whoever ends after it waits for what comes (`end`)
        try:
            if not self.has_ended:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(HeldUpError))
        finally:
            self._raised.set()

    def end(self) -> bool:
        """In its thread, after the function: whether that may run another one. What was raised too late stops here."""
        self.has_ended = True
        if not self.broken_off:
            return True
        try:
            self._raised.wait()
            for _ in range(2):
                pass  # Python raises it at a jump backwards at the latest
        except HeldUpError:
            pass
        return False


def start_in_thread(function: Callable[[], Any]) -> Running:
    """Run `function` in a daemon thread, which no other call uses meanwhile; nobody can cancel the future.

    Threads are kept for the next call: there are as many as calls ever ran at once. asyncio's own pool would run dry
    when calls that timed out keep its threads, and would hold up the interpreter's exit: here such a call goes on in
    the background until it ends or is broken off, and its result is dropped.
    """
    running = Running()
    running.set_running_or_notify_cancel()
    context = contextvars.copy_context()
    try:
        inbox = _IDLE.pop()  # the one used last: its stack is warm. `pop` and `append` are atomic
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
        except HeldUpError as error:  # raised between the function's end and ours
            result = None, error
            running.end()
        if reusable and len(_IDLE) < MAX_IDLE_THREADS:
            _IDLE.append(inbox)  # before the caller wakes, so that its next call finds this thread
        else:
            inbox.put(None)
        running.set_result(result)

    inbox.put(job)
    return running


def _work(inbox: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := inbox.get()) is not None:
        job()


async def result_of(outcome: Future[Outcome]) -> Any:
    """What `start_in_thread` ran to: its result, or its exception."""
    value, error = await asyncio.wrap_future(outcome)
    if error is not None:
        raise error
    return value
