"""The progress of an evaluation, drawn: a live table on a terminal, sparse lines elsewhere. Tables alike."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TextIO

from forge_env.evaluation.progress import EvaluationProgress
from forge_env.evaluation.tables import Table, counts

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as RichTable

log = logging.getLogger(__name__)
QUIET_S = 15.0
"""Plain lines come at most this often."""
REDRAW_S = 0.25
"""The live panel is drawn at most this often."""


def clock_text(seconds: float) -> str:
    """`8.3s`, `2m05s`, `1h04m`."""
    from forge_env.display.state import duration

    return duration(seconds)


class Display:
    """Draws nothing (tests, embedding)."""

    def open(self) -> None:
        """Begin."""

    def update(self) -> None:
        """A sample is done, or none was for a while."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def close(self) -> None:
        """End."""


def figures(progress: EvaluationProgress) -> list[str]:
    """The figures of the whole run in words."""
    parts = [f"{progress.usage.completion:,} tokens"]
    if progress.tokens_per_s >= 1:
        parts.append(f"{progress.tokens_per_s:,.0f} tokens/s")
    if progress.priced:
        bound = "" if progress.budget is None else f" of {progress.budget:g}"
        parts.append(f"cost {progress.usage.cost:.4g}{bound}")
    if progress.window:
        parts.append(f"{progress.in_flight}/{progress.window} requests in flight")
    if (eta := progress.eta_s) is not None and progress.done < progress.total:
        parts.append(f"{clock_text(eta)} left")
    return parts


def _mean(progress: EvaluationProgress, label: str) -> str:
    found = progress.environments[label].mean(progress.confidence)
    return "" if found is None else f"{found[0]:.3f} ± {found[1]:.3f}"


def _errors(progress: EvaluationProgress) -> list[str]:
    lines = [f"samples lost: {counts(progress.lost)}"] if progress.lost else []
    return lines + ([f"failed requests: {counts(progress.request_errors)}"] if progress.request_errors else [])


class PlainDisplay(Display):
    """A line now and then."""

    def __init__(self, progress: EvaluationProgress, stream: TextIO) -> None:
        self._progress = progress
        self._stream = stream
        self._last = 0.0

    def note(self, text: str) -> None:
        """The text, with the time in front."""
        self._stream.write(f"[{clock_text(self._progress.elapsed):>7}] {text}\n")
        self._stream.flush()

    def update(self) -> None:
        """A line, when none came for a while."""
        progress = self._progress
        if progress.elapsed - self._last < QUIET_S:
            return
        self._last = progress.elapsed
        means = [
            f"{label} {item.done}/{item.total} {_mean(progress, label) or f'{item.running} running'}"
            for label, item in progress.environments.items()
        ]
        self.note("  ".join(["; ".join(means), ", ".join(figures(progress)), *_errors(progress)]))


class LiveDisplay(Display):
    """A panel, drawn again a few times a second.

    Only whoever calls draws, never a thread of rich's: what is drawn changes in the event loop meanwhile.
    """

    def __init__(self, progress: EvaluationProgress, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        class Plain(Console):
            def on_broken_pipe(self) -> None:  # rich's own ends the program
                raise BrokenPipeError("nobody reads it any more")

        self._progress = progress
        self._last = -math.inf
        self._console = Plain(file=stream, highlight=False, emoji=False)
        self._live = Live(
            get_renderable=self._draw,
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def open(self) -> None:
        """Begin to draw."""
        self._live.start()
        self.update()

    def update(self) -> None:
        """Draw again, unless that was just done."""
        now = self._progress.clock()
        if now - self._last >= REDRAW_S:
            self._last = now
            self._live.refresh()

    def note(self, text: str) -> None:
        """A line above the panel."""
        from rich.markup import escape

        self._console.print(escape(text))

    def close(self) -> None:
        """Draw once more and leave it on the screen."""
        self._live.stop()

    def _draw(self) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table as Grid
        from rich.text import Text

        progress = self._progress
        grid = Grid.grid(padding=(0, 2))
        for label, item in progress.environments.items():
            notes = [f"{item.running} running"]
            notes += [f"{item.truncated} truncated"] if item.truncated else []
            notes += [f"{item.invalid} lost"] if item.invalid else []
            bar = ProgressBar(total=item.total, completed=item.done, width=24)
            grid.add_row(label, bar, f"{item.done}/{item.total}", _mean(progress, label), ", ".join(notes))
        parts: list[RenderableType] = [grid, Text("  ".join(figures(progress)), style="cyan")]
        parts += [Text(line, style="yellow") for line in _errors(progress)]
        if progress.notice:
            parts.append(Text(progress.notice, style="bold yellow"))
        return Panel(Group(*parts), title=f"{progress.name} · {progress.model}", subtitle=clock_text(progress.elapsed))


class ForgivingDisplay(Display):
    """Draws with another display for as long as that works: a run is worth more than its picture."""

    def __init__(self, inner: Display) -> None:
        self._inner: Display | None = inner

    def open(self) -> None:
        """Begin."""
        self._try(lambda inner: inner.open())

    def update(self) -> None:
        """A sample is done, or none was for a while."""
        self._try(lambda inner: inner.update())

    def note(self, text: str) -> None:
        """Something worth a line."""
        self._try(lambda inner: inner.note(text))

    def close(self) -> None:
        """End."""
        self._try(lambda inner: inner.close())

    def _try(self, draw: Callable[[Display], object]) -> None:
        if self._inner is None:
            return
        try:
            draw(self._inner)
        except Exception as error:  # noqa: BLE001 - whatever drawing raises (a reader gone, rich): the run goes on
            self._inner = None
            log.warning("progress is no longer drawn: %s: %s", type(error).__name__, error)


def open_display(progress: EvaluationProgress, stream: TextIO) -> Display:
    """The display that fits the stream; it never raises."""
    return ForgivingDisplay(LiveDisplay(progress, stream) if stream.isatty() else PlainDisplay(progress, stream))


async def now_and_then(display: Display) -> None:
    """Show what goes on also while no sample ends; displays draw no more often than they like."""
    while True:
        await asyncio.sleep(min(REDRAW_S, QUIET_S))
        display.update()


def print_tables(tables: Iterable[Table], notes: Iterable[str], stream: TextIO) -> None:
    """Tables for a person to read."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(file=stream, highlight=False, emoji=False, width=None if stream.isatty() else 160)
    for table in tables:
        console.print(_rich(table))
    for note in notes:
        console.print(f"[dim]{escape(note)}[/]")


def _rich(table: Table) -> RichTable:
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table as RichTable

    drawn = RichTable(title=escape(table.title), box=SIMPLE, title_justify="left")
    for number, column in enumerate(table.columns):
        drawn.add_column(escape(column), justify="left" if number == 0 else "right")
    for row in table.rows:
        drawn.add_row(*map(escape, row))
    return drawn
