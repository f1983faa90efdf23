"""Typed results of an evaluation; `summary.json` is their JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_env import machine
from forge_env.config.evaluation import EvaluationConfig
from forge_env.evaluation.estimates import Estimate, bounds, mean_of, passes
from forge_env.evaluation.plan import Planned
from forge_env.evaluation.results import Kind, ResultTable
from forge_env.files import write_whole
from forge_env.schema import with_schema

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from forge_env.evaluation.progress import EvaluationProgress


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """Score of the samples of one difficulty or tag."""

    tasks: int
    samples: int
    score: Estimate
    solved: float | None
    """Fraction of samples at or above the success threshold; None if the score of a perfect episode is unknown."""


@dataclass(frozen=True, slots=True)
class EnvironmentSummary:
    """Results of one environment. Samples lost to infrastructure are counted in `invalid` and affect only `bounds`;
    samples in which the environment's code failed are counted in `bugs` and affect `bounds` and `score_with_bugs`."""

    label: str
    split: str
    asked: int
    planned: int
    """Number of requested samples that have tasks; with `gold`, tasks with a reference solution."""
    samples: int
    tasks: int
    """Number of tasks with at least one valid sample."""
    missing: int
    """Number of samples that were not played."""
    invalid: dict[str, int]
    """Number of lost samples by type of error, without bugs of the environment."""
    bugs: int
    first_bug: str | None
    """Error message of the first bug."""
    crashed: int
    """Number of valid samples on which the agent's code failed; each scores 0."""
    first_crash: str | None
    """The first of the agent's exceptions, with its location."""
    truncated: dict[str, int]
    """Number of valid samples that a limit ended, by limit; they keep the score they had by then."""
    score: Estimate | None
    bounds: tuple[float, float] | None
    """The score if every planned sample without one had the lowest or the highest score; None if all have one."""
    untruncated: Estimate | None
    """Score of the samples that no limit ended."""
    score_with_bugs: Estimate | None
    """Score if samples on which the environment's code failed count as 0, so that a scorer that fails on bad answers
    can't raise it. None if there are none."""
    success_threshold: float | None
    """Score from which a task counts as solved; None if unknown, then nothing counts as solved."""
    pass_at: dict[int, Estimate]
    pass_all: dict[int, Estimate]
    by_difficulty: dict[str, GroupSummary]
    by_tag: dict[str, GroupSummary]
    metrics: dict[str, float]
    """Mean of every metric over valid samples."""
    turns: float
    cut_replies: int
    """Number of replies cut off at the token limit per reply."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cost: float
    requests: int
    estimated_requests: int
    """Number of requests whose tokens (and cost) are estimated, since the endpoint did not report them."""
    wall_s: float
    """Mean seconds of a valid sample."""
    waited_s: float
    generate_s: float
    step_s: float
    reset_s: float
    close_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Results of the whole evaluation."""

    model: str
    score_name: str
    epochs: int
    confidence: float
    status: str
    """"complete", "incomplete" (samples are missing) or "lossy" (all played, some lost or failed by a bug)."""
    environments: dict[str, EnvironmentSummary]
    cost: float
    """Total cost, including samples that were lost and played again."""
    prompt_tokens: int
    completion_tokens: int
    wall_s: float
    """Duration, in seconds, of the process that wrote this."""
    request_errors: dict[str, int] = field(default_factory=dict)
    """Failed requests of that process by type, including those whose retry succeeded."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of Python and relevant packages in that process."""
    machine: dict[str, Any] = field(default_factory=dict)
    """Machine of that process: processor, CPUs, memory, GPUs, system."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON-ready dictionary, as in summary.json."""
        return with_schema(dataclasses.asdict(self))

    def write(self, path: Path) -> None:
        """Write as JSON, atomically."""
        write_whole(path, json.dumps(self.to_dict(), indent=2) + "\n")


