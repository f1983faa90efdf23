"""Measure the speed of a warm-up, everything included: demonstrations are made, sent, learned and logged.

python -m benchmarks warmup --record

Runs a shortened `forge-env train coding_rlvr/base`, which makes the initial model of coding_rlvr, and reads the time of
each step from its metrics. Tokens are those of the demonstrations; there is no padding. The recipe's optimizer is Muon,
which takes the same time for every step, however few its tokens; with AdamW a step is little more than the gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import record, spread, table

FIRST = 20
"""Number of first steps to skip: they allocate memory and start with empty caches."""


def run(steps: int, optimizer: str, threads: int, folder: Path) -> list[dict[str, Any]]:
    """Return the metrics rows of a warm-up, without the first steps."""
    name = f"{optimizer}-{threads}"
    command = [sys.executable, "-m", "forge_env", "train", "coding_rlvr/base", "--name", name]
    keys = [f"warmup.steps={steps}", f"warmup.threads={threads}", f"output_dir={folder}", "logging.tensorboard=false"]
    keys += ["warmup.optimizer.muon_lr=0"] if optimizer == "AdamW" else []
    subprocess.run([*command, *keys], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return rows[FIRST:]


def rates(rows: list[dict[str, Any]], pieces: int = 5) -> tuple[list[float], list[float]]:
    """Return tokens per second for each of several pieces of a run: by the clock, and by the trainer's busy time."""
    size = (len(rows) - 1) // pieces
    clock, trainer = [], []
    for first in range(0, pieces * size, size):
        before, piece = rows[first], rows[first + 1 : first + size + 1]
        tokens = sum(row["warmup/tokens"] for row in piece)
        clock.append(tokens / (piece[-1]["time"] - before["time"]))
        trainer.append(tokens / sum(row["warmup/train_s"] for row in piece))
    return clock, trainer


def main() -> None:
    """Measure, print and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--record", action="store_true", help="write the section of docs/benchmarks.md")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for optimizer, threads in (("Muon", 1), ("Muon", 2), ("AdamW", 2)):
            clock, trainer = rates(run(args.steps, optimizer, threads, Path(folder)))
            ratio = statistics.median(clock) / statistics.median(trainer)
            rows.append([optimizer, threads, spread(clock), spread(trainer), f"{ratio:.1%}"])
    lines = [
        *table(["optimizer", "threads", "tokens/s, by the clock", "of the trainer's own time", "ratio"], rows),
        "",
        f"Median (smallest to largest) of five pieces of {args.steps} steps of 16 demonstrations, without the first "
        f"{FIRST}. Where the columns agree, the trainer never waits for demonstrations. The recipe has Muon and "
        "two threads. "
        f"Load at the end {' '.join(f'{each:.1f}' for each in os.getloadavg())}.",
    ]
    print("\n".join(lines))
    if args.record:
        record("warmup", "Warm-up", "make bench ARGS='warmup --record'", lines)


if __name__ == "__main__":
    main()
