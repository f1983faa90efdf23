"""What a training run shows while it goes on: filled in by `Run`, shown by `forge_env.display.run_view`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Stage:
    """A phase of the run."""

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
    """Episodes that counted."""
    stderr: float


@dataclass(slots=True)
class RunState:
    """Everything a display may draw."""

    name: str
    split: str = "eval"
    """The split whose score is the headline."""
    max_staleness: int | None = None
    clock: Callable[[], float] = time.monotonic
    started: float = 0.0
    stages: list[Stage] = field(default_factory=list)
    done: int = 0
    total: int = 0
    """Progress of the current stage; 0 when unknown."""
    progress_fields: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    saved: int | None = None
    """Steps of the newest checkpoint, 0 without one; None where the trainer doesn't say."""
    rewards: list[float] = field(default_factory=list)
    evaluations: list[HeldOutScore] = field(default_factory=list)
    warnings: dict[str, int] = field(default_factory=dict)
    """Message and how often it came."""
    stopping: bool = False
    exit: str = ""
    """How the run ended, once it has."""

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self.clock() - self.started

    @property
    def stage(self) -> Stage | None:
        """The stage under way."""
        return self.stages[-1] if self.stages and self.stages[-1].ended is None else None

    @property
    def eta_s(self) -> float | None:
        """Seconds left: what the trainer says, else the pace of the current stage carried on."""
        if (said := self.status.get("eta_s")) is not None:
            return float(said)
        if self.stage is None or not 0 < self.done <= self.total:
            return None
        return (self.total - self.done) * (self.elapsed - self.stage.started) / self.done

    def scores(self, split: str | None = None) -> list[HeldOutScore]:
        """Evaluations of one split (default: the headline split) in order."""
        return [evaluation for evaluation in self.evaluations if evaluation.split == (split or self.split)]
