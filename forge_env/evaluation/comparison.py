"""Comparison of two evaluations, paired by task so that differences in task difficulty cancel out."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_env.config.evaluation import CONFIDENCE, ENDLESS_N, EnvironmentChoice, EvaluationConfig
from forge_env.config.reader import read_as
from forge_env.errors import ForgeError, UsageError, environment_code
from forge_env.evaluation.estimates import PairedDifference, compare
from forge_env.evaluation.plan import SampleResult, in_plan, split_of
from forge_env.evaluation.record import open_folder
from forge_env.evaluation.results import Results, ResultTable
from forge_env.evaluation.tables import Table
from forge_env.registry import environment_class, make, make_config
from forge_env.registry import names as registered_names


@dataclass(frozen=True, slots=True)
class Stored:
    """An evaluation read from its folder."""

    config: EvaluationConfig
    results: Results
    """The latest result of each sample in the configuration that was last requested."""
    splits: dict[str, str]
    """Split that was played, by label."""
    damage: list[str]


def other_tasks(label: str, a: Stored, b: Stored) -> str | None:
    """Describe why two evaluations played different tasks of the environment `label`; None if they played the same.

    Comparing task ids is not enough, since options may change the tasks behind the same ids. Options that don't change
    tasks (a turn limit, for example) may differ: if options differ, both environments are created and their tasks
    compared.
    """
    split = a.splits[label]
    if split != b.splits[label]:
        return f"split {split} against {b.splits[label]}"
    if a.config.seed != b.config.seed:
        return f"seed {a.config.seed} against {b.config.seed}"
    one, other = _choice(a.config, label), _choice(b.config, label)
    if (one.name, one.options) == (other.name, other.options):
        return None
    if not _same_class(one.name, other.name):
        return f"{one.name} against {other.name}"
    options = _options(one), _options(other)
    named = sorted(key for key in options[0].keys() | options[1].keys() if options[0].get(key) != options[1].get(key))
    sides = ((one, a.config), (other, b.config))
    tasks = min(choice.num_tasks or config.num_tasks or ENDLESS_N for choice, config in sides)
    if not named or _tasks_agree(one, other, split, tasks):
        return None
    return ", ".join(f"{key} {options[0].get(key)!r} against {options[1].get(key)!r}" for key in named)


def _choice(config: EvaluationConfig, label: str) -> EnvironmentChoice:
    return next(choice for choice in config.environments if choice.label == label)


def _loads_installed_code(name: str) -> bool:
    """Whether an environment's class can be loaded without importing code that only a recipe names.

    Either evaluation may be a stranger's.
    """
    head = name.partition(":")[0]
    return head in registered_names() or head in sys.modules


def _same_class(a: str, b: str) -> bool:
    try:
        return a == b or (
            _loads_installed_code(a) and _loads_installed_code(b) and environment_class(a) is environment_class(b)
        )
    except ForgeError:
        return False


def _options(choice: EnvironmentChoice) -> dict[str, object]:
    """All options including defaults; only the given ones if the environment is not installed here."""
    if not _loads_installed_code(choice.name):
        return dict(choice.options)
    try:
        return make_config(choice.name, environment_class(choice.name), choice.options).model_dump()
    except ForgeError:
        return dict(choice.options)


def _tasks_agree(a: EnvironmentChoice, b: EnvironmentChoice, split: str, number: int) -> bool:
    """Whether the first `number` tasks of both environments are equal; False if either can't be created here."""
    if not (_loads_installed_code(a.name) and _loads_installed_code(b.name)):
        return False
    try:
        one, other = make(a.name, **a.options), make(b.name, **b.options)
        with environment_code(f"the tasks of {a.name}", split):
            most = min(total for total in (one.num_tasks(split), other.num_tasks(split), number) if total is not None)
            return all(one.task(split, index) == other.task(split, index) for index in range(most))
    except ForgeError:  # tasks that can't be compared count as different
        return False


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of evaluation B with evaluation A."""

    model_a: str
    model_b: str
    score_name: str
    environments: dict[str, PairedDifference | None]
    """Difference by label; None if no task has valid samples in both."""
    only_a: dict[str, int]
    """Number of tasks that only A has, by label."""
    only_b: dict[str, int]
    hardest: dict[str, list[tuple[str, float, float]]]
    """Tasks with the largest change by label: (task, A, B), losses first."""
    damage: list[str] = field(default_factory=list)
    """Descriptions of records of either evaluation that could not be read; their samples are left out."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON-ready dictionary."""
        return dataclasses.asdict(self)


