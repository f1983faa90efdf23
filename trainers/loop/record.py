"""Records of a run: metrics of its steps, under the names that displays and the report use, and its summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from forge_env.run import Run
from forge_env.run.fingerprint import Fingerprint
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.packed import FIXED, GroupRecord
from trainers.buffer.types import BufferStats, Reservation
from trainers.rollout.rollouts import Rollouts

AUDIT = "contract/"
"""Prefix of the trainer's audit metrics, which are passed to `trainers.loop.contract` and not logged."""
_METRIC_NAMES = {
    "loss": "grpo_loss/total_loss",
    "entropy": "grpo_loss/entropy",
    "loss/kl_ref": "grpo_loss/kl_divergence_mean",
    "loss/mismatch_mean": "mismatch/mean",
    "loss/mismatch_max": "mismatch/max",
}


class Record:
    """Logs the training steps of a run, and keeps its summary up to date.

    Attributes:
        counters: the buffer's counters as of the last step.
        pending: batch and metrics of a step that is trained but not logged yet.
    """

    def __init__(
        self,
        run: Run,
        buffer: LocalReplayBuffer[Any],
        rollouts: Rollouts,
        more: Sequence[Callable[[], Mapping[str, float]]],
    ) -> None:
        self._run, self._buffer, self._rollouts, self._more = run, buffer, rollouts, more
        self.counters = BufferStats()
        self.pending: tuple[Reservation, dict[str, float]] | None = None
        self.fingerprint: Fingerprint | None = None
        self._trained_at: list[float] = []

    async def log_pending(self, step: int) -> None:
        """Log the step that is trained but not logged yet, if there is one."""
        if self.pending is not None:
            await self.log(step, *self.pending)

    async def log(self, step: int, batch: Reservation, metrics: Mapping[str, float]) -> None:
        """Log a training step: its number from 1, its batch, and the trainer's metrics."""
        self.counters = await self._buffer.stats()
        ages = batch.staleness
        row = {"staleness/max": float(max(ages)), "staleness/mean": sum(ages) / len(ages), **metrics}
        for more in self._more:
            row |= more()
        row |= batch_metrics(batch.groups) | self._rollouts.totals.metrics()
        row["groups/reused"] = float(self.counters.reused)
        row["groups/discarded_stale"] = float(self.counters.discarded_stale)
        self._trained_at.append(time.perf_counter())
        self._run.log(step, row)
        self._run.trained(step, trained_row(batch), self.fingerprint)
        self.pending = None
        steps = self._run.config.grpo.steps
        eta_s = self._seconds_left(steps - step)
        self._run.status(
            reward=row["reward/mean"], staleness=row["staleness/max"], cut=row["episode/cut_replies"], eta_s=eta_s
        )
        self._run.progress(step, steps)

    def _seconds_left(self, steps: int) -> float | None:
        recent = self._trained_at[-10:]
        if len(recent) < 2:
            return None
        return (recent[-1] - recent[0]) / (len(recent) - 1) * steps

    def summarise(self, step: int) -> None:
        """Update the run's summary after training step `step`."""
        self._run.summary |= {
            "steps": step,
            "tokens_discarded_stale": self.counters.tokens_discarded_stale,
            "max_staleness": self.counters.max_staleness,
            "max_off_policy_steps": self._run.config.grpo.max_off_policy_steps,
            **asdict(self._rollouts.totals),
        }


def named(trained: Mapping[str, float]) -> dict[str, float]:
    """Rename the trainer's metrics to the run's names; those of the loss begin with `grpo_loss/`.

    `grpo_loss/kl_divergence_mean` is the divergence from the reference model, or without one, from the policy that
    sampled (`kl_k3`).
    """
    result = {}
    for name, value in trained.items():
        default = f"grpo_{name}" if name.startswith("loss/") else f"trainer/{name}"
        result[_METRIC_NAMES.get(name, default)] = value
    if "loss/kl_k3" in trained:
        result.setdefault("grpo_loss/kl_divergence_mean", trained["loss/kl_k3"])
    return result


def split_audit(trained: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Split a step's metrics from the trainer into those of its token audit and the rest, renamed by `named`."""
    audit = {name: value for name, value in trained.items() if name.startswith(AUDIT)}
    metrics = named({name: value for name, value in trained.items() if name not in audit})
    return {name.removeprefix(AUDIT): value for name, value in audit.items()}, metrics


def batch_metrics(groups: Sequence[GroupRecord]) -> dict[str, float]:
    """Rewards, signal and lengths of the groups of one training step; means over valid episodes."""
    cut, replies = (sum(float(group.column(name).sum()) for group in groups) for name in ("cut_replies", "turns"))
    metrics = {
        "reward/mean": _mean(groups, "reward"),
        "advantage/mean": _mean(groups, "advantage"),
        "groups/with_signal": sum(group.has_signal for group in groups) / len(groups),
        "episode/turns": _mean(groups, "turns"),
        "episode/tokens": _mean(groups, "tokens"),
        "episode/truncated": _mean(groups, "truncated"),
        "episode/cut_replies": cut / replies if replies else 0.0,
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
            "digest": group.digest,
            "credit": group.credit,
            "episodes": [
                [member, round(reward, 6), round(advantage, 6), int(tokens), int(turns), int(truncated)]
                for member, (reward, advantage, turns, tokens, truncated, _) in zip(
                    group.members, group.table[:, : len(FIXED)].tolist(), strict=True
                )
            ],
        }
        for index, group, version, staleness, uses in zip(
            batch.indices, batch.groups, batch.versions, batch.staleness, batch.uses, strict=True
        )
    ]


def _mean(groups: Sequence[GroupRecord], column: str) -> float:
    values = [value for group in groups for value in group.column(column).tolist()]
    return sum(values) / len(values) if values else 0.0
