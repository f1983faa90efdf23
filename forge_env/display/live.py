"""The live display on a terminal: start-up stages, curves, who waits for whom, time left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from forge_env.display.plain import field_text, status_text, waiting_text
from forge_env.display.state import Display, Evaluation, RunState, Stage, duration

BLOCKS = "▁▂▃▄▅▆▇█"
SHOWN_WARNINGS = 3


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """`values` in `width` block characters at most; the scale is 0 to 1 where all fit, else their own range."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    bins = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges) if end > start]
    low, high = min(0.0, *bins), max(1.0, *bins)
    if low < 0.0 or high > 1.0:
        low, high = min(bins), max(bins)
    span = (high - low) or 1.0
    return "".join(BLOCKS[min(7, int((value - low) / span * 8))] for value in bins)


class LiveDisplay(Display):
    """A panel that redraws itself four times a second; notes scroll by above it."""

    def __init__(self, state: RunState, stream: TextIO) -> None:
        self._state = state
        self._console = Console(file=stream, highlight=False)
        self._live = Live(
            get_renderable=self._draw,
            console=self._console,
            refresh_per_second=4,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def open(self) -> None:
        """Begin to draw."""
        self._live.start()

    def close(self) -> None:
        """Draw once more and leave it on the screen."""
        self._live.stop()

    def note(self, text: str) -> None:
        """A line above the panel."""
        self._console.print(f"[dim]{duration(self._state.elapsed):>7}[/] {escape(text)}")

    def _draw(self) -> RenderableType:
        state = self._state
        parts: list[RenderableType] = [*self._stages(), *self._progress()]
        if state.rewards or state.evaluations:
            parts += [Text(), self._curves()]
        if (figures := status_text(state)) and not state.exit:
            parts.append(Text("  ".join(figures), style="cyan"))
        if (waiting := waiting_text(state)) and not state.exit:
            parts.append(Text(waiting, style="yellow"))
        for text, count in list(state.warnings.items())[-SHOWN_WARNINGS:]:
            parts.append(Text(f"! {text}" + (f" (x{count})" if count > 1 else ""), style="bold yellow"))
        footer = "finishing; Ctrl-C again stops now" if state.stopping else "Ctrl-C finishes and saves"
        colour = {"": "yellow" if state.stopping else "blue", "success": "green", "failed": "red"}.get(
            state.exit, "yellow"
        )
        return Panel(
            Group(*parts),
            title=f"forge-env · {escape(state.name)}",
            subtitle=f"{duration(state.elapsed)} · {state.exit or footer}",
            border_style=colour,
            padding=(0, 1),
        )

    def _stages(self) -> Iterator[RenderableType]:
        done = [stage for stage in self._state.stages if stage.ended is not None]
        if done:
            yield Text("  ".join(f"✓ {stage.name} {_span(stage)}" for stage in done), style="green")
        if (stage := self._state.stage) is not None:
            text = Text(f"● {stage.name}", style="bold")
            text.append(f" {stage.detail}" if stage.detail else "", style="not bold")
            text.append(f"  {duration(self._state.elapsed - stage.started)}", style="dim")
            yield text

    def _progress(self) -> Iterator[RenderableType]:
        state = self._state
        if not state.total:
            return
        row = Table.grid(padding=(0, 1))
        parts = [f"{state.done}/{state.total}", *field_text(state)]
        if (eta := state.eta_s) is not None and state.done < state.total:
            parts.append(f"{duration(eta)} left")
        row.add_row(ProgressBar(total=state.total, completed=state.done, width=40), "  ".join(parts))
        yield row

    def _curves(self) -> Table:
        table = Table.grid(padding=(0, 1))
        state = self._state
        if state.rewards:
            table.add_row("reward", Text(sparkline(state.rewards), style="cyan"), f"{state.rewards[-1]:.3f}")
        for split in dict.fromkeys(evaluation.split for evaluation in state.evaluations):
            scores = state.scores(split)
            line = Text(sparkline([evaluation.score for evaluation in scores]), style="green")
            table.add_row(f"held-out ({split})", line, _scores(scores))
        return table


def _scores(scores: list[Evaluation]) -> str:
    last = scores[-1]
    start = f", from {scores[0].score:.3f}" if len(scores) > 1 else ""
    return f"{last.score:.3f} ± {last.stderr:.3f} (n={last.n}){start}"


def _span(stage: Stage) -> str:
    return duration((stage.ended or stage.started) - stage.started)
