"""Signals: the first ends in order, the second cancels, one more ends the process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from forge_env import interrupts
from forge_env.interrupts import INTERRUPTED, SIGNALS, run_until_interrupted


def send(number: signal.Signals = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_lets_what_is_under_way_finish(number: signal.Signals) -> None:
    asked, told = asyncio.Event(), []

    def finish() -> str:
        asked.set()
        return "the samples under way"

    async def work() -> str:
        send(number)
        await asked.wait()
        return "finished"

    before = signal.getsignal(number)
    assert run_until_interrupted(work(), finish=finish, tell=told.append) == "finished"
    assert told == ["finishing the samples under way; Ctrl-C again stops now"]
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


def test_work_that_cancels_itself_was_not_interrupted() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run_until_interrupted(work())