def summarize(
    config: EvaluationConfig,
    results: ResultTable,
    planned: dict[str, Planned],
    progress: EvaluationProgress,
) -> Summary:
    """Compute the summary of the samples recorded so far.

    Args:
        results: results of samples; of several results of one sample, the last counts.
        progress: usage of the run and errors of this process.
    """
    labels = {label: number for number, label in enumerate(planned)}
    rows = results.latest(lambda label: labels.get(label, -1))
    numbers = results.each(lambda kind: labels.get(kind.environment, -1))[rows]
    environments = {
        label: _environment(config, label, share, _Rows(results, rows[numbers == labels[label]]))
        for label, share in planned.items()
    }
    lost = any(environment.invalid or environment.bugs for environment in environments.values())
    missing = any(environment.missing for environment in environments.values())
    return Summary(
        model=config.model,
        score_name=config.score,
        epochs=config.epochs,
        confidence=config.confidence,
        status="incomplete" if missing else "lossy" if lost else "complete",
        environments=environments,
        cost=progress.usage.cost,
        prompt_tokens=progress.usage.prompt,
        completion_tokens=progress.usage.completion,
        wall_s=progress.elapsed,
        request_errors=dict(progress.request_errors),
        versions=machine.versions(),
        machine=machine.describe(),
    )


