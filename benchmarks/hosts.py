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
import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import has_succeeded, record, spread, table
from forge_env.display.curves import merge_rows, time_account
from forge_env.run.metrics import read_metrics
from tests.trainers.actors.workers import workers

PLACE = {"rollouts": [0], "generator": [1], "trainer": [2]}
"""Host index of each role; the buffer is placed with the trainer."""
RUN = ["evaluation.every=0", "logging.tensorboard=false", "checkpoint.every=0"]
MOST_LONGER = 1.15
"""Limit of the median step on three hosts, relative to one host."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Results of a training run.

    Attributes:
        steps: seconds per step while the pipeline is full; each value is a mean over `max_off_policy_steps + 1`
            consecutive steps, whose batches are sampled together and finish one right after the other.
        summary: the run's summary.
        account: share of its time by actor and activity.
        off: largest deviation of an actor's account from the elapsed time, as a share of the elapsed time.
        weights: medians of the metrics `weights/...`.
    """

    steps: list[float]
    summary: dict[str, Any]
    account: dict[str, dict[str, float]]
    off: float
    weights: dict[str, float]


def train(hosts: int, steps: int, seed: int) -> Path:
    """Train the default recipe on this machine, or over three of its hosts, and return the run's folder."""
    folder = Path("runs") / f"hosts-{hosts}-{steps}-{seed}"
    if has_succeeded(folder):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    keys = [f"grpo.steps={steps}", f"seed={seed}", *RUN]
    command = [sys.executable, "-m", "forge_env", "train", "coding_rlvr.yaml", "--name", folder.name, *keys]
    with ExitStack() as stack:
        if hosts > 1:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fe-")))
            command += job([each.address for each in stack.enter_context(workers(hosts, scratch))])
        subprocess.run(command, check=True)
    return folder


def job(addresses: list[str]) -> list[str]:
    """Return the config overrides of a run on these workers."""
    return ["job.kind=hosts", f"job.workers={json.dumps(addresses)}", f"job.place={json.dumps(PLACE)}"]


def look(folder: Path) -> Trained:
    """Read the results of a run."""
    rows = [row for row in merge_rows(read_metrics(folder / "metrics.jsonl")) if "reward/mean" in row]
    summary = json.loads((folder / "summary.json").read_text())
    bound = summary["max_off_policy_steps"]
    full, together = rows[bound + 2 : -(bound + 1)], bound + 1
    keys = ("snapshot_s", "push_s", "pull_s", "stall_s", "bytes")
    return Trained(
        steps=[(later["time"] - row["time"]) / together for row, later in zip(full, full[together:], strict=False)],
        summary=summary,
        account=time_account(full[1:]),
        off=_off(full),
        weights={
            key: statistics.median(row[f"weights/{key}"] for row in full if f"weights/{key}" in row) for key in keys
        },
    )


def _off(rows: list[dict[str, Any]]) -> float:
    """Return the largest deviation of an actor's account from the elapsed time, as a share of the elapsed time."""
    passed = rows[-1]["time"] - rows[0]["time"]
    sums: dict[str, float] = {}
    for row in rows[1:]:
        for key, value in row.items():
            if key.startswith("time/") and not key.startswith("time/episodes/"):  # episodes overlap in time
                actor = key.split("/")[1]
                sums[actor] = sums.get(actor, 0.0) + value
    return max(abs(value - passed) / passed for value in sums.values())


def compare(one: Trained, three: Trained) -> list[str]:
    """Return the table and its legend."""
    ratio = statistics.median(three.steps) / statistics.median(one.steps)

    def score(run: Trained, which: str) -> str:
        start, end = (run.summary[f"heldout{which}_{when}"] for when in ("start", "end"))
        return f"{start:.3f} -> {end:.3f} (+{end - start:.3f})"

    def waits(run: Trained) -> str:
        parts = run.account["trainer"]
        named = {what: share for what, share in parts.items() if what.startswith("wait")}
        return ", ".join(f"{what.removeprefix('wait for ')} {share:.1%}" for what, share in named.items())

    def ms(run: Trained) -> str:
        names = {"snapshot_s": "snapshot", "push_s": "push", "pull_s": "pull", "stall_s": "pause"}
        return ", ".join(f"{names[key]} {run.weights[key] * 1e3:.1f}" for key in names)

    def oldest(run: Trained) -> str:
        return f"{run.summary['max_staleness']} ({run.summary['max_off_policy_steps']})"

    figures: list[tuple[str, Any]] = [
        ("s a step", lambda run: spread(run.steps)),
        ("held-out score", lambda run: score(run, "")),
        ("of held-out families", lambda run: score(run, "_unseen")),
        ("oldest trained token (bound), steps", oldest),
        ("tokens dropped as stale", lambda run: str(run.summary["tokens_discarded_stale"])),
        ("episodes lost", lambda run: str(run.summary["episodes_invalid"])),
        ("accounts, furthest from the time passed", lambda run: f"{run.off:.2%}"),
        ("the trainer waits for", waits),
        ("weights, MB", lambda run: f"{run.weights['bytes'] / 2**20:.1f}"),
        ("their way, ms", ms),
    ]
    lines = table(["", "one host", "three hosts"], [[name, of(one), of(three)] for name, of in figures])
    engines = {run.summary["engine"] for run in (one, three)}
    return [
        *lines,
        "",
        f"The median step over three hosts is {ratio:.2f}x of that on one (aim: at most {MOST_LONGER}x). "
        f"{one.summary['steps']} steps each; sandbox engine: {', '.join(sorted(engines))}. "
        "Standard error of a held-out score: 0.03, of families 0.06.",
    ]


def main() -> None:
    """Train, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true", help="write docs/benchmarks.md")
    args = parser.parse_args()
    lines = compare(*(look(train(count, args.steps, args.seed)) for count in (1, len(PLACE))))
    print("\n".join(lines))
    if args.record:
        record("hosts", "Several hosts", "make bench ARGS='hosts --record'", lines)


if __name__ == "__main__":
    main()