def load(path: Path | str, *, score: str | None = None) -> Stored:
    """Read the evaluation in a folder; `score` replaces the configured score."""
    folder = open_folder(path)
    config = read_as(EvaluationConfig, folder.config)
    table = ResultTable()
    splits: dict[str, str] = {}
    for trajectory, result in folder.results(score or config.score):
        if in_plan(config, trajectory):
            table.add(result)
            splits[trajectory.environment] = split_of(trajectory)
    labels = [choice.label for choice in config.environments]
    return Stored(config, Results(table, table.latest(labels.index)), splits, list(folder.damage))


def compare_folders(
    a: Path | str, b: Path | str, *, score: str | None = None, confidence: float = CONFIDENCE
) -> Comparison:
    """Compare the evaluations in two folders.

    Args:
        score: name of the score to compare; A's configured score if not given.

    Raises:
        UsageError: a folder holds no evaluation, or the two have no environment or no task in common, or they played
            different tasks (options, split, seed).
    """
    if not 0 < confidence < 1:
        raise UsageError(f"the confidence must be between 0 and 1, not {confidence:g}", fix=f"for example {CONFIDENCE}")
    stored_a = load(a, score=score)
    stored_b = load(b, score=score or stored_a.config.score)
    scores_a, scores_b = _scores(stored_a.results), _scores(stored_b.results)
    common = [label for label in scores_a if label in scores_b]
    if not common:
        known = f"{', '.join(scores_a) or 'nothing'} against {', '.join(scores_b) or 'nothing'}"
        raise UsageError(
            f"the two evaluations have no environment in common: {known}",
            fix="evaluate both on the same environment, with the same label",
        )
    for label in common:
        if (difference := other_tasks(label, stored_a, stored_b)) is not None:
            raise UsageError(
                f"the two evaluations did not play the same tasks of {label}: {difference}",
                fix="evaluate both with the same options, split and seed",
            )
    if not any(scores_a[label].keys() & scores_b[label].keys() for label in common):
        raise UsageError(
            f"the two evaluations have no task in common (environments: {', '.join(common)})",
            fix="evaluate both on the same tasks: the same split, version and options of the environment",
        )
    return Comparison(
        model_a=stored_a.config.model,
        model_b=stored_b.config.model,
        score_name=score or stored_a.config.score,
        environments={label: compare(scores_a[label], scores_b[label], confidence=confidence) for label in common},
        only_a={label: len(scores_a[label].keys() - scores_b[label].keys()) for label in common},
        only_b={label: len(scores_b[label].keys() - scores_a[label].keys()) for label in common},
        hardest={label: _largest_changes(scores_a[label], scores_b[label]) for label in common},
        damage=stored_a.damage + stored_b.damage,
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
    """Tables of the comparison: the scores, and the tasks that changed most."""
    columns = ["environment", "tasks", "A", "B", "B - A", "interval", "p", "better", "worse", "only A", "only B"]
    rows = []
    for label, paired in comparison.environments.items():
        rest = [str(comparison.only_a[label]), str(comparison.only_b[label])]
        if paired is None:
            rows.append([label, "0", *["-"] * 7, *rest])
            continue
        change = paired.difference
        rows.append(
            [
                label,
                str(paired.tasks),
                f"{paired.mean_a:.3f}",
                f"{paired.mean_b:.3f}",
                f"{change.value:+.3f} ± {change.stderr:.3f}",
                f"{change.low:+.3f} to {change.high:+.3f}",
                f"{paired.p_value:.3g}",
                str(paired.better),
                str(paired.worse),
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
    "difference over tasks, the interval contains every difference that the test does not reject.",
)
