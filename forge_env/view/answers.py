"""Answers at the top of a run's page: did it learn, how it fails, why the reward moved, what limited the speed.

Each uses figures that other pages show in full. Errors are standard errors, with the task as the unit
(`forge_env.evaluation.estimates`); a change is significant if its 95 % interval excludes 0.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge_env.display.curves import is_waiting, time_account, training_curve
from forge_env.evaluation.estimates import Times, clustered
from forge_env.figures import number, percent, signed
from forge_env.run.metrics import REWARD
from forge_env.run.state import HeldOutScore, held_out_scores
from forge_env.trajectory_index import SCORED, out_of
from forge_env.view.filter import TRAIN, VALID
from forge_env.view.queries import Queries
from forge_env.view.runs import SURE, RunView

ENDED, LONGER, OFTEN = 0.1, 1.25, 0.05
"""Thresholds for the third answer to mention a change.

These are the change of an ending's share (half of it if the share doubled or halved), the ratio of two lengths or two
numbers of errors, and the minimum number of errors per episode.
"""
ERRORS = ("errors", "error")
"""Suffixes of metrics that are better when they fall."""
COMPARED = 6_000
"""Maximum episodes to compare at each end of a run, plus the rest of the last version that is included."""


@dataclass(slots=True)
class Learned:
    """The answer to "Did it learn?"."""

    start: float | None = None
    end: float | None = None
    change: float | None = None
    error: float | None = None
    verdict: str = "unknown"
    """One of "better", "worse", "noise", or "unknown"."""
    words: str = ""
    measure: str = ""
    """The quantity measured: the name of a metric, or `reward`."""
    further: list[str] = field(default_factory=list)


def learned(run: RunView) -> Learned:
    """Compare the last held-out scores with the first, paired by task if episodes are recorded; else the rewards."""
    rows, measure = run.metrics, run.scored_by
    main, *others = [*held_out_scores(rows).values()] or [[]]
    if len(main) < 2:
        return _learned_in_training(rows, main, measure)
    start, end = main[0], main[-1]
    first, last = (f"{point.split}-{point.step:05d}" for point in (start, end))
    paired = run.queries.change(first, last, run.metric)
    if paired is not None and abs(paired.mean_b - end.score) < 0.02 and abs(paired.mean_a - start.score) < 0.02:
        change, error, tasks = paired.difference.value, paired.difference.stderr, f"{paired.tasks} tasks"
        sure = paired.verdict != "noise"
    else:
        change, error = end.score - start.score, math.hypot(start.stderr, end.stderr)
        tasks, sure = f"{end.n} episodes", abs(change) > SURE * error
    verdict = "noise" if not sure else "better" if change > 0 else "worse"
    answer = {"better": "Yes", "worse": "No, the score fell", "noise": "No significant change"}[verdict]
    words = f"{answer}: held-out {measure} {signed(change)} ± {error:.2f} on {tasks} not trained on."
    result = Learned(start.score, end.score, change, error, verdict, words, f"held-out {measure}")
    best = max(main, key=lambda point: point.score)
    if best.score - end.score > SURE * math.hypot(best.stderr, end.stderr) and best is not end:
        result.further.append(
            f"The best score was {best.score:.2f} after step {best.step}; "
            f"it has dropped by {best.score - end.score:.2f} since."
        )
        result.words = words.replace("Yes:", "Yes, but part of the gain was lost:")
        result.verdict = "noise" if verdict == "better" else verdict
    for other in others:
        if len(other) > 1:
            a, b = other[0], other[-1]
            moved, gap = signed(b.score - a.score), math.hypot(a.stderr, b.stderr)
            result.further.append(f"{a.split}: {a.score:.2f} → {b.score:.2f} ({moved} ± {gap:.2f})")
    training = training_curve(rows, measure)  # of the same metric, if the training episodes have it
    if len(training.y) >= 10:
        fifth = len(training.y) // 5
        rise = sum(training.y[-fifth:]) / fifth - sum(training.y[:fifth]) / fifth
        if rise > 0.1 and change < rise / 3:
            result.further.append(f"The {training.label} rose by {rise:.2f}; held-out {measure} did not.")
    return result


def _learned_in_training(rows: Sequence[Mapping[str, Any]], scores: Sequence[HeldOutScore], measure: str) -> Learned:
    rewards = [row[REWARD] for row in rows if row.get(REWARD) is not None]
    if scores and len(rewards) < 5:
        score = scores[0]
        words = f"Too early to tell: held-out {measure} {score.score:.2f} ± {score.stderr:.2f} (n={score.n}) so far."
        return Learned(start=score.score, words=words, measure=f"held-out {measure}")
    if len(rewards) < 5:
        nothing = "Neither rewards nor held-out scores are recorded."
        return Learned(words="Too early to tell: fewer than five steps." if rewards or not rows else nothing)
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
        "There are no held-out scores to show whether this generalizes."
    )
    return Learned(start, end, change, error, verdict, words, "training reward")


@dataclass(slots=True)
class Moved:
    """One line of the reasons for which the reward moved."""

    name: str
    before: float
    after: float
    error: float | None = None
    share_before: float | None = None
    share_after: float | None = None
    query: str = ""
    """Query of the list that shows these episodes."""

    @property
    def change(self) -> float:
        """After minus before."""
        return self.after - self.before


@dataclass(slots=True)
class Reasons:
    """The answer to "Why did the reward move?"."""

    words: str = ""
    warnings: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    """The largest simultaneous changes, which need not be the reason."""
    before: tuple[int, int] | None = None
    """First and last policy version of the earlier episodes."""
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

    @property
    def told(self) -> list[str]:
        """The answer, line by line."""
        return [
            self.words,
            *self.warnings,
            *(["Largest other changes: " + " ".join(self.beside)] if self.beside else []),
        ]


def reasons(run: RunView, around: int | None = None) -> Reasons:
    """Compare training episodes of the run's last fifth with its first, or just after a step with just before it.

    Args:
        around: the step; None: compare the fifths.
    """
    result: Reasons = run.queries.kept(("reasons", around), lambda: _reasons(run.queries, around))
    return result


def _reasons(queries: Queries, around: int | None) -> Reasons:
    sql = f"select newest, count(*) as n from t where ({TRAIN}) and newest >= 0 group by newest"
    played = {row["newest"]: row["n"] for row in queries.rows(sql)}
    low, high = min(played, default=0), max(played, default=0)
    if not played:
        return Reasons(words="No training episode is recorded.")
    if high - low < 2:
        return Reasons(words="Too early to tell: fewer than three policy updates.")
    if around is None:
        width = max(1, (high - low + 1) // 5)
        before = _window(played, range(low, low + width))
        after = _window(played, range(high, high - width, -1))
    else:
        width = max(2, (high - low + 1) // 10)
        middle = min(max(around, low + 1), high)
        before = _window(played, range(middle - 1, max(low, middle - width) - 1, -1))
        after = _window(played, range(middle, min(high, middle + width - 1) + 1))
    parts = [_part(queries, *window) for window in (before, after)]
    if not all(part.episodes for part in parts):
        return Reasons(words="No scored episodes around this step.", before=before, after=after)
    one, two = parts
    change, error = two.mean - one.mean, math.hypot(one.error, two.error)
    result = Reasons(before=before, after=after, change=change, error=error)
    for level in sorted(one.levels.keys() & two.levels.keys()):
        (n1, mean1, error1), (n2, mean2, error2) = one.levels[level], two.levels[level]
        shares = n1 / one.episodes, n2 / two.episodes
        both, query = math.hypot(error1, error2), f"?kind=train&difficulty={level}"
        result.difficulties.append(Moved(f"difficulty {level}", mean1, mean2, both, *shares, query))
        result.within += sum(shares) / 2 * (mean2 - mean1)
    result.mix = change - result.within
    for tag in one.tags.keys() & two.tags.keys():
        (n1, mean1), (n2, mean2) = one.tags[tag], two.tags[tag]
        if min(n1 / one.episodes, n2 / two.episodes) > 0.02:
            result.tags.append(Moved(tag, mean1, mean2, None, n1 / one.episodes, n2 / two.episodes))
    result.tags.sort(key=lambda item: -abs(item.change))
    result.tags = result.tags[:8]
    for name in one.metrics.keys() & two.metrics.keys():
        if abs(two.metrics[name] - one.metrics[name]) > 0.005:
            result.components.append(Moved(name, one.metrics[name], two.metrics[name]))
    result.components.sort(key=lambda item: -abs(item.change) / (abs(item.before) + abs(item.after) + 1e-9))
    for name in {*one.endings, *two.endings}:
        result.endings.append(Moved(name, one.endings.get(name, 0.0), two.endings.get(name, 0.0)))
    result.endings.sort(key=lambda item: -abs(item.change))
    result.lengths = [Moved(name, one.lengths[name], two.lengths[name]) for name in one.lengths]
    result.beside = [*_beside(result)]
    _say(result)
    return result


def _beside(found: Reasons) -> Iterator[str]:
    """Yield the ending, the length and the errors that changed most, if they changed much."""
    for item in found.endings[:1]:
        twice = max(item.before, item.after) >= 2 * min(item.before, item.after)
        if abs(item.change) >= (ENDED / 2 if twice else ENDED):
            yield f"{item.name}: {percent(item.before)} → {percent(item.after)} of episodes."
    errors = [item for item in found.components if item.name.endswith(ERRORS) and item.before and item.after]
    errors = [item for item in errors if max(item.before, item.after) >= OFTEN]
    grown = [item for item in found.lengths if min(item.before, item.after) > 0 and item.name != "seconds"]
    for items in (grown, errors):
        for item in sorted(items, key=lambda item: -abs(math.log(item.after / item.before)))[:1]:
            if not 1 / LONGER < item.after / item.before < LONGER:
                yield f"{item.name} per episode: {number(item.before)} → {number(item.after)}."


def _window(played: Mapping[int, int], versions: range) -> tuple[int, int]:
    """Return the first and last of these versions, from the first one on, that together have `COMPARED` episodes."""
    number, last = 0, versions[0]
    for last in versions:
        number += played.get(last, 0)
        if number >= COMPARED:
            break
    return min(versions[0], last), max(versions[0], last)


def _say(found: Reasons) -> None:
    assert found.change is not None
    assert found.error is not None
    if abs(found.change) <= SURE * found.error:
        found.words = f"No significant change ({signed(found.change)} ± {found.error:.2f})."
    else:
        word = "rose" if found.change > 0 else "fell"
        parts = [f"{signed(found.within)} at equal difficulty"]
        if abs(found.mix) > 0.005:
            parts.append(f"{signed(found.mix)} from a changed mix of difficulties")
        found.words = f"It {word} by {abs(found.change):.2f} ± {found.error:.2f}: {', '.join(parts)}."
        against = [
            item
            for item in found.components
            if all(0 <= value <= 1 for value in (item.before, item.after))
            and item.change * found.change < 0
            and abs(item.change) > 0.1
            and not item.name.endswith(ERRORS)
        ]
        found.warnings += [
            f"{item.name} moved in the opposite direction: {item.before:.2f} → {item.after:.2f}. Check some "
            "episodes for reward hacking."
            for item in against[:2]
        ]


@dataclass(slots=True)
class _Part:
    """Figures of the training episodes of a range of policy versions."""

    episodes: int
    mean: float
    error: float
    levels: dict[int, tuple[int, float, float]]
    tags: dict[str, tuple[int, float]]
    metrics: dict[str, float]
    endings: dict[str, float]
    lengths: dict[str, float]


def _part(queries: Queries, first: int, last: int) -> _Part:
    by_task: dict[int, dict[str, list[float]]] = {}
    tags: dict[str, list[float]] = {}
    endings: Counter[str] = Counter()
    metrics: Counter[str] = Counter()
    played = valid = 0
    sums_of = dict.fromkeys(("tokens", "turns", "calls", "seconds"), 0.0)
    for row in queries.rows(
        "select difficulty, task, reward, tags, outcome, why, calls, tokens, turns, wall_s, metrics, :tools as tools "
        f"from t where ({TRAIN}) and newest between :first and :last",
        {"first": first, "last": last},
    ):
        played += 1
        level, task, reward, tagged, outcome, why, calls, tokens, turns, seconds, measured, tools = row
        if outcome in ("limit", "lost"):
            endings[out_of(why) if outcome == "limit" else f"lost: {why}"] += 1
        elif outcome == "crashed":
            endings["agent crashed"] += 1
        elif calls == 0 and tools:
            endings["never used a tool"] += 1
        if outcome not in SCORED or reward is None:
            continue
        valid += 1
        for sums in (by_task.setdefault(level, {}).setdefault(task, [0.0, 0.0]), tags.setdefault(tagged, [0.0, 0.0])):
            sums[0] += reward
            sums[1] += 1
        metrics[measured] += 1
        for name, value in (("tokens", tokens), ("turns", turns), ("calls", calls), ("seconds", seconds or 0.0)):
            sums_of[name] += value
    if not valid:
        return _Part(0, 0.0, 0.0, {}, {}, {}, {}, {})
    totals = {level: [(total, int(n)) for total, n in tasks.values()] for level, tasks in by_task.items()}
    levels = {level: (sum(n for _, n in sums), *clustered(sums)) for level, sums in totals.items()}
    by_tag: dict[str, list[float]] = {}
    for text, (total, n) in tags.items():
        for tag in json.loads(text) if text else ():
            sums = by_tag.setdefault(tag, [0.0, 0.0])
            sums[0] += n
            sums[1] += total
    return _Part(
        valid,
        *clustered([sums for level in totals.values() for sums in level]),
        levels,
        {tag: (int(n), total / n) for tag, (n, total) in by_tag.items()},
        _means(metrics),
        {name: n / played for name, n in endings.items()},
        {name: total / valid for name, total in sums_of.items()},
    )


def _means(metrics: Counter[str]) -> dict[str, float]:
    """Return the mean of each metric over all episodes; rows leave out metrics that are 0.

    Args:
        metrics: number of episodes with exactly these metrics, by the metrics as JSON.
    """
    sums: dict[str, float] = {}
    for text, times in metrics.items():
        for name, value in json.loads(text).items() if text else ():
            if isinstance(value, int | float):
                sums[name] = sums.get(name, 0.0) + value * times
    return {name: total / metrics.total() for name, total in sums.items()}


NARROW, MUCH, WAITED = 0.6, 0.5, 0.01
"""Thresholds for the fourth answer.

