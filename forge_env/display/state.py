"""Live state of a training run: filled in by `Run`, drawn as a line or a panel."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from forge_env.terminal import duration
from forge_env.visible import one_line, visible

if TYPE_CHECKING:
    from rich.console import RenderableType

BLOCKS = "▁▂▃▄▅▆▇█"
SHOWN_WARNINGS = 3
SPARKLINE = 24
"""Width of a curve in characters: with its name and last value it fits into 80 columns."""
SHOWN_CHARACTERS = 160
"""Maximum characters of a warning; run.log has all of it."""


@dataclass(slots=True)
class Stage:
    """A stage of the run."""

    name: str
    detail: str
    started: float
    """Seconds since the run's start."""
    ended: float | None = None


@dataclass(frozen=True, slots=True)
class HeldOutScore:
    """One held-out score."""

    step: int
    split: str
    score: float
    n: int
    """Number of valid episodes."""
    stderr: float
    versions: Mapping[int, int] = field(default_factory=dict)
    """Number of tokens sampled by each policy version, if known."""

    @property
    def played_by(self) -> str:
        """The policy versions that sampled it, in words; empty if unknown, or if all tokens are of version `step`."""
        if set(self.versions) <= {self.step}:
            return ""
        most, tokens = max(self.versions.items(), key=itemgetter(1))
        share = tokens / sum(self.versions.values())
        if len(self.versions) == 1:
            return f"played by version {most}"
        return f"played by versions {min(self.versions)} to {max(self.versions)}, {share:.0%} by {most}"


