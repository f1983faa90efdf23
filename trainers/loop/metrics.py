"""Figures of a training step and of the whole run, under the names that displays and the report know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from trainers.buffer.packed import GroupRecord
from trainers.buffer.types import BufferStats
from trainers.loop.advantages import Group

_METRIC_NAMES = {
    "loss": "grpo_loss/total_loss",
    "entropy": "grpo_loss/entropy",
    "loss/kl_ref": "grpo_loss/kl_divergence_mean",
    "loss/mismatch_mean": "mismatch/mean",
    "loss/mismatch_max": "mismatch/max",
}


def named(trained: Mapping[str, float]) -> dict[str, float]:
    """The trainer's metrics under the run's names: the loss's own under `grpo_loss/`.

    `grpo_loss/kl_divergence_mean` is to the reference model; without one, to the policy that sampled (`kl_k3`).
    """
    result = {_METRIC_NAMES.get(name, _default(name)): value for name, value in trained.items()}
    if "loss/kl_k3" in trained:
        result.setdefault("grpo_loss/kl_divergence_mean", trained["loss/kl_k3"])
    return result


def _default(name: str) -> str:
    return f"grpo_{name}" if name.startswith("loss/") else f"trainer/{name}"


@dataclass(slots=True)
class Totals:
    """Counts since the start of the run."""

    tokens_generated: int = 0
    episodes: int = 0
    episodes_invalid: int = 0
    episodes_late: int = 0
    forks: int = 0

    @classmethod
    def since(cls, earlier: Mapping[str, Any]) -> Totals:
        """Counts that go on from the summary of an earlier session of the run."""
        return cls(**{field.name: int(earlier.get(field.name) or 0) for field in fields(cls)})

    def count(self, group: Group, group_size: int) -> None:
        """Add a group that has been rolled out."""
        self.episodes += len(group.episodes)
        self.episodes_late += group_size - len(group.episodes)
        self.episodes_invalid += sum(not episode.valid for episode in group.episodes)
        self.tokens_generated += sum(episode.num_sampled_tokens for episode in group.episodes)
        self.forks += sum(turn.reply.forked for episode in group.episodes for turn in episode.turns)

    def summary(self) -> dict[str, int]:
        """For summary.json."""
        return asdict(self)

    def metrics(self) -> dict[str, float]:
        """What went wrong so far."""
        counts = {"invalid": self.episodes_invalid, "late": self.episodes_late, "forks": self.forks}
        return {f"episode/{name}": float(count) for name, count in counts.items()}


def batch_metrics(groups: Sequence[GroupRecord]) -> dict[str, float]:
    """Rewards, signal and lengths of the groups of one training step; means over valid episodes."""
    metrics = {
        "reward/mean": _mean(groups, "reward"),
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


def buffer_metrics(stats: BufferStats) -> dict[str, float]:
    """What the buffer has let go of, since the start of the run."""
    counts = {"filtered": stats.filtered, "reused": stats.reused, "discarded_stale": stats.discarded_stale}
    return {f"groups/{name}": float(count) for name, count in counts.items()}


def _mean(groups: Sequence[GroupRecord], column: str) -> float:
    values = [value for group in groups for value in group.column(column).tolist()]
    return sum(values) / len(values) if values else 0.0
