"""Details of one episode beside its messages: metrics, times, and its use in training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from forge_env.evaluation.estimates import Estimate
from forge_env.figures import count, duration, number, signed
from forge_env.files import plain_name
from forge_env.run.trained import TrainedEpisode, TrainedGroup
from forge_env.trajectory_index import SCORED
from forge_env.view.credit import interval
from forge_env.view.filter import is_training
from forge_env.view.runs import RunView

MOST_CREDITS = 8
"""Maximum calls whose credit is listed beside an episode."""


def figures(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Format metrics by name; in a damaged record, a value may be anything."""
    return [(name, number(value) if isinstance(value, int | float) else str(value)) for name, value in metrics.items()]


def rewards(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """List the rewards of the valid episodes."""
    return [row["reward"] for row in rows if row["outcome"] in SCORED and row["reward"] is not None]


def against(row: Mapping[str, Any], group: Sequence[Mapping[str, Any]]) -> float | None:
    """Return an episode's reward minus the mean of its group; None if there is nothing to compare it with."""
    valid = rewards(group)
    return row["reward"] - sum(valid) / len(valid) if len(valid) > 1 and row["reward"] is not None else None


def facts(row: Mapping[str, Any], trajectory: Any, against: float | None) -> list[tuple[str, str]]:
    """List the facts beside an episode, by name; missing ones are left out."""
    versions = str(row["oldest"]) if row["oldest"] == row["newest"] else f"{row['oldest']} to {row['newest']}"
    values = [
        ("task", row["task"]),
        ("split", row["split"]),
        ("environment", row["environment"]),
        ("difficulty", str(row["difficulty"])),
        ("reward minus group mean", signed(against) if against is not None else ""),
        ("policy version", versions if row["newest"] >= 0 else ""),
        ("turns", str(row["turns"])),
        ("tool calls", str(row["calls"])),
        ("tokens", count(row["tokens"]) if row["tokens"] else ""),
        ("longest context", count(row["context"]) if row["context"] else ""),
        ("cost", f"{row['cost']:.4g}" if row["cost"] else ""),
        ("retries", str(row["retries"]) if row["retries"] else ""),
        ("submitted", (trajectory.answer or "")[:200]),
        *((f"seat {seat}", f"{value:g}") for seat, value in trajectory.rewards.items()),
    ]
    return [(name, value) for name, value in values if value]


def trained(run: RunView, row: Mapping[str, Any]) -> tuple[int, TrainedGroup, TrainedEpisode | None] | None:
    """Return the step that was trained on an episode, with its group and its own record; None if not recorded."""
    return run.trained.of(row["grp"], row["member"]) if is_training(row["kind"]) and row["grp"] else None


def _fate(run: RunView, row: Mapping[str, Any]) -> str:
    """Return why no step was trained on an episode: "dropped", "lost", "stale"; empty if unknown."""
    known = is_training(row["kind"]) and row["grp"].isascii() and row["grp"].isdigit()
    return run.trained.trained.fates.get(int(row["grp"]), "") if known else ""


def learned(run: RunView, row: Mapping[str, Any]) -> str:
    """Describe how an episode's sampled tokens were used in training."""
    if (record := trained(run, row)) is not None:
        advantage = "" if record[2] is None else f", with a mean advantage of {signed(record[2].advantage, 3)}"
        return f"Step {record[0]} trained on its sampled tokens{advantage}."
    if fate := _fate(run, row):
        return f"Not trained on: its group was {fate}."
    return "" if is_training(row["kind"]) else "Held-out episode; not trained on."


def training(run: RunView, row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List an episode's use in training, as far as it is recorded."""
    record = trained(run, row)
    if record is None:
        fate = _fate(run, row)
        return [("not trained on", fate)] if fate else []
    step, group, member = record
    lines = [("trained at step", str(step)), ("staleness", str(group.staleness))]
    return [*lines, *([("advantage", signed(member.advantage, 3))] if member is not None else [])]


def credits(run: RunView, row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List the credits of an episode's calls that `forge-env credit` estimated, the largest first."""
    name = plain_name(row["id"])
    folders = [run.root / "credit" / stem for stem in (f"{row['kind']}-{name}", name)]
    for path in (folder / "credit.json" for folder in folders):
        with suppress(OSError, ValueError, KeyError, TypeError):  # not estimated, or damaged
            data = json.loads(path.read_bytes())
            if (data["task"], data["reward"]) != (row["task"], row["reward"]):
                continue  # of another episode with this id
            calls = [(call, call["credit"]) for call in data["calls"] if call["credit"] is not None]
            calls.sort(key=lambda pair: -abs(pair[1]["value"]))
            return [
                (f"turn {call['turn']}: {call['name'] or 'message'}", interval(Estimate(**credit)))
                for call, credit in calls[:MOST_CREDITS]
            ]
    return []


def times(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List the times of an episode, by name."""
    values = [
        ("total", row["wall_s"]),
        ("reset", row["reset_s"]),
        ("model", row["generate_s"]),
        ("environment", row["step_s"]),
        ("close", row["close_s"]),
        ("waiting", row["waited_s"]),
    ]
    return [(name, duration(value, fine=True)) for name, value in values if value]
