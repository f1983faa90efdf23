"""What is shown while nothing has finished yet, and that text is drawn as it is."""

from __future__ import annotations

import asyncio
import io
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from forge_env import events
from forge_env import terminal as displays
from forge_env.config.evaluation import EvaluationConfig
from forge_env.evaluation.estimates import Estimate
from forge_env.evaluation.evaluation import Evaluation
from forge_env.evaluation.plan import Planned
from forge_env.evaluation.progress import EnvironmentProgress, EvaluationProgress
from forge_env.evaluation.results import ResultTable
from forge_env.evaluation.summary import GroupSummary, summarize
from forge_env.evaluation.tables import Table, print_tables, tables
from forge_env.rollout.scripted import FunctionPolicy
from forge_env.terminal import LiveDisplay, PlainDisplay
from tests.forge_env.endpoint.server import Server, http


class Screen(io.StringIO):
    """A stream that tells when something is shown on it."""

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
async def test_early_errors_and_requests_show(live: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(displays, "QUIET_S", 0.01)

    def behave(request: dict[str, Any], n: int) -> Any:
        return http({"error": {"message": "slow down"}}, 429) if n < 3 else None

    stream = Screen(terminal=live, awaited="EndpointOverloadedError")
    async with Server(behave) as server:
        settings = {
            "environments": "tests.forge_env.evaluation.toys:Sums",
            "model": "m",
            "first_delay_s": 0.0,
            "num_tasks": 4,
        }
        config = EvaluationConfig.model_validate({**settings, "base_url": server.url, "out": tmp_path / "out"})
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
        EvaluationConfig.model_validate(
            {"environments": "tests.forge_env.evaluation.toys:Sums", "model": "gold", "out": tmp_path / "out"}
        )
    ).progress
    for display in (LiveDisplay(progress, stream), PlainDisplay(progress, stream)):
        display.note("[bold]:smile:")
    assert stream.getvalue().count("[bold]:smile:") == 2


async def test_only_the_event_loop_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn changes there: another thread would find a dictionary growing under its hands."""
    monkeypatch.setattr(events, "TICK_S", 0.001)
    monkeypatch.setattr(displays, "REDRAW_S", 0.001)
    threads: set[threading.Thread] = set()
    seen = asyncio.Event()

    class Watched(Screen):
        def write(self, text: str) -> int:
            threads.add(threading.current_thread())
            return super().write(text)

    stream = Watched(terminal=True)

    async def play(messages: Any, tools: Any) -> str:
        threads.update(thread for thread in threading.enumerate() if "rich" in type(thread).__module__)
        seen.set()
        return "1"

    config = EvaluationConfig.model_validate(
        {"environments": "tests.forge_env.evaluation.toys:Sums", "model": "x", "out": tmp_path / "out"}
    )
    await Evaluation(config, policy=FunctionPolicy(play), stream=stream).run()
    assert seen.is_set()
    assert threads == {threading.current_thread()}
    assert "12/12" in stream.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
async def test_failing_display_ends_no_run(terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(displays, "QUIET_S", 0.0)

    class Gone(Screen):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    config = EvaluationConfig.model_validate(
        {"environments": "tests.forge_env.evaluation.toys:Sums", "model": "gold", "out": tmp_path / "out"}
    )
    result = await Evaluation(config, stream=Gone(terminal=terminal)).run()
    assert (result.summary.status, result.error) == ("complete", None)
    assert "Display failed and was closed: BrokenPipeError" in (tmp_path / "out" / "run.log").read_text()


def test_a_note_is_not_broken_in_two() -> None:
    stream, path = io.StringIO(), "/" + "long/" * 60
    print_tables([], [f"results: {path}"], stream)
    assert f"results: {path}" in stream.getvalue()


def test_the_live_panel_of_an_evaluation_is_calm_at_80_columns() -> None:
    """Each environment has one line, and each kind of trouble."""
    progress = EvaluationProgress("eval-20261124-101500", "a-model-with-quite-a-long-name-that-goes-on-and-on-" * 2)
    for label in ("coding_rlvr/repository", "calculator", "word-problems-of-several-steps"):
        item = progress.environments[label] = EnvironmentProgress(512, 300, 24, 31, 7, 2)
        for task in range(300):
            item._scores.add(str(task), float(task % 3 > 0))
    progress.usage.completion, progress.priced, progress.budget = 12_345_678, True, 25.0
    progress.lost.update({"SandboxError": 5, "EndpointOverloadedError": 2, "\x1b[2JError": 14})
    progress.request_errors.update({f"EndpointError{number}": 100 for number in range(9)})
    console = Console(width=80, file=io.StringIO())
    console.print(progress.panel())
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    lines = shown.splitlines()
    assert max(map(cell_len, lines)) == 80
    assert len(lines) == 10
    for label in progress.environments:
        (line,) = [line for line in lines if label in line and "512" in line]
        assert "300/512  0.667 ± 0.027" in line
    assert "72 running  93 truncated" in shown
    assert "21 samples lost: " in shown
    assert "\x1b" not in shown


class Narrow(io.StringIO):
    def isatty(self) -> bool:
        return True


COLUMNS = ["environment", "tasks", "samples", "solved", "95 % interval", "lost"]


@pytest.mark.parametrize("width", [30, 40, 60, 80, 160])
def test_tables_fit_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    row = ["coding_rlvr/repository (eval)", "128", "512", "0.812 ± 0.013", "0.786 to 0.836", "0"]
    result = Table("model", COLUMNS, [row], ["lost", "tasks", "samples", "95 % interval"])
    tags = Table("by tag", ["tag", "score"], [[f"tag {number}", "0.5"] for number in range(60)])
    stream = Narrow()
    print_tables([result, tags], ["a note"], stream)
    shown = re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue())
    assert max(cell_len(line) for line in shown.splitlines() if "hidden columns" not in line) <= width
    assert shown.index("a note") < shown.index("by tag") < shown.index("0.812 ± 0.013")
    assert "... 48 more" in shown
    assert ("hidden columns" in shown) == (width < 80)
    assert "lost" not in shown.partition("hidden columns")[2]


def test_tags_of_one_task_are_folded() -> None:
    def group(tasks: int, solved: float) -> GroupSummary:
        return GroupSummary(tasks, tasks, Estimate(solved, 0.1, 0.0, 1.0), solved)

    tags = {"loops": group(4, 0.5), **{f"only {number}": group(1, float(number % 2)) for number in range(6)}}
    config = EvaluationConfig.model_validate({"environments": "toy", "model": "m"})
    summary = summarize(config, ResultTable(), {"toy": Planned("eval", 1, 1)}, EvaluationProgress("name", "m"))
    summary.environments["toy"] = replace(summary.environments["toy"], by_tag=tags)
    (table,) = [table for table in tables(summary) if "by tag" in table.title]
    assert [row[0] for row in table.rows] == ["loops", "6 tags of one task each"]
    assert table.rows[-1][1:] == ["6", "6", "", "0.500"]
