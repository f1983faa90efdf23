"""Measure the cost of checkpoints to a run, and the time to resume.

A shortened run of `coding_rlvr` saves a checkpoint after every step and is then resumed. By default, checkpoints are
saved every five minutes and at evaluations. Times are also given as shares of one minute.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.frame import FORGE_ENV, compiled, main, spread, table, trained

SHORT = [
    *("grpo.groups_per_step=6", "grpo.group_size=4", "evaluation.num_tasks=16"),
    *("evaluation.extra_num_tasks=4", "checkpoint.every=1", "sandbox.engine=local"),
]


def start(root: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [*FORGE_ENV, "train", "coding_rlvr", "--name", "run", *SHORT, *arguments]
    return subprocess.Popen(command, cwd=root, env=compiled(root / "compiled"), stdout=subprocess.DEVNULL)


def saving(root: Path, steps: int) -> list[list[object]]:
    """Train and return table rows with the cost of saving."""
    if start(root, f"grpo.steps={steps}").wait():
        raise SystemExit("the run failed")
    run = root / "runs" / "run"
    stalled = [row.get("time/trainer/save", 0.0) for row in trained(run)[1:]]  # each since the previous row
    matches = re.findall(
        r"step \d+ saved: ([\d.]+) MiB in ([\d.]+) s .*?'snapshot_s': ([\d.e-]+)", (run / "run.log").read_text()
    )
    sizes, writes, copies = ([float(value) for value in column] for column in zip(*matches, strict=True))
    return [
        ["size, MiB", spread(sizes)],
        ["state copied, s", spread(copies)],
        ["trainer blocked, s", spread(stalled)],
        ["... of a minute", f"{statistics.median(stalled) / 60:.2%}"],
        ["from the start to the rename, s", spread(writes)],
        ["... of a minute", f"{statistics.median(writes) / 60:.2%}"],
    ]


def resuming(root: Path, steps: int) -> float:
    """Return the seconds from `--resume` to the first trained step."""
    run = root / "runs" / "run"
    before, started, seconds = len(trained(run)), time.perf_counter(), None
    process = start(root, "--resume", f"grpo.steps={steps + 1}")
    while process.poll() is None:
        if seconds is None and len(trained(run)) > before:
            seconds = time.perf_counter() - started
        time.sleep(0.1)
    if process.returncode or seconds is None:
        raise SystemExit("the resumed run failed")
    return seconds


def measure(args: argparse.Namespace) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="fe-", dir="/tmp") as folder:
        root = Path(folder)
        rows = saving(root, args.steps)
        rows.append(["from `--resume` to the first step trained, s", f"{resuming(root, args.steps):.1f}"])
    return table(["", ""], rows)


if __name__ == "__main__":
    main("Checkpoints", measure, steps=12)
