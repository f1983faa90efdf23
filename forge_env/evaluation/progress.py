"""Progress of a running evaluation: updated by the runner, displayed as a line or a panel."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forge_env.endpoint.limiter import AdaptiveLimiter
from forge_env.evaluation.estimates import TaskScores
from forge_env.evaluation.metering import TokenUsage
from forge_env.evaluation.plan import SampleResult
from forge_env.evaluation.tables import counted, counts
from forge_env.figures import duration
from forge_env.visible import one_line, visible

if TYPE_CHECKING:
    from rich.console import RenderableType


NAME, BAR, WIDEST = 36, 14, 160
"""Terminal cells of a name and of a bar, so that an environment fits a line of 80 columns; maximum characters of an
error line."""


@dataclass(slots=True)
class EnvironmentProgress:
    """Counts of one environment, and its current mean with clustered error."""

    total: int
    done: int = 0
    running: int = 0
    truncated: int = 0
    invalid: int = 0
    crashed: int = 0
    bugs: int = 0
    _scores: TaskScores = field(default_factory=TaskScores)

    def add(self, result: SampleResult) -> None:
        """Count a finished sample."""
        self.done += 1
        self.truncated += result.valid and result.truncation is not None
        self.invalid += not result.valid and not result.is_bug
        self.bugs += result.is_bug
        self.crashed += result.crashed
        if result.valid:
            self._scores.add(result.task_id, result.score)

    def said(self) -> str:
        """Current mean and standard error, `0.812 ± 0.013`; empty before the first valid sample."""
        if not self._scores.samples:
            return ""
        middle, error = self._scores.so_far()
        return f"{middle:.3f} ± {error:.3f}"


@dataclass(slots=True)
class EvaluationProgress:
    """Everything that a display may draw, as a line or a panel (`forge_env.terminal.View`)."""

    name: str
    model: str
    environments: dict[str, EnvironmentProgress] = field(default_factory=dict)
    usage: TokenUsage = field(default_factory=TokenUsage)
    """Usage of the whole run, including earlier processes."""
    lost: Counter[str] = field(default_factory=Counter)
    """Samples that this process lost, by type of error."""
    request_errors: Counter[str] = field(default_factory=Counter)
    """Failed requests of this process by type, including those whose retry succeeded."""
    budget: float | None = None
    priced: bool = False
    limiter: AdaptiveLimiter | None = None
    notice: str = ""
    """Reason for waiting, or for ending early."""
    started: float = field(default_factory=time.monotonic)
    resumed: int = 0
    """Number of samples finished before this process."""
    _tokens_before: int = 0

    def begin(self) -> None:
        """Start the clock; everything counted so far belongs to earlier processes."""
        self.started = time.monotonic()
        self.resumed = self.done
        self._tokens_before = self.usage.completion

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @property
    def done(self) -> int:
        """Number of finished samples."""
        return sum(environment.done for environment in self.environments.values())

    @property
    def total(self) -> int:
        """Number of all samples."""
        return sum(environment.total for environment in self.environments.values())

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens per second of this process."""
        return (self.usage.completion - self._tokens_before) / max(self.elapsed, 1e-9)

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds left at the pace of this process."""
        fresh = self.done - self.resumed
        return None if not fresh else (self.total - self.done) * self.elapsed / fresh

    def line(self) -> str:
        """One line with every environment's score so far and the figures of the whole run."""
        means = [
            f"{label} {item.done}/{item.total} {item.said() or f'{item.running} running'}"
            for label, item in self.environments.items()
        ]
        return "  ".join(["; ".join(means), ", ".join(self._figures()), *self._errors()])

    def panel(self) -> RenderableType:
        """The panel of the live display."""
        from rich.console import Group
        from rich.markup import escape
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table as Grid
        from rich.text import Text

        grid = Grid.grid(padding=(0, 2))
        grid.add_column(no_wrap=True, overflow="ellipsis", max_width=NAME)
        for label, item in self.environments.items():
            bar = ProgressBar(total=item.total, completed=item.done, width=BAR)
            grid.add_row(visible(label), bar, f"{item.done}/{item.total}", item.said())
        played = [f"{sum(item.running for item in self.environments.values())} running"]
        if truncated := sum(item.truncated for item in self.environments.values()):
            played.append(f"{truncated} truncated")
        parts: list[RenderableType] = [grid, Text("  ".join([*played, *self._figures()]), style="cyan")]
        lines = (one_line(line, WIDEST) for line in self._errors())
        parts += [Text(line, style="yellow", no_wrap=True, overflow="ellipsis") for line in lines]
        if self.notice:
            parts.append(Text(visible(self.notice), style="bold yellow"))
        subtitle = f"{duration(self.elapsed)} · ± is the standard error"
        return Panel(Group(*parts), title=f"{escape(self.name)} · {escape(self.model)}", subtitle=subtitle)

    def _figures(self) -> list[str]:
        """Descriptions of the whole run's tokens, cost, requests and remaining time."""
        parts = [f"{self.usage.completion:,} tokens"]
        if self.tokens_per_s >= 1:
            parts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        if self.priced:
            bound = "" if self.budget is None else f" of {self.budget:g}"
            parts.append(f"cost {self.usage.cost:.4g}{bound}")
        if self.limiter is not None:
            parts.append(f"{self.limiter.in_flight}/{self.limiter.size} requests in flight")
        if (eta := self.eta_s) is not None and self.done < self.total:
            parts.append(f"{duration(eta)} left")
        return parts

    def _errors(self) -> list[str]:
        bugs = {label: item.bugs for label, item in self.environments.items() if item.bugs}
        lines = [f"bugs in the environment: {counts(bugs)}"] if bugs else []
        if crashed := sum(item.crashed for item in self.environments.values()):
            lines.append(f"agent crashed on {counted(crashed, 'sample')}, scored 0")
        lost = sum(item.invalid for item in self.environments.values())
        lines += [f"{counted(lost, 'sample')} lost: {counts(self.lost)}"] if self.lost else []
        return lines + ([f"failed requests: {counts(self.request_errors)}"] if self.request_errors else [])
