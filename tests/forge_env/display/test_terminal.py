"""The display of a run: lines, the live panel, and terminals that go away."""

from __future__ import annotations

import errno
import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from forge_env.config import RunConfig
from forge_env.display.training import TrainingView, sparkline
from forge_env.events import Events
from forge_env.figures import duration
from forge_env.run import Run, RunFolder
from forge_env.run.state import RunState
from forge_env.terminal import LiveDisplay, open_display
from tests.forge_env.run.conftest import Clock, plain_run


def test_plain_lines_are_sparse(config: RunConfig, folder: RunFolder, state: RunState, clock: Clock) -> None:
    run, stream = plain_run(config, folder, state)
    run.stage("training", "60 steps")
    run.status(staleness=1, tokens_per_s=3000.0, waiting={"trainer": "episodes", "generator": None})
    for step in range(1, 61):
        clock.now += 1
        run.log(step, {"reward/mean": 0.5})
        run.progress(step, 60)
    run.evaluation(60, "eval", 0.75, 128, 0.04)
    run.warn("something")
    run.warn("something")
    lines = stream.getvalue().splitlines()
    assert len([line for line in lines if "training" in line]) == 5
    progress = next(line for line in lines if "training 1" in line)
    for part in ("reward 0.500", "staleness 1/2", "3,000 tokens/s", "trainer waiting for episodes", "left"):
        assert part in progress
    assert sum("warning: something" in line for line in lines) == 1
    assert any("held-out (eval) after step 60: 0.750 ± 0.040 (standard error, n=128)" in line for line in lines)


def test_the_live_panel_shows_what_matters(config: RunConfig, folder: RunFolder, state: RunState, clock: Clock) -> None:
    stream = io.StringIO()
    run = Run(config, folder, state=state)
    run.events.subscribe(LiveDisplay(TrainingView(state), stream))
    run.stage("sandbox", "docker")
    clock.now += 2
    run.stage("training")
    clock.now += 60
    run.progress(10, 40)
    run.log(10, {"reward/mean": 0.5})
    run.evaluation(0, "eval", 0.4, 128, 0.04)
    run.evaluation(10, "eval", 0.6, 128, 0.04)
    run.status(staleness=1, tokens_per_s=3000.0, waiting={"trainer": "episodes"})
    run.warn("one group was lost")
    run.request_stop()
    run.events.close()
    text = stream.getvalue()
    for part in (
        "✓ sandbox 2.0s", "● training", "10/40", "3m00s left", "reward", "0.600 ± 0.040", "from 0.400", "staleness 1/2",
        "3,000 tokens/s", "trainer waiting for episodes", "! one group was lost", "Ctrl-C again stops immediately",
    ):  # fmt: skip
        assert part in text


def test_live_panel_is_calm_at_80_columns(config: RunConfig, folder: RunFolder, state: RunState, clock: Clock) -> None:
    """Each thing has one line, whatever there is to say; the curves are whole."""
    run = Run(config, folder, state=state)
    for stage in ("sandbox", "model", "trainer", "warm-up", "generator", "evaluation", "training"):
        run.stage(stage)
        clock.now += 3661
    run.progress(10, 40)
    for step in range(100):
        run.log(step, {"reward/mean": step / 100})
    for step in (0, 10):
        run.evaluation(step, "unseen_tasks", 0.4, 256, 0.04)
    for _ in range(3):
        run.warn("no episode of a group can be trained on, so the group was replaced \x1b[2J " * 3)
    console = Console(width=80, file=io.StringIO())
    console.print(TrainingView(state).panel())
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(cell_len, lines)) == 80
    assert len(lines) == 9
    assert sum("(x3)" in line for line in lines) == 1
    assert "\x1b" not in console.file.getvalue()
    (curve,) = [line for line in lines if "▁" in line]
    assert "█" in curve
    assert "0.990" in curve


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_that_is_gone_ends_no_run(
    terminal: bool, config: RunConfig, folder: RunFolder, state: RunState, caplog: pytest.LogCaptureFixture
) -> None:
    class Gone(io.StringIO):
        def isatty(self) -> bool:
            return terminal

        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    run = Run(config, folder, state=state)
    run.events.subscribe(open_display(TrainingView(state), Gone()))
    run.stage("training")
    run.note("worth a line")
    run.warn("careful")
    run.evaluation(0, "eval", 0.4, 128, 0.04)
    run.events.close()
    assert [text for text in caplog.messages if "Display" in text] == [
        f"{'Live' if terminal else 'Plain'}Display failed and was closed: OSError: [Errno 5] Input/output error"
    ]


def test_display_bug_is_logged_with_its_place(state: RunState, caplog: pytest.LogCaptureFixture) -> None:
    events = Events(open_display(TrainingView(state), io.StringIO()))
    events.note(None)
    (record,) = caplog.records
    assert "PlainDisplay failed and was closed: AttributeError" in record.message
    assert record.exc_info
    events.note("worth another")
    assert len(caplog.records) == 1


def test_sparkline_has_a_fixed_scale_and_width() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.0, 1.0]) == "▁█"
    assert len(sparkline([0.5] * 1000, width=40)) == 40
    assert sparkline([-5.0, 5.0]) == "▁█"


@pytest.mark.parametrize(("seconds", "text"), [(8.31, "8.3s"), (125, "2m05s"), (3840, "1h04m")])
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text
