"""Signals: the first ends in order, the second cancels, one more ends the process."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable

import pytest

from forge_env import interrupts
from forge_env.cli.main import signals_interrupt
from forge_env.interrupts import INTERRUPTED, SIGNALS, run_until_interrupted


def send(number: signal.Signals = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_lets_what_is_under_way_finish(number: signal.Signals) -> None:
    asked, told = asyncio.Event(), []

    def finish() -> str:
        asked.set()
        return "the running samples"

    async def work() -> str:
        send(number)
        await asked.wait()
        return "finished"

    before = signal.getsignal(number)
    assert run_until_interrupted(work(), finish=finish, tell=told.append) == "finished"
    assert told == ["finishing the running samples; Ctrl-C again stops now"]
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(("finish", "signals"), [(None, 1), (lambda: None, 1), (lambda: "it", 2)])
def test_then_it_is_cancelled_and_cleans_up(finish: Callable[[], str | None] | None, signals: int) -> None:
    told: list[str] = []
    cleaned = []

    async def work() -> None:
        try:
            for _ in range(signals):
                send()
                await asyncio.sleep(0)
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_until_interrupted(work(), finish=finish, tell=told.append)
    assert cleaned == [True]
    assert len(told) == signals - 1


@pytest.mark.parametrize(("finish", "signals"), [(None, 2), (lambda: "it", 3)])
def test_one_more_ends_the_process_also_where_code_holds_the_loop_up(
    finish: Callable[[], str | None] | None, signals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended(BaseException):
        """Stands in for the end of the process."""

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(interrupts.os, "_exit", end)
    sent = []

    async def work() -> None:
        for number in range(signals):  # without an await
            sent.append(number)
            send()

    with pytest.raises(Ended, match=str(INTERRUPTED)):
        run_until_interrupted(work(), finish=finish)
    assert len(sent) == signals


def test_a_grace_that_is_too_short_for_finishing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is cancelled while there is time to clean up."""
    monkeypatch.setattr(interrupts.os, "_exit", lambda code: None)
    told: list[str] = []
    cleaned = []

    async def work() -> None:
        try:
            send(signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_until_interrupted(work(), finish=lambda: "the step", tell=told.append, grace_s=0.1)
    assert cleaned == [True]
    assert {text.partition(";")[0].partition(" after")[0] for text in told} >= {
        "finishing the step",
        "not finished 0.1 s",
    }


def test_a_grace_is_kept_also_where_nothing_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(interrupts.os, "_exit", lambda code: ended.set())

    async def work() -> None:
        send(signal.SIGTERM)
        ended.wait()  # without an await

    run_until_interrupted(work(), finish=lambda: "the step", grace_s=0.1)
    assert ended.is_set()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_person_who_stops_a_run_gives_it_the_time_it_needs(number: signal.Signals) -> None:
    async def work() -> str:
        send(number)
        await asyncio.sleep(0.2)
        return "finished"

    assert run_until_interrupted(work(), finish=lambda: "the step", grace_s=0.1) == "finished"


def test_nohup_is_respected() -> None:
    async def work() -> str:
        send(signal.SIGHUP)
        return "finished"

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run_until_interrupted(work(), finish=None) == "finished"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_before_the_work_begins_every_signal_is_a_control_c(number: signal.Signals) -> None:
    before = signal.getsignal(number)

    def interrupted() -> None:
        with signals_interrupt():
            send(number)
            signal.pause()

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert signal.getsignal(number) is before


def test_work_that_cancels_itself_was_not_interrupted() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run_until_interrupted(work())


@pytest.mark.parametrize("finish", [None, lambda: "it"])
def test_a_thread_that_waits_holds_no_interrupted_command_up(finish: Callable[[], str | None] | None) -> None:
    """It may wait for a download, or for a lock that another process holds: `asyncio.run` waits for every thread."""
    released = threading.Event()

    async def work() -> None:
        waiting = asyncio.ensure_future(asyncio.to_thread(released.wait, 60.0))
        await asyncio.sleep(0)
        send(signal.SIGTERM)
        await (asyncio.sleep(0) if finish else waiting)

    try:
        if finish is None:
            with pytest.raises(KeyboardInterrupt):
                run_until_interrupted(work(), finish=finish)
        else:
            run_until_interrupted(work(), finish=finish, tell=lambda text: None)
        assert not released.is_set(), "nobody has waited for the thread"
    finally:
        released.set()
