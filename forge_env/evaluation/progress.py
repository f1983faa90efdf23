"""What an evaluation shows while it goes on: filled in by the runner, shown as a line or a panel."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import TYPE_CHECKING

from forge_env.display.terminal import duration
from forge_env.endpoint.limiter import AdaptiveLimiter
from forge_env.evaluation.estimates import clustered
from forge_env.evaluation.metering import TokenUsage
from forge_env.evaluation.plan import SampleResult
from forge_env.evaluation.tables import counts

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(slots=True)
class EnvironmentProgress:
    """One environment: counts, and the running mean with its clustered error."""

    total: int
    done: int = 0
    running: int = 0
    truncated: int = 0
    invalid: int = 0
    _totals: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Sum and number of each task's scores."""

    def add(self, result: SampleResult) -> None:
        """Count a sample that is done."""
        self.done += 1
        self.truncated += result.valid and result.truncation is not None
        self.invalid += not result.valid
        if result.valid:
            total, number = self._totals.get(result.task_id, (0.0, 0))
            self._totals[result.task_id] = total + result.score, number + 1

    def mean(self, confidence: float) -> tuple[float, float] | None:
        """Mean so far and half its interval; None before the first valid sample."""
        if not self._totals:
            return None
        middle, error = clustered([*self._totals.values()])
        return middle, NormalDist().inv_cdf((1 + confidence) / 2) * error


@dataclass(slots=True)
class EvaluationProgress:
    """Everything a display may draw."""

    name: str
    model: str
    confidence: float = 0.95
    environments: dict[str, EnvironmentProgress] = field(default_factory=dict)
    usage: TokenUsage = field(default_factory=TokenUsage)
    """Of the whole run, resumed parts included."""
    lost: Counter[str] = field(default_factory=Counter)
    """Samples of this process that were lost, by kind of error."""
    request_errors: Counter[str] = field(default_factory=Counter)
    """Failed requests of this process by kind, those repeated with success included."""
    budget: float | None = None
    priced: bool = False
    limiter: AdaptiveLimiter | None = None
    """Of the endpoint, where there is one."""
    notice: str = ""
    """What is being waited for, or why the run ends early."""
    clock: Callable[[], float] = time.monotonic
    started: float = 0.0
    resumed: int = 0
    """Samples that were done before this process."""
    _tokens_before: int = 0

    def __post_init__(self) -> None:
        self.started = self.clock()

    def begin(self) -> None:
        """Start the clock: what is counted by now is of earlier processes."""
        self.started = self.clock()
        self.resumed = self.done
        self._tokens_before = self.usage.completion

    @property
    def in_flight(self) -> int:
        """Requests that wait for an answer."""
        return 0 if self.limiter is None else self.limiter.in_flight

    @property
    def window(self) -> int:
        """Requests that the endpoint gets at once; 0 without an endpoint."""
        return 0 if self.limiter is None else self.limiter.size

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self.clock() - self.started

    @property
    def done(self) -> int:
        """Samples done."""
        return sum(environment.done for environment in self.environments.values())

    @property
    def total(self) -> int:
        """Samples in all."""
        return sum(environment.total for environment in self.environments.values())

    @property
    def tokens_per_s(self) -> float:
        """Tokens written a second, over this process."""
        return (self.usage.completion - self._tokens_before) / max(self.elapsed, 1e-9)

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the pace of this process."""
        fresh = self.done - self.resumed
        return None if not fresh else (self.total - self.done) * self.elapsed / fresh


class EvaluationView:
    """An evaluation, as displays show it."""

    def __init__(self, progress: EvaluationProgress) -> None:
        self._progress = progress

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._progress.elapsed

    def line(self) -> str:
        """Score so far of every environment, and the figures of the whole."""
        progress = self._progress
        means = [
            f"{label} {item.done}/{item.total} {_mean(progress, label) or f'{item.running} running'}"
            for label, item in progress.environments.items()
        ]
        return "  ".join(["; ".join(means), ", ".join(_figures(progress)), *_errors(progress)])

    def panel(self) -> RenderableType:
        """The panel of the live display."""
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
        parts: list[RenderableType] = [grid, Text("  ".join(_figures(progress)), style="cyan")]
        parts += [Text(line, style="yellow") for line in _errors(progress)]
        if progress.notice:
            parts.append(Text(progress.notice, style="bold yellow"))
        return Panel(Group(*parts), title=f"{progress.name} · {progress.model}", subtitle=duration(progress.elapsed))


def _figures(progress: EvaluationProgress) -> list[str]:
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
        parts.append(f"{duration(eta)} left")
    return parts


def _mean(progress: EvaluationProgress, label: str) -> str:
    found = progress.environments[label].mean(progress.confidence)
    return "" if found is None else f"{found[0]:.3f} ± {found[1]:.3f}"


def _errors(progress: EvaluationProgress) -> list[str]:
    lines = [f"samples lost: {counts(progress.lost)}"] if progress.lost else []
    return lines + ([f"failed requests: {counts(progress.request_errors)}"] if progress.request_errors else [])
