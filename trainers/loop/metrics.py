"""Metrics of a training step, under the names that displays and the report use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainers.buffer.packed import FIXED, GroupRecord
from trainers.buffer.types import BufferStats, Reservation

AUDIT = "contract/"
"""Prefix of the trainer's audit metrics, which are passed to `trainers.loop.contract` and not logged."""
_METRIC_NAMES = {
    "loss": "grpo_loss/total_loss",
    "entropy": "grpo_loss/entropy",
    "loss/kl_ref": "grpo_loss/kl_divergence_mean",
    "loss/mismatch_mean": "mismatch/mean",
    "loss/mismatch_max": "mismatch/max",
}


def named(trained: Mapping[str, float]) -> dict[str, float]:
    """Rename the trainer's metrics to the run's names; those of the loss begin with `grpo_loss/`.

    `grpo_loss/kl_divergence_mean` is the divergence from the reference model, or without one, from the policy that
    sampled (`kl_k3`).
    """
    result = {_METRIC_NAMES.get(name, _default(name)): value for name, value in trained.items()}
    if "loss/kl_k3" in trained:
        result.setdefault("grpo_loss/kl_divergence_mean", trained["loss/kl_k3"])
    return result


def split_audit(trained: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Split a step's metrics from the trainer into those of its token audit and the rest, renamed by `named`."""
    audit = {name: value for name, value in trained.items() if name.startswith(AUDIT)}
    metrics = named({name: value for name, value in trained.items() if name not in audit})
    return {name.removeprefix(AUDIT): value for name, value in audit.items()}, metrics


def _default(name: str) -> str:
    return f"grpo_{name}" if name.startswith("loss/") else f"trainer/{name}"


def batch_metrics(groups: Sequence[GroupRecord]) -> dict[str, float]:
    """Rewards, signal and lengths of the groups of one training step; means over valid episodes."""
    metrics = {
        "reward/mean": _mean(groups, "reward"),
        "advantage/mean": _mean(groups, "advantage"),
        "groups/with_signal": sum(group.has_signal for group in groups) / len(groups),
        "episode/turns": _mean(groups, "turns"),
        "episode/tokens": _mean(groups, "tokens"),
        "episode/truncated": _mean(groups, "truncated"),
    }
    episodes = sum(len(group.table) for group in groups)
    for name in sorted({name for group in groups for name in group.metrics}):
        total = sum(float(group.metrics[name].sum()) for group in groups if name in group.metrics)
        metrics[f"reward/{name}"] = total / episodes
    return metrics


def trained_row(batch: Reservation) -> list[dict[str, Any]]:
    """Return a training step's record for `Run.trained`: one entry for each group of the batch.

    Each episode is a list: member, reward, mean advantage of its tokens, sampled tokens, turns, 1 if truncated.
    """
    return [
        {
            "group": index,
            "task": group.task_id,
            "version": version,
            "staleness": staleness,
            "uses": uses,
            "episodes": [
                [member, round(reward, 6), round(advantage, 6), int(tokens), int(turns), int(truncated)]
                for member, (reward, advantage, turns, tokens, truncated) in zip(
                    group.members or [""] * len(group.table), group.table[:, : len(FIXED)].tolist(), strict=True
                )
            ],
        }
        for index, group, version, staleness, uses in zip(
            batch.indices, batch.groups, batch.versions, batch.staleness, batch.uses, strict=True
        )
    ]


def buffer_metrics(stats: BufferStats) -> dict[str, float]:
    """Number of repeated uses of groups, and of groups discarded as stale, since the start of the run."""
    counts = {"reused": stats.reused, "discarded_stale": stats.discarded_stale}
    return {f"groups/{name}": float(count) for name, count in counts.items()}


def _mean(groups: Sequence[GroupRecord], column: str) -> float:
    values = [value for group in groups for value in group.column(column).tolist()]
    return sum(values) / len(values) if values else 0.0
