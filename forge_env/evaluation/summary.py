"""What came of an evaluation, as typed figures; `summary.json` is their JSON."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_env import machine
from forge_env.config.evaluation import EvaluationConfig
from forge_env.evaluation.estimates import Estimate, bounds, by_task, mean, passes
from forge_env.evaluation.plan import Planned, SampleResult
from forge_env.files import write_whole
from forge_env.schema import with_schema

if TYPE_CHECKING:
    from forge_env.evaluation.progress import EvaluationProgress


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """Score of the samples of one difficulty or tag."""

    tasks: int
    samples: int
    score: Estimate
    solved: float | None
    """Fraction of its samples; None if the score of a perfect episode is unknown."""
    """Share of samples at or above the threshold of success."""


@dataclass(frozen=True, slots=True)
class EnvironmentSummary:
    """One environment's figures. Samples lost to infrastructure are counted in `invalid` and affect only `bounds`;
    samples in which the environment's code failed are counted in `bugs` and affect `bounds` and `score_with_bugs`."""

    label: str
    split: str
    asked: int
    """Samples asked for."""
    planned: int
    """Requested samples for which there are tasks; with `gold`, tasks with a reference solution."""
    samples: int
    """Valid ones."""
    tasks: int
    """Tasks with at least one valid sample."""
    missing: int
    """Samples that were not played."""
    invalid: dict[str, int]
    """Lost samples by kind of error; bugs of the environment are no losses."""
    bugs: int
    """Samples on which the environment's own code failed."""
    first_bug: str | None
    """What it said of the first of them."""
    crashed: int
    """Valid samples on which the agent's own code failed; each scores 0."""
    first_crash: str | None
    """The first of these exceptions, with its location."""
    truncated: dict[str, int]
    """Valid samples that a limit ended, by limit; their score is what they had by then."""
    score: Estimate | None
    bounds: tuple[float, float] | None
    """The score if every planned sample without one had the lowest or the highest score; None if all have one."""
    untruncated: Estimate | None
    """Score of those that no limit ended."""
    score_with_bugs: Estimate | None
    """Score with those counted as 0 on which the environment's own code failed: a scorer that fails on bad answers
    can't raise this one. None where there are none."""
    success_threshold: float | None
    """Score from which a task counts as solved; None if unknown, then nothing counts as solved."""
    pass_at: dict[int, Estimate]
    pass_all: dict[int, Estimate]
    by_difficulty: dict[str, GroupSummary]
    by_tag: dict[str, GroupSummary]
    metrics: dict[str, float]
    """Mean of every metric over valid samples."""
    turns: float
    """Mean a valid sample."""
    cut_replies: int
    """Replies that ended at the limit of one reply's tokens."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cost: float
    requests: int
    estimated_requests: int
    """Of these, those whose tokens (and cost) are estimated: the endpoint did not tell them."""
    wall_s: float
    """Mean seconds of a valid sample."""
    waited_s: float
    generate_s: float
    step_s: float
    reset_s: float
    close_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The whole evaluation."""

    model: str
    score_name: str
    epochs: int
    confidence: float
    status: str
    """"complete", "incomplete" (samples are missing) or "lossy" (all played, some lost or failed by a bug)."""
    environments: dict[str, EnvironmentSummary]
    cost: float
    """Of everything, samples that were lost and played again included."""
    prompt_tokens: int
    completion_tokens: int
    wall_s: float
    """Of the process that wrote this."""
    request_errors: dict[str, int] = field(default_factory=dict)
    """Failed requests of that process by kind, those repeated with success included."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of Python and the packages that matter, in that process."""
    machine: dict[str, Any] = field(default_factory=dict)
    """On which it ran: processor, CPUs, memory, GPUs, system."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, as in summary.json."""
        return with_schema(dataclasses.asdict(self))

    def write(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        write_whole(path, json.dumps(self.to_dict(), indent=2) + "\n")


def summarize(
    config: EvaluationConfig,
    results: Iterable[SampleResult],
    planned: dict[str, Planned],
    progress: EvaluationProgress,
) -> Summary:
    """Figures of the samples that are there.

    Args:
        config: the evaluation.
        results: one for each sample.
        planned: samples by label.
        progress: has what was used, and what this process met.
    """
    by_label: dict[str, list[SampleResult]] = {label: [] for label in planned}
    for result in results:
        if result.environment in by_label:
            by_label[result.environment].append(result)
    environments = {label: _environment(config, label, own, by_label[label]) for label, own in planned.items()}
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


def _environment(
    config: EvaluationConfig, label: str, planned: Planned, results: list[SampleResult]
) -> EnvironmentSummary:
    valid = [result for result in results if result.valid]
    ordered = sorted(results, key=lambda result: result.id)
    bugs, crashes = [own for own in ordered if own.is_bug], [own for own in ordered if own.crashed]
    best, highest = _highest(valid), _highest(results)
    threshold = best if config.success is None else config.success
    passed = {} if threshold is None else passes(_by_task(valid), threshold, confidence=config.confidence)
    names = dict.fromkeys(name for result in valid for name in result.metrics)

    def average(value: Callable[[SampleResult], float]) -> float:
        return sum(map(value, valid)) / len(valid) if valid else 0.0

    return EnvironmentSummary(
        label=label,
        split=planned.split,
        asked=planned.asked,
        planned=planned.samples,
        samples=len(valid),
        tasks=len({result.task_id for result in valid}),
        missing=max(0, planned.samples - len(results)),
        invalid=dict(
            Counter(result.error_kind or "unknown" for result in results if not (result.valid or result.is_bug))
        ),
        bugs=len(bugs),
        first_bug=bugs[0].error if bugs else None,
        crashed=len(crashes),
        first_crash=crashes[0].error if crashes else None,
        truncated=dict(Counter(result.truncation for result in valid if result.truncation)),
        score=mean(_by_task(valid), confidence=config.confidence),
        bounds=bounds([result.score for result in valid], planned.samples - len(valid), highest=highest),
        untruncated=mean(_by_task([item for item in valid if not item.truncation]), confidence=config.confidence),
        score_with_bugs=mean(_by_task([*valid, *bugs], zeros=True), confidence=config.confidence) if bugs else None,
        success_threshold=threshold,
        pass_at={k: at for k, (at, _) in passed.items()},
        pass_all={k: all_of for k, (_, all_of) in passed.items()},
        by_difficulty=_groups(config, valid, threshold, lambda result: [str(result.difficulty)]),
        by_tag=_groups(config, valid, threshold, lambda result: result.tags),
        metrics={name: average(lambda result, name=name: result.metrics.get(name, 0.0)) for name in names},  # type: ignore[misc]
        turns=average(lambda result: result.turns),
        cut_replies=sum(result.cut_replies for result in valid),
        prompt_tokens=sum(result.prompt_tokens for result in results),
        completion_tokens=sum(result.completion_tokens for result in results),
        cached_tokens=sum(result.cached_tokens for result in results),
        cost=sum(result.cost for result in results),
        requests=sum(result.requests for result in results),
        estimated_requests=sum(result.estimated_requests for result in results),
        wall_s=average(lambda result: result.wall_s),
        waited_s=average(lambda result: result.waited_s),
        generate_s=average(lambda result: result.generate_s),
        step_s=average(lambda result: result.step_s),
        reset_s=average(lambda result: result.reset_s),
        close_s=average(lambda result: result.close_s),
    )


def _highest(results: Sequence[SampleResult]) -> float | None:
    """Score of a perfect sample; None if unknown."""
    known = [result.max_score for result in results if result.max_score is not None]
    return max(known, default=1.0) if len(known) == len(results) else None


def _by_task(results: Sequence[SampleResult], *, zeros: bool = False) -> list[list[float]]:
    """Scores of each task; with `zeros`, invalid samples count as 0."""
    ordered = sorted(results, key=lambda result: result.id)
    scores = ((result.task_id, 0.0 if zeros and not result.valid else result.score) for result in ordered)
    return [*by_task(scores).values()]


def _groups(
    config: EvaluationConfig,
    results: Sequence[SampleResult],
    threshold: float | None,
    names_of: Callable[[SampleResult], Sequence[str]],
) -> dict[str, GroupSummary]:
    groups: dict[str, list[SampleResult]] = {}
    for result in results:
        for name in dict.fromkeys(names_of(result)):
            groups.setdefault(name, []).append(result)
    found = {}
    for name in sorted(groups, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name)):
        members = groups[name]
        score = mean(_by_task(members), confidence=config.confidence)
        assert score is not None
        solved = None
        if threshold is not None:
            solved = sum(member.score >= threshold - 1e-9 for member in members) / len(members)
        found[name] = GroupSummary(len({member.task_id for member in members}), len(members), score, solved)
    return found
