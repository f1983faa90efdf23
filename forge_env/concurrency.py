"""Waiting for several coroutines at once, and for functions in threads."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def gather_or_cancel(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; the first failure cancels the others, waits for them, and is raised as it is."""
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
    return [task.result() for task in tasks]


async def run_in_thread(function: Callable[[], Any]) -> Any:
    """Run `function` in a daemon thread of its own.

    A pool would run dry when calls that timed out keep its threads, and would hold up the interpreter's exit;
    Python can't end a thread, so such a call goes on in the background and its result is dropped.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(outcome: tuple[Any, BaseException | None]) -> None:
        if not done.done():
            done.set_result(outcome)

    def work() -> None:
        try:
            outcome: tuple[Any, BaseException | None] = (context.run(function), None)
        except BaseException as error:  # noqa: BLE001 - handed to the awaiting task, which raises it
            outcome = (None, error)
        try:
            loop.call_soon_threadsafe(deliver, outcome)
        except RuntimeError:
            return  # the loop was closed: nobody waits any more

    threading.Thread(target=work, name="forge-env-tool", daemon=True).start()
    value, error = await done
    if error is not None:
        raise error
    return value
