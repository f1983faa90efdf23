"""What a person sees of a training run while it goes on, as a line and as a panel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from forge_env.display.state import HeldOutScore, RunState, Stage
from forge_env.display.terminal import duration

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


class RunView:
    """A training run, as displays show it: start-up stages, curves, who waits for whom, time left."""

    def __init__(self, state: RunState) -> None:
        self._state = state

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._state.elapsed

    def line(self) -> str | None:
        """The stage's progress and all figures."""
        state = self._state
        if not state.total:
            return None
        parts = [*_field_text(state), *_scores_text(state), *_status_text(state)]
        if waiting := _waiting_text(state):
            parts.append(waiting)
        if (eta := state.eta_s) is not None:
            parts.append(f"{duration(eta)} left")
        name = state.stage.name if state.stage else "run"
        return "  ".join([f"{name} {state.done}/{state.total}", *parts])

    def panel(self) -> RenderableType:
        """The panel of the live display."""
        state = self._state
        parts: list[RenderableType] = [*self._stages(), *self._progress()]
        if state.rewards or state.evaluations:
            parts += [Text(), self._curves()]
        if (figures := _status_text(state)) and not state.exit:
            parts.append(Text("  ".join(figures), style="cyan"))
        if (waiting := _waiting_text(state)) and not state.exit:
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
        parts = [f"{state.done}/{state.total}", *_field_text(state)]
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


def _scores(scores: list[HeldOutScore]) -> str:
    last = scores[-1]
    start = f", from {scores[0].score:.3f}" if len(scores) > 1 else ""
    return f"{last.score:.3f} ± {last.stderr:.3f} (n={last.n}){start}"


def _span(stage: Stage) -> str:
    return duration((stage.ended or stage.started) - stage.started)


def _scores_text(state: RunState) -> list[str]:
    """Reward and held-out score in words, where known."""
    status = state.status
    parts: list[str] = []
    reward = status.get("reward", state.rewards[-1] if state.rewards else None)
    if reward is not None:
        parts.append(f"reward {float(reward):.3f}")
    if state.scores():
        parts.append(f"held-out {state.scores()[-1].score:.3f}")
    return parts


def _status_text(state: RunState) -> list[str]:
    """The other live figures in words, in a fixed order, only those that are known."""
    status = state.status
    parts: list[str] = []
    if (staleness := status.get("staleness")) is not None:
        bound = "" if state.max_staleness is None else f"/{state.max_staleness}"
        parts.append(f"staleness {staleness:g}{bound}")
    if (rate := status.get("tokens_per_s")) is not None:
        parts.append(f"{float(rate):,.0f} tokens/s")
    if (flying := status.get("in_flight")) is not None:
        parts.append(f"{flying} in flight")
    if (buffered := status.get("buffer")) is not None:
        parts.append(f"buffer {buffered}")
    return parts


def _waiting_text(state: RunState) -> str:
    """Who waits for what, or an empty string."""
    waiting = state.status.get("waiting") or {}
    return ", ".join(f"{who} waits for {what}" for who, what in waiting.items() if what)


def _field_text(state: RunState) -> list[str]:
    """The figures that came with `Run.progress`."""
    return [f"{name} {_figure(value)}" for name, value in state.progress_fields.items()]


def _figure(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
