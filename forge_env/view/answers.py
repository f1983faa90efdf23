"""The four answers that a page begins with: did it learn, how it fails, why the reward moved, what limited the speed.

Each is made of figures that stand elsewhere on the pages. Errors are standard errors, with the task as the unit
(`forge_env.evaluation.estimates`); a change counts as one where its 95 % interval leaves out 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge_env.display.curves import REWARD, is_waiting, time_account
from forge_env.evaluation.estimates import clustered
from forge_env.view.queries import TRAIN, VALID, Queries
from forge_env.view.runs import Held, RunView, held_out
from forge_env.view.text import percent, signed

SURE = 1.96
"""Standard errors of a 95 % interval."""
SAMPLED = 4_000
"""Episodes of each end of a run whose metrics are averaged."""


@dataclass(slots=True)
class Learned:
    """Did it learn?"""

    start: float | None = None
    end: float | None = None
    change: float | None = None
    error: float | None = None
    verdict: str = "unknown"
    """better, worse, noise, or unknown."""
    words: str = ""
    further: list[str] = field(default_factory=list)


def learned(run: RunView) -> Learned:
    """Held-out scores, first against last, paired by task where the episodes are kept; else the reward itself."""
    rows = run.metrics
    splits = held_out(rows)
    if not splits or len(splits[0].points) < 2:
        return _learned_in_training(rows, splits)
    main = splits[0]
    (_, start, first_error, _), (last_step, end, last_error, n) = main.points[0], main.points[-1]
    first, last = (f"{main.split}-{main.points[place][0]:05d}" for place in (0, -1))
    paired = run.queries.change(first, last, run.metric)
    if paired is not None and abs(paired.mean_b - end) < 0.02 and abs(paired.mean_a - start) < 0.02:
        change, error, tasks = paired.difference.value, paired.difference.stderr, f"{paired.tasks} tasks"
        sure = paired.difference.low > 0 or paired.difference.high < 0
    else:
        change, error, tasks = end - start, math.hypot(first_error, last_error), f"{n} episodes"
        sure = abs(change) > SURE * error
    verdict = "noise" if not sure else "better" if change > 0 else "worse"
    said = {"better": "Yes", "worse": "No, it got worse", "noise": "Not beyond noise"}[verdict]
    words = f"{said}: held-out {signed(change)} ± {error:.2f} on {tasks} it never trained on."
    found = Learned(start, end, change, error, verdict, words)
    best_step, best, best_error, _ = max(main.points, key=lambda point: point[1])
    if best - end > SURE * math.hypot(best_error, last_error) and best_step != last_step:
        found.further.append(f"It was best after step {best_step} ({best:.2f}) and has lost {best - end:.2f} since.")
        found.words = words.replace("Yes:", "Yes, and it lost a part again:")
        found.verdict = "noise" if verdict == "better" else verdict
    for other in splits[1:]:
        if len(other.points) > 1:
            a, b = other.points[0], other.points[-1]
            gap = math.hypot(a[2], b[2])
            found.further.append(f"{other.split}: {a[1]:.2f} → {b[1]:.2f} ({signed(b[1] - a[1])} ± {gap:.2f})")
    rewards = [row[REWARD] for row in rows if row.get(REWARD) is not None]
    if len(rewards) >= 10:
        fifth = len(rewards) // 5
        moved = sum(rewards[-fifth:]) / fifth - sum(rewards[:fifth]) / fifth
        if moved > 0.1 and change < moved / 3:
            found.further.append(f"The training reward rose by {moved:.2f}, the held-out score did not follow.")
    return found


def _learned_in_training(rows: Sequence[Mapping[str, Any]], splits: Sequence[Held]) -> Learned:
    rewards = [row[REWARD] for row in rows if row.get(REWARD) is not None]
    if splits and len(rewards) < 5:
        _, score, error, n = splits[0].points[0]
        return Learned(start=score, words=f"Too early to tell: held-out {score:.2f} ± {error:.2f} (n={n}) so far.")
    if len(rewards) < 5:
        return Learned(words="Too early to tell: fewer than five steps.")
    size = max(1, len(rewards) // 5)
    first, last = rewards[:size], rewards[-size:]
    start, end = sum(first) / size, sum(last) / size
    spread = [
        math.sqrt(sum((value - middle) ** 2 for value in part) / max(1, size - 1) / size)
        for part, middle in ((first, start), (last, end))
    ]
    error, change = math.hypot(*spread), end - start
    verdict = "noise" if abs(change) <= SURE * error else "better" if change > 0 else "worse"
    words = (
        f"Training reward {signed(change)} ± {error:.2f}, last fifth of the steps against the first. "
        "Held-out tasks would say whether that carries over."
    )
    return Learned(start, end, change, error, verdict, words)


@dataclass(slots=True)
class Moved:
    """One line of why the reward moved."""

    name: str
    before: float
    after: float
    error: float | None = None
    share_before: float | None = None
    share_after: float | None = None
    query: str = ""
    """Of the list that shows these episodes."""

    @property
    def change(self) -> float:
        """After less before."""
        return self.after - self.before


@dataclass(slots=True)
class Reasons:
    """Why did the reward move?"""

    words: str = ""
    warnings: list[str] = field(default_factory=list)
    before: tuple[int, int] | None = None
    """First and last policy version of what is compared."""
    after: tuple[int, int] | None = None
    change: float | None = None
    error: float | None = None
    within: float = 0.0
    mix: float = 0.0
    difficulties: list[Moved] = field(default_factory=list)
    tags: list[Moved] = field(default_factory=list)
    components: list[Moved] = field(default_factory=list)
    endings: list[Moved] = field(default_factory=list)
    lengths: list[Moved] = field(default_factory=list)


def reasons(run: RunView, around: int | None = None) -> Reasons:
    """Training episodes of the first fifth of the run against the last, or of just before a step against just after.

    Args:
        run: whose.
        around: the step.
    """
    found: Reasons = run.queries.kept(("reasons", around), lambda: _reasons(run.queries, around))
    return found


def _reasons(queries: Queries, around: int | None) -> Reasons:
    ends = queries.rows(f"select min(newest) as low, max(newest) as high from t where ({TRAIN}) and newest >= 0")[0]
    low, high = ends["low"], ends["high"]
    if low is None or high - low < 2:
        return Reasons(words="Too few updates yet to compare.")
    if around is None:
        width = max(1, (high - low + 1) // 5)
        before, after = (low, low + width - 1), (high - width + 1, high)
    else:
        width = max(2, (high - low + 1) // 10)
        middle = min(max(around, low + 1), high)
        before, after = (max(low, middle - width), middle - 1), (middle, min(high, middle + width - 1))
    parts = [_part(queries, *window) for window in (before, after)]
    if not all(part.episodes for part in parts):
        return Reasons(words="No episodes to compare there.", before=before, after=after)
    one, two = parts
    change, error = two.mean - one.mean, math.hypot(one.error, two.error)
    found = Reasons(before=before, after=after, change=change, error=error)
    shared = [level for level in one.levels if level in two.levels]
    for level in sorted({*one.levels, *two.levels}):
        (n1, mean1, error1), (n2, mean2, error2) = one.levels.get(level, (0, 0, 0)), two.levels.get(level, (0, 0, 0))
        if n1 and n2:
            found.difficulties.append(
                Moved(
                    f"difficulty {level}",
                    mean1,
                    mean2,
                    math.hypot(error1, error2),
                    n1 / one.episodes,
                    n2 / two.episodes,
                    f"?kind=train&difficulty={level}",
                )
            )
    for level in shared:
        (n1, mean1, _), (n2, mean2, _) = one.levels[level], two.levels[level]
        share1, share2 = n1 / one.episodes, n2 / two.episodes
        found.within += (share1 + share2) / 2 * (mean2 - mean1)
    found.mix = change - found.within
    for tag in one.tags.keys() & two.tags.keys():
        (n1, mean1), (n2, mean2) = one.tags[tag], two.tags[tag]
        if min(n1 / one.episodes, n2 / two.episodes) > 0.02:
            found.tags.append(Moved(tag, mean1, mean2, None, n1 / one.episodes, n2 / two.episodes))
    found.tags.sort(key=lambda item: -abs(item.change))
    found.tags = found.tags[:8]
    for name in one.metrics.keys() & two.metrics.keys():
        if abs(two.metrics[name] - one.metrics[name]) > 0.005:
            found.components.append(Moved(name, one.metrics[name], two.metrics[name]))
    found.components.sort(key=lambda item: -abs(item.change) / (abs(item.before) + abs(item.after) + 1e-9))
    for name in {*one.endings, *two.endings}:
        found.endings.append(Moved(name, one.endings.get(name, 0.0), two.endings.get(name, 0.0)))
    found.endings.sort(key=lambda item: -abs(item.change))
    found.lengths = [Moved(name, one.lengths[name], two.lengths[name]) for name in one.lengths]
    _say(found)
    return found


def _say(found: Reasons) -> None:
    assert found.change is not None
    assert found.error is not None
    if abs(found.change) <= SURE * found.error:
        found.words = f"It did not move beyond noise ({signed(found.change)} ± {found.error:.2f})."
    else:
        word = "rose" if found.change > 0 else "fell"
        parts = [f"{signed(found.within)} on tasks of the same difficulty"]
        if abs(found.mix) > 0.005:
            parts.append(f"{signed(found.mix)} because the mix of tasks changed")
        found.words = f"It {word} by {abs(found.change):.2f} ± {found.error:.2f}: {' and '.join(parts)}."
        against = [
            item
            for item in found.components
            if 0 <= item.before <= 1
            and 0 <= item.after <= 1
            and item.change * found.change < 0
            and abs(item.change) > 0.1
            and not item.name.endswith(("errors", "error"))
        ]
        found.warnings += [
            f"{item.name} went the other way: {item.before:.2f} → {item.after:.2f}. Read the episodes: "
            "is the reward what is wanted?"
            for item in against[:2]
        ]


@dataclass(slots=True)
class _Part:
    """Figures of the training episodes of some versions."""

    episodes: int
    mean: float
    error: float
    levels: dict[int, tuple[int, float, float]]
    tags: dict[str, tuple[int, float]]
    metrics: dict[str, float]
    endings: dict[str, float]
    lengths: dict[str, float]


def _part(queries: Queries, first: int, last: int) -> _Part:
    inside = f"({TRAIN}) and newest between :first and :last"
    values = {"first": first, "last": last}
    by_task: dict[int, list[tuple[float, int]]] = {}
    for row in queries.rows(
        f"select difficulty, sum(reward) as total, count(*) as n from t where {inside} and {VALID} "
        "and reward is not null group by difficulty, task",
        values,
    ):
        by_task.setdefault(row["difficulty"], []).append((row["total"], row["n"]))
    totals = [item for tasks in by_task.values() for item in tasks]
    episodes = sum(n for _, n in totals)
    if not episodes:
        return _Part(0, 0.0, 0.0, {}, {}, {}, {}, {})
    levels = {level: (sum(n for _, n in tasks), *clustered(tasks)) for level, tasks in by_task.items()}
    tags: dict[str, list[float]] = {}
    for row in queries.rows(
        f"select tags, sum(reward) as total, count(*) as n from t where {inside} and {VALID} and tags != '' "
        "group by tags",
        values,
    ):
        for tag in json.loads(row["tags"]):
            sums = tags.setdefault(tag, [0.0, 0.0])
            sums[0] += row["n"]
            sums[1] += row["total"] or 0.0
    ends = queries.rows(
        "select case when outcome = 'limit' then 'hit the limit: ' || why when outcome = 'lost' then 'lost: ' || why "
        f"when calls = 0 and :tools then 'never used a tool' else '' end as name, count(*) as n from t where {inside} "
        "group by 1",
        values,
    )
    played = sum(row["n"] for row in ends)
    lengths = queries.rows(
        f"select avg(tokens) as tokens, avg(turns) as turns, avg(calls) as calls, avg(wall_s) as seconds from t "
        f"where {inside} and {VALID}",
        values,
    )[0]
    sample = queries.rows(f"select metrics from t where {inside} and {VALID} and metrics != '' limit {SAMPLED}", values)
    return _Part(
        episodes,
        *clustered(totals),
        levels,
        {tag: (int(n), total / n) for tag, (n, total) in tags.items()},
        _means(json.loads(row["metrics"]) for row in sample),
        {row["name"]: row["n"] / played for row in ends if row["name"]},
        {name: lengths[name] or 0.0 for name in ("tokens", "turns", "calls", "seconds")},
    )


def _means(metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    number = 0
    for one in metrics:
        number += 1
        for name, value in one.items():
            if isinstance(value, int | float):
                sums[name] = sums.get(name, 0.0) + value
    return {name: total / number for name, total in sums.items()}


@dataclass(slots=True)
class Limit:
    """What limited the speed?"""

    share: float | None = None
    words: str = ""
    detail: str = ""
    advice: list[tuple[str, str]] = field(default_factory=list)
    """A key of the recipe, and what turning it does."""
    accounts: dict[str, dict[str, float]] = field(default_factory=dict)


def limit(run: RunView) -> Limit:
    """The busiest actor and who waits for whom, from the time accounts of the run."""
    accounts = time_account(run.metrics)
    accounts = {actor: dict(sorted(doing.items(), key=lambda item: -item[1])) for actor, doing in accounts.items()}
    found = Limit(accounts=accounts)
    trainer = accounts.get("trainer", {})
    if not trainer:
        found.words = "No time accounts are in this run's metrics."
        return found
    work = {doing: share for doing, share in trainer.items() if doing != "start"}
    doing, share = max(work.items(), key=lambda item: item[1])
    found.share = share
    episodes, generator = accounts.get("episodes", {}), accounts.get("generator", {})
    busy = 1.0 - sum(value for name, value in generator.items() if is_waiting("generator", name)) if generator else 0.0
    outside = sum(value for name, value in episodes.items() if name in ("environment", "reset", "close"))
    rollouts = [value.get("busy", 0.0) for actor, value in accounts.items() if actor.startswith("rollouts")]
    if not is_waiting("trainer", doing):
        found.words = f"The trainer: {percent(share)} of its time it {_does(doing)}."
        found.detail = f"The generators were busy {percent(busy)} of the time." if generator else ""
        found.advice = [
            ("trainer.procs", "more ranks share a step"),
            ("grpo.groups_per_step", "fewer groups make a step shorter; each learns from less"),
        ]
        return found
    found.words = f"The trainer spent {percent(share)} of its time {doing.replace('wait', 'waiting', 1)}."
    if "episodes" in doing and rollouts and max(rollouts) > 0.8:
        found.detail = f"The rollout workers themselves were busy {percent(max(rollouts))} of the time."
        found.advice = [("rollouts.workers", "more processes play the episodes")]
    elif "episodes" in doing and busy >= 0.6 and busy >= outside * 0.8:
        found.detail = (
            f"The generators were busy {percent(busy)} of the time: sampling is the narrow place. Episodes spent "
            f"{percent(outside)} of theirs in the environment."
        )
        found.advice = [
            ("generator.num_replicas", "more generators sample side by side"),
            ("grpo.max_off_policy_steps", "sampling runs further ahead of training"),
            ("grpo.max_tokens_per_turn", "shorter answers, where they ramble"),
        ]
    elif "episodes" in doing:
        found.detail = (
            f"Episodes spent {percent(outside)} of their time in the environment, and the generators were busy only "
            f"{percent(busy)}: tools and sandboxes are the narrow place."
        )
        found.advice = [
            ("sandbox.concurrency", "more sandboxes at once"),
            ("grpo.max_off_policy_steps", "more groups are played at once"),
            ("rollouts.workers", "more processes play the episodes"),
        ]
    elif "generators" in doing:
        found.advice = [("weights", "new weights take long to arrive: see the weights/ figures")]
    return found


def _does(doing: str) -> str:
    return {"train": "trained", "push weights": "sent weights", "save": "saved checkpoints"}.get(doing, f"did: {doing}")
