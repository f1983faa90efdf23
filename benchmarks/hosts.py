"""Measure the cost of several hosts: the default recipe on one host and on three.

python -m benchmarks hosts [--steps 20] [--record]

The hosts are workers (`forge-env worker`) at loopback addresses of this machine. For root they run in separate
namespaces (host name, processes, mounts), so that hosts share nothing. They share the machine's cores: the comparison
shows the cost of communication between hosts, not the gain from more machines. One host plays episodes, one generates,
one has trainer and buffer. Steps are compared by their median duration, without start and warm-up. Training runs that
have succeeded are not repeated, so the benchmark can be interrupted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.frame import main, spread, summary, table, train, trained
from forge_env.display.curves import time_account
from tests.trainers.actors.workers import workers

PLACE = {"rollouts": [0], "generator": [1], "trainer": [2]}
"""Host index of each role; the buffer is placed with the trainer."""
MOST_LONGER = 1.15
"""Limit of the median step on three hosts, relative to one host."""


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
    waits = {what: share for what, share in time_account(full[1:])["trainer"].items() if what.startswith("wait")}
    stages = {"snapshot": "snapshot_s", "push": "push_s", "pull": "pull_s", "pause": "stall_s"}

    def weights(name: str) -> float:
        return statistics.median(row[f"weights/{name}"] for row in full if f"weights/{name}" in row)

    def score(which: str) -> str:
        start, end = (result[f"heldout{which}_{when}"] for when in ("start", "end"))
        return f"{start:.3f} -> {end:.3f} (+{end - start:.3f})"

    return steps, {
        "s a step": spread(steps),
        "held-out score": score(""),
        "of held-out families": score("_unseen"),
        "oldest trained token (bound), steps": f"{result['max_staleness']} ({bound})",
        "tokens dropped as stale": result["tokens_discarded_stale"],
        "episodes lost": result["episodes_invalid"],
        "accounts, furthest from the time passed": f"{deviation(full):.2%}",
        "the trainer waits for": ", ".join(
            f"{what.removeprefix('wait for ')} {share:.1%}" for what, share in waits.items()
        ),
        "weights, MB": f"{weights('bytes') / 2**20:.1f}",
        "their way, ms": ", ".join(f"{stage} {weights(name) * 1e3:.1f}" for stage, name in stages.items()),
    }


def deviation(rows: list[dict[str, Any]]) -> float:
    """Return the largest deviation of an actor's account from the elapsed time, as a share of the elapsed time."""
    passed = rows[-1]["time"] - rows[0]["time"]
    sums: dict[str, float] = {}
    for row in rows[1:]:
        for key, value in row.items():
            if key.startswith("time/") and not key.startswith("time/episodes/"):  # episodes overlap in time
                actor = key.split("/")[1]
                sums[actor] = sums.get(actor, 0.0) + value
    return max(abs(value - passed) / passed for value in sums.values())


def measure(args: argparse.Namespace) -> list[str]:
    folders = [run(count, args.steps, args.seed) for count in (1, len(PLACE))]
    (one, of_one), (three, of_three) = map(figures, folders)
    engines = sorted({summary(folder)["engine"] for folder in folders})
    about = (
        f"The median step over three hosts is {statistics.median(three) / statistics.median(one):.2f}x of that on one "
        f"(aim: at most {MOST_LONGER}x). {args.steps} steps each; sandbox engine: {', '.join(engines)}. Standard error "
        "of a held-out score: 0.03, of families 0.06."
    )
    rows = [[name, of_one[name], of_three[name]] for name in of_one]
    return [*table(["", "one host", "three hosts"], rows), "", about]


if __name__ == "__main__":
    main("Several hosts", measure, steps=20, seed=0)
