"""Functions in threads: reuse, failures, calls that never end."""

from __future__ import annotations

import ast
import asyncio
import contextvars
import gc
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from forge_env import concurrency
from forge_env.concurrency import for_each, gather_or_cancel, parse_python, result_of, start_in_thread, to_its_end


async def test_results_errors_and_context_come_back() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("of the caller")
    assert await result_of(start_in_thread(variable.get)) == "of the caller"
    with pytest.raises(ZeroDivisionError):
        await result_of(start_in_thread(lambda: 1 // 0))
    with pytest.raises(SystemExit):
        await result_of(start_in_thread(sys.exit))


async def test_items_are_taken_as_there_is_room_for_them() -> None:
    taken, running, most = 0, 0, 0
    may_end = asyncio.Event()

    def endless() -> Iterator[int]:
        nonlocal taken
        while True:
            taken += 1
            yield taken

    async def work(item: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await may_end.wait()
        running -= 1
        if item == 100:
            raise KeyError(item)

    playing = asyncio.ensure_future(for_each(endless(), work, limit=7))
    for _ in range(20):
        await asyncio.sleep(0)
    assert (taken, most) == (7, 7)
    may_end.set()
    with pytest.raises(KeyError, match="100"):
        await playing
    assert most == 7
    assert taken < 120


async def test_work_without_an_await_holds_nobody_up() -> None:
    """A signal is answered by the event loop, which must turn meanwhile."""
    done: list[int] = []

    async def work(item: int) -> None:
        done.append(item)

    playing = asyncio.ensure_future(for_each(itertools.count(), work, limit=4))
    for _ in range(50):
        await asyncio.sleep(0)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert 0 < len(done) < 1000
    await for_each([], work, limit=4)
    results: list[int] = []

    async def slow_at_first(item: int) -> None:
        for _ in range(10 - item):
            await asyncio.sleep(0)
        results.append(item)

    await for_each(range(10), slow_at_first, limit=3)
    assert sorted(results) == list(range(10))


async def test_threads_are_used_again_and_never_shared() -> None:
    seen = [await result_of(start_in_thread(threading.get_ident)) for _ in range(50)]
    assert len(set(seen)) == 1
    assert threading.get_ident() not in seen
    meeting = threading.Barrier(20)  # passed only by twenty calls that run at once
    await gather_or_cancel([result_of(start_in_thread(lambda: meeting.wait(timeout=60))) for _ in range(20)])


async def test_calls_that_do_not_end_hold_nobody_up() -> None:
    gate = threading.Event()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await result_of(start_in_thread(gate.wait))
    assert await result_of(start_in_thread(lambda: "next")) == "next"
    gate.set()


async def test_a_large_crowd_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "MAX_IDLE_THREADS", 2)
    monkeypatch.setattr(concurrency, "_IDLE", idle := [])
    meeting = threading.Barrier(10)
    await gather_or_cancel([result_of(start_in_thread(lambda: meeting.wait(timeout=60))) for _ in range(10)])
    assert len(idle) <= 2
    assert await result_of(start_in_thread(lambda: 1)) == 1


async def test_a_forked_child_has_threads_of_its_own() -> None:
    await result_of(start_in_thread(lambda: None))
    child = os.fork()
    if child == 0:
        os._exit(len(concurrency._IDLE))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0  # noqa: ASYNC222 - it ends at once


def test_a_call_that_never_ends_does_not_keep_the_process() -> None:
    code = (
        "import asyncio, threading\nfrom forge_env.concurrency import result_of, start_in_thread\n"
        "async def main():\n    task = asyncio.create_task(result_of(start_in_thread(threading.Event().wait)))\n"
        "    await asyncio.sleep(0)\n"
        "asyncio.run(main()); print('done')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("done\n", "")


async def test_what_must_end_is_awaited_however_often_its_task_is_cancelled() -> None:
    work: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(to_its_end(work))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    work.set_result(4)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await to_its_end(work) == 4


class ParsesAtItsEnd:
    """Garbage in a circle, whose end parses something: as a traceback does that is written in a collection."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        ast.parse("1 + 2")


def test_python_is_parsed_whatever_is_collected_meanwhile() -> None:
    source = "((1 + 2) * 3 - (4 / 5) + 6) * 7"
    expected = ast.dump(ast.parse(source, mode="eval"))
    before = gc.get_threshold()
    gc.set_threshold(5)
    try:
        for _ in range(100):
            ParsesAtItsEnd()
            assert ast.dump(parse_python(source, "eval")) == expected
    finally:
        gc.set_threshold(*before)
    with pytest.raises(SyntaxError):
        parse_python("1 +")
    with pytest.raises(SyntaxError, match="nested too deeply"):
        parse_python("-" * 5000 + "1")
