"""Evaluations in the pages: scores by tag and difficulty, samples, costs, and paired comparisons.

The figures are those of `forge_env.evaluation`: means over samples, errors with the task as the unit, intervals
bootstrapped over tasks, and the paired test by task.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge_env.config.evaluation import CONFIDENCE
from forge_env.errors import ForgeError
from forge_env.evaluation import comparison
from forge_env.evaluation.estimates import Estimate, PairedDifference, by_task, compare, mean
from forge_env.figures import percent
from forge_env.run.preflight import flat
from forge_env.run.state import held_out_scores
from forge_env.trajectory_index import SCORED
from forge_env.view.filter import OF_KIND, of_kind
from forge_env.view.index import shown_rows
from forge_env.view.queries import score_of
from forge_env.view.runs import RunView

MOST_TASKS = 400
"""Maximum tasks in the matrix of samples."""
MOST_SETTINGS = 200
ENOUGH = 5
"""Minimum tasks of a tag for its score to be shown, if more than two tags have that many."""


@dataclass(slots=True)
class Part:
    """The score of a subset of the samples."""

    name: str
    tasks: int
    samples: int
    score: Estimate | None
    query: str = ""


@dataclass(slots=True)
class Scored:
    """Figures of one environment of an evaluation, or of one split of a run at one step."""

    name: str
    """The environment."""
    kind: str
    score: Estimate | None
    tasks: int = 0
    samples: int = 0
    limits: Mapping[str, int] = field(default_factory=dict)
    lost: Mapping[str, int] = field(default_factory=dict)
    difficulties: list[Part] = field(default_factory=list)
    tags: list[Part] = field(default_factory=list)
    matrix: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)
    """Tasks with their samples, the worst first."""
    more_tasks: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    cost: float = 0.0
    tokens: int = 0
    step: int | None = None
    versions: str = ""
    """Range of the policy versions that sampled it, if there are several."""


def parts_of(run: RunView) -> list[Scored]:
    """Compute an evaluation's results so far from its episodes, for each environment."""
    recorded = [row[0] for row in run.queries.rows("select distinct environment from t where environment != ''")]
    score, names = str(run.config.get("score") or "reward"), dict.fromkeys([*run.labels, *recorded])
    return [scored(run, "eval", score, environment=name, confidence=confidence_of(run)) for name in names]


def confidence_of(run: RunView) -> float:
    """Return the confidence of an evaluation's intervals."""
    given = run.config.get("confidence")
    return given if isinstance(given, float) and 0 < given < 1 else CONFIDENCE


def scored(run: RunView, kind: str, score: str, *, environment: str = "", confidence: float = CONFIDENCE) -> Scored:
    """Return the figures of the samples of one kind, and of one environment if it is given."""
    result: Scored = run.queries.kept(
        ("scored", kind, environment, score), lambda: _scored(run, kind, score, environment, confidence)
    )
    return result


def _scored(run: RunView, kind: str, score: str, environment: str, confidence: float) -> Scored:
    where = OF_KIND + (" and environment = :environment" if environment else "")
    values = {**of_kind(kind), "environment": environment}
    rows = [*shown_rows(run.queries.rows(f"select * from t where {where} order by task, member, key", values))]
    valid = [row for row in rows if row["outcome"] in SCORED and score_of(row, score) is not None]

    def part(label: str, members: Sequence[Mapping[str, Any]], query: str = "") -> Part:
        tasks = by_task((row["task"], score_of(row, score) or 0.0) for row in members)
        return Part(label, len(tasks), len(members), mean([*tasks.values()], confidence=confidence), query)

    levels: dict[str, list[dict[str, Any]]] = {}
    tags: dict[str, list[dict[str, Any]]] = {}
    ended = Counter((row["outcome"], row["why"]) for row in rows)
    matrix: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        matrix.setdefault(row["task"], []).append(row)
    for row in valid:
        levels.setdefault(str(row["difficulty"]), []).append(row)
        for tag in row["tags"]:
            tags.setdefault(tag, []).append(row)
    levels, tags = ({} if len(parts) < 2 else parts for parts in (levels, tags))
    whole = part("", valid)
    worst = sorted(matrix.items(), key=lambda item: (_middle(item[1]), _natural(item[0])))
    often = [tag for tag in tags if len({row["task"] for row in tags[tag]}) >= ENOUGH]
    named = sorted(often if len(often) > 2 else tags, key=lambda tag: -len(tags[tag]))[:40]
    oldest = min((row["oldest"] for row in valid if row["oldest"] >= 0), default=-1)
    newest = max((row["newest"] for row in valid), default=-1)
    damaged = sum(number for (outcome, _), number in ended.items() if outcome == "unreadable")
    unreadable = {"unreadable": damaged} if damaged else {}
    metrics = dict.fromkeys(key for row in valid[:2000] for key in row["metrics"])
    return Scored(
        name=environment,
        kind=kind,
        score=whole.score,
        tasks=whole.tasks,
        samples=whole.samples,
        limits={why: number for (outcome, why), number in ended.items() if outcome == "limit"},
        lost={why: number for (outcome, why), number in ended.items() if outcome == "lost"} | unreadable,
        difficulties=[part(level, levels[level], f"difficulty={level}") for level in sorted(levels, key=_natural)],
        tags=sorted((part(tag, tags[tag]) for tag in named), key=lambda item: item.score.value if item.score else 0.0),
        matrix=worst[:MOST_TASKS],
        more_tasks=max(0, len(worst) - MOST_TASKS),
        metrics={key: sum(row["metrics"].get(key, 0.0) for row in valid) / len(valid) for key in metrics},
        cost=sum(row["cost"] or 0.0 for row in rows),
        tokens=sum(row["tokens"] for row in rows),
        versions=f"{oldest} to {newest}" if oldest != newest else "",
    )