class _Rows:
    """Some samples of a table, in columns."""

    def __init__(self, table: ResultTable, rows: NDArray[np.intp]) -> None:
        self.table = table
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def those(self, value: Callable[[Kind], object]) -> _Rows:
        """Samples of the kinds for which `value` is true."""
        return _Rows(self.table, self.rows[self.table.each(lambda kind: bool(value(kind)))[self.rows].astype(bool)])

    def column(self, name: str) -> NDArray[Any]:
        return self.table.column(name)[self.rows]

    def total(self, name: str) -> int:
        return int(self.column(name).sum())

    def average(self, name: str) -> float:
        return float(self.column(name).mean()) if len(self) else 0.0

    def counts(self, value: Callable[[Kind], str | None]) -> dict[str, int]:
        """Number of samples by the value of their kind; None and empty values are not counted."""
        counts: Counter[str] = Counter()
        for number in self.column("kind").tolist():
            if text := value(self.table.kinds[number]):
                counts[text] += 1
        return dict(counts)

    def first_error(self) -> str | None:
        return self.table.result(int(self.rows[0])).error if len(self) else None

    def by_task(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Sum and number of the values of each task's samples, [tasks, 2]."""
        import numpy as np

        _, group = np.unique(self.column("task"), return_inverse=True)
        return np.column_stack([np.bincount(group, weights=values), np.bincount(group)])

    def score(self, config: EvaluationConfig) -> Estimate | None:
        return mean_of(self.by_task(self.column("score")), confidence=config.confidence)


def _environment(config: EvaluationConfig, label: str, planned: Planned, results: _Rows) -> EnvironmentSummary:
    valid = results.those(lambda kind: kind.valid)
    bugs, crashes = results.those(lambda kind: kind.is_bug), results.those(lambda kind: kind.crashed)
    best, highest = _highest(valid), _highest(results)
    threshold = best if config.success is None else config.success
    return EnvironmentSummary(
        label=label,
        split=planned.split,
        asked=planned.asked,
        planned=planned.samples,
        samples=len(valid),
        tasks=len(valid.by_task(valid.column("score"))),
        missing=max(0, planned.samples - len(results)),
        invalid=results.those(lambda kind: not (kind.valid or kind.is_bug)).counts(
            lambda kind: kind.error_kind or "unknown"
        ),
        bugs=len(bugs),
        first_bug=bugs.first_error(),
        crashed=len(crashes),
        first_crash=crashes.first_error(),
        truncated=valid.counts(lambda kind: kind.truncation),
        score=valid.score(config),
        bounds=bounds(valid.column("score").tolist(), planned.samples - len(valid), highest=highest),
        untruncated=valid.those(lambda kind: not kind.truncation).score(config),
        score_with_bugs=_with_zeros(config, results) if len(bugs) else None,
        success_threshold=threshold,
        **_passes(config, valid, threshold),
        by_difficulty=_groups(config, threshold, _by_difficulty(valid)),
        by_tag=_groups(config, threshold, _by_tag(valid)),
        metrics={name: total / len(valid) for name, total in results.table.metric_sums(valid.rows).items()},
        turns=valid.average("turns"),
        cut_replies=valid.total("cut_replies"),
        prompt_tokens=results.total("prompt_tokens"),
        completion_tokens=results.total("completion_tokens"),
        cached_tokens=results.total("cached_tokens"),
        cost=float(results.column("cost").sum()),
        requests=results.total("requests"),
        estimated_requests=results.total("estimated_requests"),
        wall_s=valid.average("wall_s"),
        waited_s=valid.average("waited_s"),
        generate_s=valid.average("generate_s"),
        step_s=valid.average("step_s"),
        reset_s=valid.average("reset_s"),
        close_s=valid.average("close_s"),
    )


def _highest(results: _Rows) -> float | None:
    """Score of a perfect sample; None if unknown."""
    highest = results.column("max_score")  # NaN if unknown
    if not len(results):
        return 1.0
    return None if math.isnan(highest.max()) else float(highest.max())


def _with_zeros(config: EvaluationConfig, results: _Rows) -> Estimate | None:
    """Score if samples on which the environment's code failed count as 0."""
    scored = results.those(lambda kind: kind.valid or kind.is_bug)
    values = scored.column("score") * results.table.each(lambda kind: kind.valid)[scored.rows]
    return mean_of(scored.by_task(values), confidence=config.confidence)


def _passes(config: EvaluationConfig, valid: _Rows, threshold: float | None) -> dict[str, dict[int, Estimate]]:
    if threshold is None:
        return {"pass_at": {}, "pass_all": {}}
    passed = passes(valid.by_task(_solves(valid, threshold)), confidence=config.confidence)
    return {
        "pass_at": {k: at for k, (at, _) in passed.items()},
        "pass_all": {k: all_of for k, (_, all_of) in passed.items()},
    }


def _solves(results: _Rows, threshold: float) -> NDArray[Any]:
    """1 for each sample that solved its task, else 0."""
    return (results.column("score") >= threshold - 1e-9).astype(float)


def _by_difficulty(valid: _Rows) -> Iterator[tuple[str, _Rows]]:
    import numpy as np

    difficulties = valid.column("difficulty")
    for difficulty in np.unique(difficulties):
        yield str(int(difficulty)), _Rows(valid.table, valid.rows[difficulties == difficulty])


def _by_tag(valid: _Rows) -> Iterator[tuple[str, _Rows]]:
    import numpy as np

    if not len(valid):
        return
    kinds = valid.column("kind")
    order = np.argsort(kinds, kind="stable")
    numbers, starts = np.unique(kinds[order], return_index=True)
    members: dict[str, list[NDArray[np.intp]]] = {}
    for number, rows in zip(numbers.tolist(), np.split(valid.rows[order], starts[1:]), strict=True):
        for tag in dict.fromkeys(valid.table.kinds[number].tags):
            members.setdefault(tag, []).append(rows)
    for tag in sorted(members, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name)):
        yield tag, _Rows(valid.table, np.concatenate(members[tag]))


def _groups(
    config: EvaluationConfig, threshold: float | None, groups: Iterable[tuple[str, _Rows]]
) -> dict[str, GroupSummary]:
    summaries = {}
    for name, members in groups:
        score = members.score(config)
        assert score is not None
        solved = None if threshold is None else float(_solves(members, threshold).mean())
        summaries[name] = GroupSummary(len(members.by_task(members.column("score"))), len(members), score, solved)
    return summaries