The share of its time from which a busy actor is the bottleneck; the share of their time that episodes spend in the
environment from which that is the bottleneck; and the share of their time that samples wait from which waiting is
mentioned.
"""


@dataclass(slots=True)
class Limit:
    """The answer to "What limited the speed?"."""

    share: float | None = None
    of: str = ""
    """Name of `share`, to be read after it: "of the trainer's time waiting for episodes"."""
    words: str = ""
    detail: str = ""
    advice: list[tuple[str, str]] = field(default_factory=list)
    """Keys of the recipe, and the effect of changing each."""
    accounts: dict[str, dict[str, float]] = field(default_factory=dict)


def limit(run: RunView) -> Limit:
    """Identify the bottleneck from the time accounts of a run: the busiest actor, and which actors wait for it."""
    accounts = time_account(run.metrics)
    accounts = {actor: dict(sorted(doing.items(), key=lambda item: -item[1])) for actor, doing in accounts.items()}
    result = Limit(accounts=accounts)
    trainer = accounts.get("trainer", {})
    if not trainer:
        result.words = "The run's metrics contain no time measurements."
        return result
    work = {doing: share for doing, share in trainer.items() if doing != "start"}
    doing, share = max(work.items(), key=lambda item: item[1])
    result.share, result.of = share, f"of the trainer's time {_activity(doing)}"
    if not is_waiting("trainer", doing):
        result.words = f"Bottleneck: trainer. It {_does(doing)} {percent(share)} of its time."
        if "generator" in accounts:
            result.detail = f"The generators were busy {percent(_busy(accounts, 'generator'))} of their time."
        result.advice = ADVICE["trainer"]
        return result
    bottleneck, figures = _awaited(doing, accounts)
    idle = f"The trainer spent {percent(share)} of its time {_activity(doing)}."
    if bottleneck:
        result.words, result.detail = f"Bottleneck: {bottleneck}.", f"{idle} {figures}"
        result.advice = ADVICE[bottleneck]
    else:
        result.words = idle
    return result


def _awaited(wait: str, accounts: Mapping[str, Mapping[str, float]]) -> tuple[str, str]:
    """Identify what the trainer waits for, with a sentence of figures; empty if it can't be told."""
    sampling, scoring = (_busy(accounts, actor) for actor in ("generator", "reference"))
    episodes = accounts.get("episodes", {})
    outside = sum(share for name, share in episodes.items() if name in ("environment", "reset", "close"))
    rollouts = [account.get("busy", 0.0) for actor, account in accounts.items() if actor.startswith("rollouts")]
    if "generators" in wait:
        return "weight transfer", "The weights/ curves show the transfer times."
    if "reference" in wait or (scoring >= NARROW and scoring > sampling):
        return "reference model", f"The reference model was busy {percent(scoring)} of its time."
    if rollouts and max(rollouts) > 0.8:
        return "rollout workers", f"The busiest rollout worker used {percent(max(rollouts))} of its time."
    figures = (
        f"The generators were busy {percent(sampling)} of theirs; episodes spent {percent(outside)} in the environment."
    )
    if outside >= MUCH:
        return "tools and sandboxes", figures
    if sampling >= NARROW:
        return "sampling", figures
    return ("too few concurrent episodes", figures) if "generator" in accounts else ("", "")


