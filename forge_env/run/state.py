"""Live state of a training run. `Run` updates it; displays read it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any


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


def held_out_scores(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[HeldOutScore]]:
    """Read the held-out scores in rows of metrics, by split in order of appearance, each in order of steps."""
    splits: dict[str, dict[int, HeldOutScore]] = {}
    for row in rows:
        for key, score in row.items():
            if key.startswith("eval/") and key.endswith("/score") and score is not None:
                split, step = key.removeprefix("eval/").removesuffix("/score"), int(row["step"])
                n, stderr = int(row.get(f"eval/{split}/n") or 0), float(row.get(f"eval/{split}/stderr") or 0.0)
                splits.setdefault(split, {})[step] = HeldOutScore(step, split, score, n, stderr)
    return {split: [scores[step] for step in sorted(scores)] for split, scores in splits.items()}


@dataclass(slots=True)
class RunState:
    """Stages, curves, waiting actors and remaining time of a run."""

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