def _middle(rows: Sequence[Mapping[str, Any]]) -> float:
    rewards = [row["reward"] for row in rows if row["reward"] is not None and row["outcome"] in SCORED]
    return sum(rewards) / len(rewards) if rewards else -1.0


def _natural(name: str) -> list[str | int]:
    """Sort key by which `eval-9` comes before `eval-10`: texts and numbers in turn."""
    return [int(part) if odd % 2 else part for odd, part in enumerate(re.split(r"([0-9]{1,18})", name))]


@dataclass(slots=True)
class Split:
    """The held-out scores of one split of a training run."""

    name: str
    scores: list[Scored]
    change: PairedDifference | None


def held_out(run: RunView) -> list[Split]:
    """Return held-out scores by split and step; errors and intervals are computed from the episodes if recorded."""
    splits, rows = [], {row["step"]: row for row in run.metrics}
    for split, points in held_out_scores(run.metrics).items():
        scores = []
        for point in points:
            one = scored(run, f"{split}-{point.step:05d}", run.metric)
            if not one.samples:  # the episodes are not recorded
                low, high = (point.score + sign * 1.96 * point.stderr for sign in (-1, 1))
                estimate = Estimate(point.score, point.stderr, low, high)
                one = Scored("", "", estimate, samples=point.n)
            one.step = point.step
            one.versions = _versions(rows.get(point.step, {}), split) or one.versions
            scores.append(one)
        first, last = scores[0], scores[-1]
        change = None
        if len(scores) > 1 and first.kind and last.kind:
            change = run.queries.change(first.kind, last.kind, run.metric)
        splits.append(Split(split, scores, change))
    return splits


def _versions(row: Mapping[str, Any], split: str) -> str:
    """Describe the versions that sampled a split, and the share by the step's own version; empty if that is all."""
    share = row.get(f"eval/{split}/share_of_step")
    low, high = (row.get(f"eval/{split}/{name}_version") for name in ("oldest", "newest"))
    if share is None or share >= 1 or low is None or high is None:
        return ""
    return f"{low:.0f} to {high:.0f}, {percent(share)} by this step's"


# ---
# Paired comparisons


def different_settings(runs: Sequence[RunView]) -> list[tuple[str, list[str]]]:
    """List the recipe keys whose values differ between the runs, with the values."""
    settings = [{key: str(value)[:300] for key, value in flat(run.config).items()} for run in runs]
    keys = sorted({key for one in settings for key in one} - {"name", "out", "output_dir", "schema"})
    rows = [(key, [one.get(key, "\u2013") for one in settings]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1][:MOST_SETTINGS]


@dataclass(slots=True)
class Pair:
    """The comparison of one run with the first."""

    a: RunView
    b: RunView
    named: dict[str, PairedDifference | None] = field(default_factory=dict)
    changed: dict[str, list[tuple[str, float, float]]] = field(default_factory=dict)
    error: str = ""


def pairs(runs: Sequence[RunView], kept: dict[Any, Any]) -> list[Pair]:
    """Compare each run with the first by the paired test by task: evaluations, or last held-out scores."""
    result = []
    for other in runs[1:]:
        key = (runs[0].name, runs[0].stamp(), other.name, other.stamp())
        if key not in kept:
            if len(kept) > 100:
                kept.clear()
            kept[key] = _pair(runs[0], other)
        result.append(kept[key])
    return result


def _pair(a: RunView, b: RunView) -> Pair:
    pair = Pair(a, b)
    if a.is_evaluation != b.is_evaluation:
        pair.error = "one is a training run, the other an evaluation"
        return pair
    if a.is_evaluation:
        try:
            result = comparison.compare_folders(a.root, b.root)
        except ForgeError as error:
            pair.error = str(error)
            return pair
        pair.named, pair.changed = result.environments, result.hardest
        return pair
    if a.config.get("environment") != b.config.get("environment") or a.config.get("seed") != b.config.get("seed"):
        pair.error = "environment, its options or the seed differ: the held-out tasks may differ"
    ends = [{split: scores[-1].step for split, scores in held_out_scores(run.metrics).items()} for run in (a, b)]
    for split in ends[0].keys() & ends[1].keys():
        one, two = (
            run.queries.scores(f"{split}-{end[split]:05d}", run.metric) for run, end in zip((a, b), ends, strict=True)
        )
        pair.named[f"{split}, last"] = compare(one, two)
        changes = [
            (task, math.fsum(one[task]) / len(one[task]), math.fsum(two[task]) / len(two[task]))
            for task in one
            if task in two
        ]
        moved = sorted((row for row in changes if row[1] != row[2]), key=lambda row: (row[2] - row[1], row[0]))
        pair.changed[f"{split}, last"] = moved if len(moved) <= 10 else [*moved[:5], *moved[-5:]]
    return pair
