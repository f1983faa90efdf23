"""Terminal view of a training run: its state as one line and as a panel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from forge_env.figures import duration
from forge_env.figures import state as state_name
from forge_env.run.state import RunState
from forge_env.visible import one_line, visible

if TYPE_CHECKING:
    from rich.console import RenderableType

BLOCKS = "▁▂▃▄▅▆▇█"
SHOWN_WARNINGS = 3
SPARKLINE = 24
"""Width of a curve in characters: with its name and last value it fits into 80 columns."""
SHOWN_CHARACTERS = 160
"""Maximum characters of a warning; run.log has all of it."""


class TrainingView:
    """View of a run's state for a terminal display (`forge_env.terminal.View`)."""

    def __init__(self, state: RunState) -> None:
        self._state = state

    @property
    def elapsed(self) -> float:
        """Seconds since the run's start."""
        return self._state.elapsed

    def line(self) -> str | None:
        """Return the stage's progress and all figures in one line."""
        if not self._state.total:
            return None
        parts = [*self._fields(), *self._scores(), *self._figures(), *self._waits()]
        if (eta := self._state.eta_s) is not None:
            parts.append(f"{duration(eta)} left")
        name = self._state.stage.name if self._state.stage else "run"
        return "  ".join([f"{name} {self._state.done}/{self._state.total}", *parts])

    def panel(self) -> RenderableType:
        """Return the panel of the live display."""
        from rich.console import Group
        from rich.markup import escape
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        state = self._state
        parts: list[RenderableType] = []
        ended = [(stage.name, stage.ended - stage.started) for stage in state.stages if stage.ended is not None]
        if ended:
            done = "  ".join(f"✓ {name} {duration(seconds)}" for name, seconds in ended)
            parts.append(Text(done, style="green", no_wrap=True, overflow="ellipsis"))
        if (stage := state.stage) is not None:
            detail, spent = (
                f" {visible(stage.detail)}" if stage.detail else "",
                duration(state.elapsed - stage.started),
            )
            parts.append(Text.assemble((f"● {stage.name}", "bold"), detail, (f"  {spent}", "dim")))
        if state.total:
            bar = ProgressBar(total=state.total, completed=state.done, width=40)
            left = [f"{duration(state.eta_s)} left"] if state.eta_s is not None and state.done < state.total else []
            row = Table.grid(padding=(0, 1))
            row.add_row(bar, "  ".join([f"{state.done}/{state.total}", *self._fields(), *left]))
            parts.append(row)
        if state.rewards or state.evaluations:
            table = Table.grid(padding=(0, 1))
            for name, values, latest in self._curves():
                drawn = Text(sparkline(values, SPARKLINE), style="cyan" if name == "reward" else "green")
                table.add_row(name, drawn, Text(latest, no_wrap=True, overflow="ellipsis"))
            parts += [Text(), table]
        if (figures := self._figures()) and not state.exit:
            parts.append(Text("  ".join(figures), style="cyan"))
        if (waiting := self._waits()) and not state.exit:
            parts.append(Text(waiting[0], style="yellow"))
        for text, count in list(state.warnings.items())[-SHOWN_WARNINGS:]:
            times = f" (x{count})" if count > 1 else ""
            warning = f"!{times} {one_line(text, SHOWN_CHARACTERS)}"
            parts.append(Text(warning, style="bold yellow", no_wrap=True, overflow="ellipsis"))
        footer = "stopping; Ctrl-C again stops immediately" if state.stopping else "Ctrl-C stops and saves"
        under_way = "yellow" if state.stopping else "blue"
        return Panel(
            Group(*parts),
            title=f"forge-env · {escape(state.name)}",
            subtitle=f"{duration(state.elapsed)} · {state_name(state.exit) or footer}",
            border_style={"": under_way, "success": "green", "failed": "red"}.get(state.exit, "yellow"),
            padding=(0, 1),
        )

    def _curves(self) -> Iterator[tuple[str, list[float], str]]:
        """Yield the curves of reward and held-out scores: name, values, and the last value in words."""
        if self._state.rewards:
            yield "reward", self._state.rewards, f"{self._state.rewards[-1]:.3f}"
        for split in dict.fromkeys(evaluation.split for evaluation in self._state.evaluations):
            scores = self._state.scores(split)
            first, last = scores[0], scores[-1]
            start = f", from {first.score:.3f}" if len(scores) > 1 else ""
            latest = f"{last.score:.3f} ± {last.stderr:.3f} (n={last.n}){start}"
            latest += f"; {last.played_by}" if last.played_by else ""
            yield f"held-out ({split})", [evaluation.score for evaluation in scores], latest

    def _scores(self) -> Iterator[str]:
        """Yield reward and held-out score in words, if known."""
        reward = self._state.status.get("reward", self._state.rewards[-1] if self._state.rewards else None)
        if reward is not None:
            yield f"reward {float(reward):.3f}"
        if scores := self._state.scores():
            yield f"held-out {scores[-1].score:.3f}"

    def _figures(self) -> list[str]:
        """List the other live figures in words, in a fixed order; unknown ones are left out."""
        parts: list[str] = []
        if (staleness := self._state.status.get("staleness")) is not None:
            bound = "" if self._state.max_staleness is None else f"/{self._state.max_staleness}"
            parts.append(f"staleness {staleness:g}{bound}")
        if cut := self._state.status.get("cut"):
            parts.append(f"{cut:.0%} of replies cut")
        if (rate := self._state.status.get("tokens_per_s")) is not None:
            parts.append(f"{float(rate):,.0f} tokens/s")
        if (flying := self._state.status.get("in_flight")) is not None:
            parts.append(f"{flying} in flight")
        if (buffered := self._state.status.get("buffer")) is not None:
            parts.append(f"buffer {buffered}")
        return parts

    def _waits(self) -> list[str]:
        """Return a text that lists which actors wait for what, or no text if none waits."""
        waiting = self._state.status.get("waiting") or {}
        text = ", ".join(f"{who} waiting for {what}" for who, what in waiting.items() if what)
        return [text] if text else []

    def _fields(self) -> list[str]:
        """List the figures given to `Run.progress`."""
        return [f"{name} {_figure(value)}" for name, value in self._state.progress_fields.items()]


def _figure(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Draw `values` with at most `width` block characters; scaled from 0 to 1 if all fit, else to their own range."""
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
