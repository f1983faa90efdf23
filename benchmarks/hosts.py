"""Measure the cost of several hosts: the default recipe on one host and on three.

The hosts are workers (`forge-env worker`) at loopback addresses of this machine; if root runs the benchmark, they are
in separate namespaces. They share the machine's cores, so the comparison shows the cost of communication between hosts.
One host plays episodes, one generates, one has trainer and buffer. Steps are timed while the pipeline is full. Aim: at
most 1.15x. Standard error of a held-out score: 0.03. Runs that have succeeded are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.frame import main, spread, summary, table, train, trained
from tests.trainers.actors.workers import workers

PLACE = {"rollouts": [0], "generator": [1], "trainer": [2]}
"""Host index of each role; the buffer is placed with the trainer."""


def run(hosts: int, steps: int, seed: int) -> Path:
    """Train the default recipe on this machine, or over three of its hosts, and return the run's folder."""
    keys = [f"grpo.steps={steps}", f"seed={seed}"]
    keys += ["evaluation.every=0", "logging.tensorboard=false", "checkpoint.every=0"]
    with ExitStack() as stack:
        if hosts > 1:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fe-")))
            keys += job([each.address for each in stack.enter_context(workers(hosts, scratch))])
        return train(f"hosts-{hosts}-{steps}-{seed}", *keys)


def job(addresses: list[str], place: dict[str, list[int]] = PLACE) -> list[str]:
    """Return the config overrides of a run on these workers."""
    return ["job.kind=hosts", f"job.workers={json.dumps(addresses)}", f"job.place={json.dumps(place)}"]


def figures(folder: Path) -> tuple[list[float], dict[str, str]]:
    """Return the seconds per step, and the figures of the table by name.

    Seconds are of steps while the pipeline is full; each value is a mean over `max_off_policy_steps + 1` consecutive
    steps, whose batches are sampled together and finish one right after the other.
    """
    result = summary(folder)
    bound = result["max_off_policy_steps"]
    full, together = trained(folder)[bound + 2 : -(bound + 1)], bound + 1
    steps = [(later["time"] - row["time"]) / together for row, later in zip(full, full[together:], strict=False)]
    stages = {"snapshot": "snapshot_s", "push": "push_s", "pull": "pull_s", "pause": "stall_s"}

    def weights(name: str) -> float:
        return statistics.median(row[f"weights/{name}"] for row in full if f"weights/{name}" in row)

    return steps, {
        "s a step": spread(steps),
        "held-out score": f"{result['heldout_start']:.3f} -> {result['heldout_end']:.3f}",
        "oldest trained token (bound), steps": f"{result['max_staleness']} ({bound})",
        "tokens dropped as stale": result["tokens_discarded_stale"],
        "episodes lost": result["episodes_invalid"],
        "weights, MB": f"{weights('bytes') / 2**20:.1f}",
        "transfer, ms": ", ".join(f"{stage} {weights(name) * 1e3:.1f}" for stage, name in stages.items()),
    }


def measure(args: argparse.Namespace) -> list[str]:
    folders = [run(count, args.steps, args.seed) for count in (1, len(PLACE))]
    (one, of_one), (three, of_three) = map(figures, folders)
    rows = [[name, of_one[name], of_three[name]] for name in of_one]
    rows.insert(1, ["of one host", "1.00x", f"{statistics.median(three) / statistics.median(one):.2f}x"])
    return table(["", "one host", "three hosts"], rows)


if __name__ == "__main__":
    main("Several hosts", measure, steps=20, seed=0)
