"""The metrics that displays know by name, and the conversion of a run's rows to curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge_env.run.metrics import REWARD
from forge_env.run.state import held_out_scores

TIME_PREFIX = "time/"
"""Prefix of `time/ACTOR/ACTIVITY`: seconds that an actor spent on an activity in a step (or its share of the step)."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: a title, the metrics drawn in it (label -> name), and their unit."""

    title: str
    series: Mapping[str, str]
    unit: str = ""


PANELS = (
    Panel("Groups with signal", {"share": "groups/with_signal"}),
    Panel("Episode length", {"tokens": "episode/tokens"}, "tokens"),
    Panel("Turns", {"turns": "episode/turns"}),
    Panel(
        "Truncated, lost and late",
        {"truncated": "episode/truncated", "lost": "episode/invalid", "late": "episode/late"},
        "share, episodes",
    ),
    Panel("Replies cut", {"share": "episode/cut_replies"}),
    Panel("Entropy", {"entropy": "grpo_loss/entropy"}, "nats"),
    Panel("KL divergence", {"KL": "grpo_loss/kl_divergence_mean"}, "nats"),
    Panel("Clip fraction", {"low": "grpo_loss/clip_fraction_low", "high": "grpo_loss/clip_fraction_high"}),
    Panel("Staleness of trained tokens", {"oldest": "staleness/max", "mean": "staleness/mean"}, "policy updates"),
    Panel("Trainer/generator mismatch, mean", {"mean": "mismatch/mean"}, "nats"),
    Panel("Trainer/generator mismatch, largest", {"largest": "mismatch/max"}, "nats"),
    Panel("Tokens generated", {"generated": "generator/tokens_per_s"}, "tokens/s"),
    Panel("Tokens trained", {"trained": "trainer/tokens_per_s"}, "tokens/s while training"),
    Panel(
        "Time of a step",
        {"training": "time/trainer/train", "waiting for episodes": "time/trainer/wait for episodes"},
        "s",
    ),
    Panel("Generators running", {"replicas": "generator/replicas"}),
    Panel("Gradient norm", {"gradient norm": "trainer/grad_norm"}),
    Panel("Loss", {"loss": "grpo_loss/total_loss"}),
    Panel("Supervised loss", {"training": "sft/loss", "held-out": "eval/eval/loss"}, "nats"),
)
"""Charts of a run's page, in display order; a chart without data is omitted."""


@dataclass(slots=True)
class Curve:
    """Points of one line, in order of x; `error` is the standard error of each y, or empty."""

    label: str
    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)


def merge_rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge rows into one per step; later rows of a step take precedence (a resumed run repeats its last steps)."""
    merged: dict[int, dict[str, Any]] = {}
    for row in rows:
        merged.setdefault(int(row["step"]), {}).update(row)
    return [merged[step] for step in sorted(merged)]


def curve(rows: Iterable[Mapping[str, Any]], label: str, key: str, error: str | None = None) -> Curve:
    """Return the curve of a metric over steps; rows without it are skipped."""
    result = Curve(label)
    for row in rows:
        if row.get(key) is None:
            continue
        result.x.append(float(row["step"]))
        result.y.append(float(row[key]))
        if error is not None:
            result.error.append(float(row.get(error) or 0.0))
    return result


def score_curve(rows: Sequence[Mapping[str, Any]], split: str) -> Curve:
    """Return the held-out score of `split` with its standard error."""
    return curve(rows, f"held-out ({split})", f"eval/{split}/score", f"eval/{split}/stderr")


def training_curve(rows: Sequence[Mapping[str, Any]], score: str = "") -> Curve:
    """Return the curve of training episodes by a metric; by their reward if they don't have it."""
    if score and any(row.get(f"reward/{score}") is not None for row in rows):
        return curve(rows, f"training {score}", f"reward/{score}")
    return curve(rows, "training reward", REWARD)


APART = 0.05
"""Difference of reward and score from which a chart shows both."""


def reward_curves(rows: Sequence[Mapping[str, Any]], score: str = "", *, apart: bool = True) -> list[Curve]:
    """Return the curves of the headline chart: training first, then the held-out score of every split.

    Both show one quantity: training episodes are scored by the same metric, if they have it. Their reward follows if it
    is another one on the same scale, as in a run that learns to be rewarded for unsolved tasks.

    Args:
        score: metric of the held-out score; empty: unknown.
        apart: whether to show a reward that differs.
    """
    curves = [training_curve(rows, score)]
    for split in held_out_scores(rows):
        line = score_curve(rows, split)
        line.label = f"held-out {score}".rstrip() + ("" if split == "eval" else f" ({split})")
        curves.append(line)
    reward = training_curve(rows)
    scored = dict(zip(curves[0].x, curves[0].y, strict=True))
    gaps = [abs(y - scored[x]) for x, y in zip(reward.x, reward.y, strict=True) if x in scored]
    if apart and max(gaps, default=0.0) > APART and unit_bounds([reward, *curves]) is not None:
        curves.append(reward)
    return [line for line in curves if line.x]


def unit_bounds(curves: Iterable[Curve]) -> tuple[float, float] | None:
    """Return 0 and 1 as the range to draw if every value is between them; None: use the range of the values."""
    return (0.0, 1.0) if all(0.0 <= y <= 1.0 for line in curves for y in line.y) else None


WAITING_EPISODES = ("generate", "retry")
"""Activities in which an episode waits: for the model's answer, or to be retried."""


def is_waiting(actor: str, doing: str) -> bool:
    """Whether an actor with this activity waits for another."""
    return doing.startswith(("wait", "idle")) or (actor == "episodes" and doing in WAITING_EPISODES)


COLOURS = 6
"""Number of colours that a page's style defines, `0` to `5`."""
COLOUR_OF = {
    "generate": 0, "busy": 0, "add": 0, "python": 0, "evaluate": 0, "group": 0, "train": 1, "command": 1,
    "environment": 2, "sample": 2, "tests": 2, "start": 2, "push weights": 3, "load weights": 3, "reset": 3,
    "session": 3, "save": 4, "score": 4, "files": 4, "book-keeping": 5, "close": 5, "release": 5,
}  # fmt: skip
"""The colour of each activity, the same in all charts; no two activities of one actor share a colour."""


def colour_of(doing: str) -> int:
    """Return the colour of an activity; for activities of third-party trainers it is derived from the name."""
    return COLOUR_OF.get(doing, sum(doing.encode()) % COLOURS)


def time_account(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the time account of each actor over the run, `{actor: {activity: share}}`; an actor's shares sum to 1."""
    sums: dict[str, dict[str, float]] = {}
    for row in rows:
        for key, value in row.items():
            actor, slash, what = key.removeprefix(TIME_PREFIX).partition("/")
            if key.startswith(TIME_PREFIX) and slash and value is not None:
                account = sums.setdefault(actor, {})
                account[what] = account.get(what, 0.0) + float(value)
    totals = {actor: sum(account.values()) for actor, account in sums.items()}
    return {
        actor: {what: value / totals[actor] for what, value in account.items()}
        for actor, account in sums.items()
        if totals[actor] > 0
    }