@dataclass(slots=True)
class RunState:
    """Everything that a display may draw: stages, curves, waiting actors, time left."""

    name: str
    split: str = "eval"
    """The split with the headline score."""
    max_staleness: int | None = None
    clock: Callable[[], float] = time.monotonic
    started: float = 0.0
    stages: list[Stage] = field(default_factory=list)
    done: int = 0
    total: int = 0
    """Progress of the current stage; 0 if unknown."""
    progress_fields: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    saved: int | None = None
    """Steps of the newest checkpoint, 0 without one; None if the trainer doesn't report it."""
    rewards: list[float] = field(default_factory=list)
    evaluations: list[HeldOutScore] = field(default_factory=list)
    warnings: dict[str, int] = field(default_factory=dict)
    """Messages and how often each occurred."""
    stopping: bool = False
    exit: str = ""
    """How the run ended; empty until then."""

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self.clock() - self.started

    @property
    def stage(self) -> Stage | None:
        """The current stage."""
        return self.stages[-1] if self.stages and self.stages[-1].ended is None else None

    @property
    def eta_s(self) -> float | None:
        """Seconds left: the trainer's estimate if there is one, else extrapolated from the current stage."""
        if (estimate := self.status.get("eta_s")) is not None:
            return float(estimate)
        if self.stage is None or not 0 < self.done <= self.total:
            return None
        return (self.total - self.done) * (self.elapsed - self.stage.started) / self.done

    def scores(self, split: str | None = None) -> list[HeldOutScore]:
        """List the evaluations of one split (default: the headline split) in order."""
        return [evaluation for evaluation in self.evaluations if evaluation.split == (split or self.split)]

    def line(self) -> str | None:
        """Return the stage's progress and all figures in one line."""
        if not self.total:
            return None
        parts = [*self._fields(), *self._scores(), *self._figures(), *self._waits()]
        if (eta := self.eta_s) is not None:
            parts.append(f"{duration(eta)} left")
        name = self.stage.name if self.stage else "run"
        return "  ".join([f"{name} {self.done}/{self.total}", *parts])

    def panel(self) -> RenderableType:
        """Return the panel of the live display."""
        from rich.console import Group
        from rich.markup import escape
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        parts: list[RenderableType] = []
        ended = [(stage.name, stage.ended - stage.started) for stage in self.stages if stage.ended is not None]
        if ended:
            done = "  ".join(f"✓ {name} {duration(seconds)}" for name, seconds in ended)
            parts.append(Text(done, style="green", no_wrap=True, overflow="ellipsis"))
        if (stage := self.stage) is not None:
            detail, spent = f" {visible(stage.detail)}" if stage.detail else "", duration(self.elapsed - stage.started)
            parts.append(Text.assemble((f"● {stage.name}", "bold"), detail, (f"  {spent}", "dim")))
        if self.total:
            bar = ProgressBar(total=self.total, completed=self.done, width=40)
            left = [f"{duration(self.eta_s)} left"] if self.eta_s is not None and self.done < self.total else []
            row = Table.grid(padding=(0, 1))
            row.add_row(bar, "  ".join([f"{self.done}/{self.total}", *self._fields(), *left]))
            parts.append(row)
        if self.rewards or self.evaluations:
            table = Table.grid(padding=(0, 1))
            for name, values, latest in self._curves():
                drawn = Text(sparkline(values, SPARKLINE), style="cyan" if name == "reward" else "green")
                table.add_row(name, drawn, Text(latest, no_wrap=True, overflow="ellipsis"))
            parts += [Text(), table]
        if (figures := self._figures()) and not self.exit:
            parts.append(Text("  ".join(figures), style="cyan"))
        if (waiting := self._waits()) and not self.exit:
            parts.append(Text(waiting[0], style="yellow"))
        for text, count in list(self.warnings.items())[-SHOWN_WARNINGS:]:
            times = f" (x{count})" if count > 1 else ""
            warning = f"!{times} {one_line(text, SHOWN_CHARACTERS)}"
            parts.append(Text(warning, style="bold yellow", no_wrap=True, overflow="ellipsis"))
        footer = "finishing; Ctrl-C again stops now" if self.stopping else "Ctrl-C finishes and saves"
        under_way = "yellow" if self.stopping else "blue"
        return Panel(
            Group(*parts),
            title=f"forge-env · {escape(self.name)}",
            subtitle=f"{duration(self.elapsed)} · {self.exit or footer}",
            border_style={"": under_way, "success": "green", "failed": "red"}.get(self.exit, "yellow"),
            padding=(0, 1),
        )

    def _curves(self) -> Iterator[tuple[str, list[float], str]]:
        """Yield the curves of reward and held-out scores: name, values, and the last value in words."""
        if self.rewards:
            yield "reward", self.rewards, f"{self.rewards[-1]:.3f}"
        for split in dict.fromkeys(evaluation.split for evaluation in self.evaluations):
            scores = self.scores(split)
            first, last = scores[0], scores[-1]
            start = f", from {first.score:.3f}" if len(scores) > 1 else ""
            latest = f"{last.score:.3f} ± {last.stderr:.3f} (n={last.n}){start}"
            latest += f"; {last.played_by}" if last.played_by else ""
            yield f"held-out ({split})", [evaluation.score for evaluation in scores], latest

    def _scores(self) -> Iterator[str]:
        """Yield reward and held-out score in words, if known."""
        reward = self.status.get("reward", self.rewards[-1] if self.rewards else None)
        if reward is not None:
            yield f"reward {float(reward):.3f}"
        if scores := self.scores():
            yield f"held-out {scores[-1].score:.3f}"

    def _figures(self) -> list[str]:
        """List the other live figures in words, in a fixed order; unknown ones are left out."""
        parts: list[str] = []
        if (staleness := self.status.get("staleness")) is not None:
            bound = "" if self.max_staleness is None else f"/{self.max_staleness}"
            parts.append(f"staleness {staleness:g}{bound}")
        if (rate := self.status.get("tokens_per_s")) is not None:
            parts.append(f"{float(rate):,.0f} tokens/s")
        if (flying := self.status.get("in_flight")) is not None:
            parts.append(f"{flying} in flight")
        if (buffered := self.status.get("buffer")) is not None:
            parts.append(f"buffer {buffered}")
        return parts

    def _waits(self) -> list[str]:
        """Return a text that lists which actors wait for what, or no text if none waits."""
        waiting = self.status.get("waiting") or {}
        text = ", ".join(f"{who} waits for {what}" for who, what in waiting.items() if what)
        return [text] if text else []

    def _fields(self) -> list[str]:
        """List the figures given to `Run.progress`."""
        return [f"{name} {_figure(value)}" for name, value in self.progress_fields.items()]


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
