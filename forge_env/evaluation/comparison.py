"""Two evaluations side by side: paired by task, so that the tasks' own difficulty cancels out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_env.errors import UsageError
from forge_env.evaluation.config import EvaluationConfig, build, read_yaml
from forge_env.evaluation.estimates import PairedDifference, compare
from forge_env.evaluation.samples import SampleResult, in_plan
from forge_env.evaluation.store import open_folder
from forge_env.evaluation.tables import Table


@dataclass(frozen=True, slots=True)
class Comparison:
    """B against A."""

    model_a: str
    model_b: str
    score_name: str
    environments: dict[str, PairedDifference | None]
    """By label; None where no task has valid samples in both."""
    only_a: dict[str, int]
    """Tasks that only A has, by label."""
    only_b: dict[str, int]
    hardest: dict[str, list[tuple[str, float, float]]]
    """Tasks with the largest change by label: (task, A, B), losses first."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dataclasses.asdict(self)


def load(path: Path | str, *, score: str | None = None) -> tuple[EvaluationConfig, list[SampleResult]]:
    """Configuration and latest results of a folder; `score` replaces the configured one."""
    folder = open_folder(path)
    config = build(read_yaml(folder.config))
    latest: dict[str, SampleResult] = {}
    for trajectory, result in folder.results(score or config.score):
        if in_plan(config, trajectory):
            latest[trajectory.id] = result
    return config, list(latest.values())


def compare_folders(a: Path | str, b: Path | str, *, score: str | None = None, confidence: float = 0.95) -> Comparison:
    """Compare the evaluations in two folders.

    Args:
        a: the baseline's folder.
        b: the other's.
        score: what to compare; A's configured score when not given.
        confidence: of the intervals.

    Raises:
        UsageError: a folder holds no evaluation, or the two have no environment or no task in common.
    """
    if not 0 < confidence < 1:
        raise UsageError(f"the confidence is between 0 and 1, not {confidence:g}", fix="for example 0.95")
    config_a, results_a = load(a, score=score)
    config_b, results_b = load(b, score=score or config_a.score)
    scores_a, scores_b = _scores(results_a), _scores(results_b)
    common = [label for label in scores_a if label in scores_b]
    if not common:
        known = f"{', '.join(scores_a) or 'nothing'} against {', '.join(scores_b) or 'nothing'}"
        raise UsageError(f"the two evaluations have no environment in common: {known}")
    if not any(scores_a[label].keys() & scores_b[label].keys() for label in common):
        raise UsageError(
            f"the two evaluations have no task in common (environments: {', '.join(common)})",
            fix="evaluate both on the same tasks: the same split, version and options of the environment",
        )
    return Comparison(
        model_a=config_a.model,
        model_b=config_b.model,
        score_name=score or config_a.score,
        environments={label: compare(scores_a[label], scores_b[label], confidence=confidence) for label in common},
        only_a={label: len(scores_a[label].keys() - scores_b[label].keys()) for label in common},
        only_b={label: len(scores_b[label].keys() - scores_a[label].keys()) for label in common},
        hardest={label: _largest_changes(scores_a[label], scores_b[label]) for label in common},
    )


def _scores(results: Iterable[SampleResult]) -> dict[str, dict[str, list[float]]]:
    """Scores of valid samples by label and task."""
    scores: dict[str, dict[str, list[float]]] = {}
    for result in results:
        if result.valid:
            scores.setdefault(result.environment, {}).setdefault(result.task_id, []).append(result.score)
    return scores


def _largest_changes(a: dict[str, list[float]], b: dict[str, list[float]]) -> list[tuple[str, float, float]]:
    rows = [(task, sum(a[task]) / len(a[task]), sum(b[task]) / len(b[task])) for task in a.keys() & b.keys()]
    changed = sorted((row for row in rows if row[1] != row[2]), key=lambda row: (row[2] - row[1], row[0]))
    return changed if len(changed) <= 10 else [*changed[:5], *changed[-5:]]


def tables(comparison: Comparison) -> list[Table]:
    """The result, and the tasks that changed most."""
    columns = ["environment", "tasks", "A", "B", "B - A", "interval", "p", "better", "worse", "only A", "only B"]
    rows = []
    for label, found in comparison.environments.items():
        rest = [str(comparison.only_a[label]), str(comparison.only_b[label])]
        if found is None:
            rows.append([label, "0", *["-"] * 7, *rest])
            continue
        change = found.difference
        rows.append(
            [
                label,
                str(found.tasks),
                f"{found.mean_a:.3f}",
                f"{found.mean_b:.3f}",
                f"{change.value:+.3f} ± {change.stderr:.3f}",
                f"{change.low:+.3f} to {change.high:+.3f}",
                f"{found.p_value:.3g}",
                str(found.better),
                str(found.worse),
                *rest,
            ]
        )
    result = [Table(f"A {comparison.model_a}, B {comparison.model_b} ({comparison.score_name})", columns, rows)]
    for label, changed in comparison.hardest.items():
        if changed:
            lines = [[task, f"{a:.3f}", f"{b:.3f}", f"{b - a:+.3f}"] for task, a, b in changed]
            result.append(Table(f"{label}: largest changes", ["task", "A", "B", "B - A"], lines))
    return result


FOOTNOTES = (
    "p: two-sided paired permutation test over tasks (signs flipped); ± is the standard error of the mean "
    "difference over tasks, the interval is bootstrapped over tasks.",
)