ADVICE = {
    "trainer": [
        ("trainer.procs", "more processes share a step"),
        ("grpo.groups_per_step", "smaller batches make steps shorter"),
    ],
    "weight transfer": [("model.dtype", "bfloat16 halves the bytes to send")],
    "reference model": [
        ("grpo.reference.procs", "more processes share its work"),
        ("grpo.reference.source", "a smaller model, or none if the loss doesn't need one"),
    ],
    "rollout workers": [("rollouts.workers", "more processes run episodes")],
    "sampling": [
        ("generator.num_replicas", "more generators sample in parallel"),
        ("grpo.max_off_policy_steps", "sampling may run further ahead of training"),
        ("grpo.max_tokens_per_turn", "a lower limit shortens long answers"),
    ],
    "tools and sandboxes": [
        ("sandbox.concurrency", "more sandboxes at once"),
        ("grpo.max_off_policy_steps", "more groups run at once"),
        ("rollouts.workers", "more processes run episodes"),
    ],
    "too few concurrent episodes": [
        ("grpo.max_off_policy_steps", "sampling may run further ahead of training"),
        ("grpo.groups_per_step", "larger batches"),
    ],
}
"""Keys of the recipe by bottleneck, and the effect of changing each."""


def sample_limit(queries: Queries, environment: str = "") -> Limit:
    """Identify the activity on which an evaluation's samples spent their time, and settings to try.

    Args:
        environment: only its samples; empty: all.
    """
    sql = (
        "select avg(wall_s) as wall, avg(generate_s) as model, avg(step_s) as environment, avg(reset_s) as reset, "
        f"avg(close_s) as close, avg(waited_s) as waited from t where {VALID} and wall_s > 0 "
        "and :environment in ('', environment)"
    )
    (row,) = queries.rows(sql, {"environment": environment})
    if row["wall"] is None:
        return Limit(words="No times are recorded.")
    times = Times(**{name: row[name] or 0.0 for name in row.keys()})  # noqa: SIM118 - a row of SQLite iterates over values
    doing, spent = next(iter(times.parts.items()))
    result = Limit(min(spent / times.wall, 1.0), f"of a sample's time: {doing}", f"A sample took {times.words()}.")
    if times.waited >= WAITED * times.wall:
        share = percent(times.waited / times.wall)
        result.detail = f"{share} of it was spent waiting for rate limits or a free sandbox."
    result.advice = (WAITING_ADVICE if times.waited >= spent / 2 else SAMPLE_ADVICE).get(doing, [])
    return result


