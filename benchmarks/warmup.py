"""Measure the speed of a warm-up, everything included: demonstrations are made, sent, learned and logged.

python -m benchmarks warmup [--steps 120] [--record]

Runs a shortened `forge-env train coding_rlvr/base`, which makes the initial model of coding_rlvr, and reads the time of
each step from its metrics. Tokens are those of the demonstrations; there is no padding. The recipe's optimizer is Muon,
which takes the same time for every step, however few its tokens; with AdamW a step is little more than the gradients.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks.frame import main, metrics, spread, table, train

FIRST, PIECES = 20, 5
"""Number of first steps to skip, which allocate memory and start with empty caches; pieces of the others."""


def rates(steps: int, optimizer: str, threads: int, root: Path) -> tuple[list[float], list[float]]:
    """Return tokens per second for each piece of a run: by the clock, and by the trainer's busy time."""
    keys = [f"warmup.steps={steps}", f"warmup.threads={threads}", "logging.tensorboard=false"]
    keys += ["warmup.optimizer.muon_lr=0"] if optimizer == "AdamW" else []
    rows = metrics(train(f"{optimizer}-{threads}", *keys, recipe="coding_rlvr/base", root=root))[FIRST:]
    size = (len(rows) - 1) // PIECES
    clock, trainer = [], []
    for first in range(0, PIECES * size, size):
        before, piece = rows[first], rows[first + 1 : first + size + 1]
        tokens = sum(row["warmup/tokens"] for row in piece)
        clock.append(tokens / (piece[-1]["time"] - before["time"]))
        trainer.append(tokens / sum(row["warmup/train_s"] for row in piece))
    return clock, trainer


def measure(args: argparse.Namespace) -> list[str]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for optimizer, threads in (("Muon", 1), ("Muon", 2), ("AdamW", 2)):
            clock, trainer = rates(args.steps, optimizer, threads, Path(folder))
            share = statistics.median(clock) / statistics.median(trainer)
            rows.append([optimizer, threads, spread(clock), spread(trainer), f"{share:.1%}"])
    about = (
        f"Median (smallest to largest) of five pieces of {args.steps} steps of 16 demonstrations, without the first "
        f"{FIRST}. Where the columns agree, the trainer never waits for demonstrations. The recipe has Muon and two "
        "threads."
    )
    columns = ["optimizer", "threads", "tokens/s, by the clock", "of the trainer's own time", "ratio"]
    return [*table(columns, rows), "", about]


if __name__ == "__main__":
    main("Warm-up", measure, steps=120)
