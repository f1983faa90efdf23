"""What a page says of one episode besides what was written in it: its figures, its times, what training made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forge_env.run.trained import TrainedEpisode, TrainedGroup
from forge_env.trajectory_index import SCORED
from forge_env.view import text
from forge_env.view.filter import is_training
from forge_env.view.runs import RunView


def figures(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Metrics by name; of a damaged record, a value may be anything."""
    return [
        (name, text.number(value) if isinstance(value, int | float) else str(value)) for name, value in metrics.items()
    ]


def rewards(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Of the episodes that count."""
    return [row["reward"] for row in rows if row["outcome"] in SCORED and row["reward"] is not None]


def against(row: Mapping[str, Any], group: Sequence[Mapping[str, Any]]) -> float | None:
    """An episode's reward less the mean of its group; None where there is nothing to compare."""
    found = rewards(group)
    return row["reward"] - sum(found) / len(found) if len(found) > 1 and row["reward"] is not None else None


def facts(row: Mapping[str, Any], trajectory: Any, against: float | None) -> list[tuple[str, str]]:
    """What stands beside an episode, by name; what there is nothing of is left out."""
    versions = str(row["oldest"]) if row["oldest"] == row["newest"] else f"{row['oldest']} to {row['newest']}"
    found = [
        ("task", row["task"]),
        ("split", row["split"]),
        ("environment", row["environment"]),
        ("difficulty", str(row["difficulty"])),
        ("against its group", text.signed(against) if against is not None else ""),
        ("policy version", versions if row["newest"] >= 0 else ""),
        ("turns", str(row["turns"])),
        ("tool calls", str(row["calls"])),
        ("tokens", text.count(row["tokens"]) if row["tokens"] else ""),
        ("longest context", text.count(row["context"]) if row["context"] else ""),
        ("cost", f"{row['cost']:.4g}" if row["cost"] else ""),
        ("retries", str(row["retries"]) if row["retries"] else ""),
        ("submitted", (trajectory.answer or "")[:200]),
        *((f"seat {seat}", f"{value:g}") for seat, value in trajectory.rewards.items()),
    ]
    return [(name, value) for name, value in found if value]


def trained(run: RunView, row: Mapping[str, Any]) -> tuple[int, TrainedGroup, TrainedEpisode | None] | None:
    """The step that was trained on an episode, where that is recorded; with its group and its own figures."""
    return run.trained.of(row["grp"], row["member"]) if is_training(row["kind"]) and row["grp"] else None


def _fate(run: RunView, row: Mapping[str, Any]) -> str:
    """Why no step was trained on an episode: "dropped", "lost", "stale"; empty where none is known."""
    known = is_training(row["kind"]) and row["grp"].isascii() and row["grp"].isdigit()
    return run.trained.trained.fates.get(int(row["grp"]), "") if known else ""


def learned(run: RunView, row: Mapping[str, Any]) -> str:
    """What was learned of an episode's sampled tokens."""
    if (found := trained(run, row)) is not None:
        own = "" if found[2] is None else f", with a mean advantage of {text.signed(found[2].advantage, 3)}"
        return f"Step {found[0]} was trained on its sampled tokens{own}."
    if fate := _fate(run, row):
        return f"No step was trained on it: its group was {fate}."
    return "" if is_training(row["kind"]) else "Held-out: nothing is learned of it."


def training(run: RunView, row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What became of an episode in training, where that is recorded."""
    found = trained(run, row)
    if found is None:
        fate = _fate(run, row)
        return [("not trained on", fate)] if fate else []
    step, group, own = found
    lines = [("trained at step", str(step)), ("staleness then", str(group.staleness))]
    return [*lines, *([("advantage", text.signed(own.advantage, 3))] if own is not None else [])]


def times(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Where its time went, by name."""
    found = [
        ("in all", row["wall_s"]),
        ("reset", row["reset_s"]),
        ("model", row["generate_s"]),
        ("environment", row["step_s"]),
        ("closing", row["close_s"]),
        ("waited", row["waited_s"]),
    ]
    return [(name, text.seconds(value)) for name, value in found if value]
