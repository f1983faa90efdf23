"""An event loop that is held up is noticed from outside."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from forge_env import loop_guard
from forge_env.errors import EnvironmentBugError, environment_code
from forge_env.loop_guard import LoopGuard


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_guard, "BEAT_S", 0.01)


async def test_what_holds_it_up_is_named_when_it_turns_again(caplog: pytest.LogCaptureFixture) -> None:
    told: asyncio.Queue[str] = asyncio.Queue()
    noticed = threading.Event()

    def hold_up() -> None:
        noticed.wait()  # without an await

    class Handler:
        """The log has it while it lasts."""

        def __call__(self, text: str, *_: object) -> None:
            noticed.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_guard.logger, "warning", Handler())
        with LoopGuard(0.05, 0.0, told.put_nowait):
            hold_up()
            text = await told.get()
    assert "the event loop was blocked for more than" in text
    assert "by hold_up (" in text
    assert "test_loop_guard.py" in text


async def test_one_that_never_turns_again_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    ended = threading.Event()
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(os, "_exit", end)
    with LoopGuard(0.02, 0.05, told.append):
        ended.wait()
    assert codes[0] == 1
    assert "ended: the event loop was blocked for" in told[-1]


async def test_a_loop_that_turns_is_left_alone() -> None:
    told: list[str] = []
    with LoopGuard(0.1, 0.2, told.append):
        for _ in range(100):
            await asyncio.sleep(0.003)
    assert told == []


def test_a_signal_that_arrives_while_one_is_handled_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Source files may take longer to read than the time between two signals."""
    located: list[object] = []

    def locate(stack: object) -> str:
        located.append(stack)
        signal.raise_signal(loop_guard.POKE)
        return "slow code"

    monkeypatch.setattr(loop_guard, "author_place", locate)
    monkeypatch.setattr(loop_guard, "BEAT_S", 60.0)

    def held_up() -> None:
        with LoopGuard(60.0, 0.0, print), environment_code("step", limit_s=1e-9):
            signal.raise_signal(loop_guard.POKE)
            signal.raise_signal(loop_guard.POKE)

    with pytest.raises(EnvironmentBugError, match="in slow code"):
        held_up()
    assert len(located) == 1
