"""What is shown while nothing has finished yet, and that text is drawn as it is."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest

from forge_env.evaluation.config import build
from forge_env.evaluation.display import LiveDisplay, PlainDisplay, print_tables
from forge_env.evaluation.evaluation import Evaluation
from forge_env.evaluation.tables import Table
from tests.evaluation.server import Server, http


class Screen(io.StringIO):
    """A stream that tells when something is shown on it; rich draws from a thread of its own."""

    def __init__(self, *, terminal: bool, awaited: str = "nothing") -> None:
        super().__init__()
        self.terminal, self.awaited = terminal, awaited
        self.seen = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        if self.awaited in text:
            self.loop.call_soon_threadsafe(self.seen.set)
        return super().write(text)


@pytest.mark.parametrize("live", [True, False])
async def test_errors_and_requests_in_flight_show_before_any_sample_is_done(
    live: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forge_env.evaluation.display.QUIET_S", 0.01)

    def behave(request: dict[str, Any], n: int) -> Any:
        return http({"error": {"message": "slow down"}}, 429) if n < 3 else None

    stream = Screen(terminal=live, awaited="EndpointOverloadedError")
    async with Server(behave) as server:
        settings = {"environments": "tests.evaluation.toys:Sums", "model": "m", "first_delay_s": 0.0, "n": 4}
        config = build({**settings, "base_url": server.url, "out": tmp_path / "out"})
        evaluation = Evaluation(config, stream=stream)
        running = asyncio.create_task(evaluation.run())
        await stream.seen.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    shown = stream.getvalue()
    assert "requests in flight" in shown
    assert "0/4" in shown
    assert "running" in shown


def test_text_is_drawn_as_it_is() -> None:
    text, stream = "[bold]:smile: 10:00:00", io.StringIO()
    print_tables([Table(text, ["a"], [[text]])], [text], stream)
    assert stream.getvalue().count(text) == 3


async def test_notes_are_drawn_as_they_are(tmp_path: Path) -> None:
    stream = Screen(terminal=True)
    progress = Evaluation(
        build({"environments": "tests.evaluation.toys:Sums", "model": "gold", "out": tmp_path / "out"})
    ).progress
    for display in (LiveDisplay(progress, stream), PlainDisplay(progress, stream)):
        display.note("[bold]:smile:")
    assert stream.getvalue().count("[bold]:smile:") == 2
