"""What an evaluation shows while it goes on: filled in by the runner, drawn by a display."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import NormalDist

from forge_env.endpoint.limiter import AdaptiveLimiter
from forge_env.evaluation.estimates import clustered
from forge_env.evaluation.metering import Usage
from forge_env.evaluation.plan import SampleResult


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
    usage: Usage = field(default_factory=Usage)
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