SAMPLE_ADVICE = {
    "model": [("concurrency", "more concurrent requests, if the endpoint has capacity")],
    "tools and scoring": [("max_samples", "more concurrent samples, if there are idle CPUs")],
    "reset": [("max_samples", "fewer concurrent samples, if they compete for CPUs")],
}
_FREE_SANDBOX = [
    ("sandbox_options", "more sandboxes at once: `{concurrency: N}`, if CPUs and memory allow"),
    ("max_samples", "fewer concurrent samples compete for sandboxes"),
]
WAITING_ADVICE = {
    "model": [("concurrency", "fewer concurrent requests, if the endpoint limits their rate")],
    "tools and scoring": _FREE_SANDBOX,
    "reset": _FREE_SANDBOX,
}
"""Settings to try if a sample waits for most of the time of its longest activity."""


def _busy(accounts: Mapping[str, Mapping[str, float]], actor: str) -> float:
    """Return the share of its time in which an actor doesn't wait; 0 if there is no such actor."""
    account = accounts.get(actor, {})
    return 1.0 - sum(share for name, share in account.items() if is_waiting(actor, name)) if account else 0.0


def _activity(doing: str) -> str:
    if doing.startswith("wait"):
        return doing.replace("wait", "waiting", 1)
    return {"train": "training", "push weights": "sending weights", "save": "saving checkpoints"}.get(doing, doing)


def _does(doing: str) -> str:
    return {"train": "trained for", "push weights": "sent weights for", "save": "saved checkpoints for"}.get(
        doing, f"spent on {doing}"
    )
