"""Measure the cost of token receipts of a step: made by the generator for each reply, checked by the trainer.

    python -m benchmarks.receipts [--repeats 9] [--record]

The tokens are synthetic, with the shapes of a step of the default recipe, and of long episodes with many turns.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple

import numpy as np

from benchmarks.report import record, spread, table
from forge_env.trajectory import Segment
from trainers.generator.receipt import audit, receipt

ABOUT = "CPU, median (smallest to largest) of the repeats; the tokens are made up."


class Step(NamedTuple):
    """A step's token sequences."""

    name: str
    sequences: int
    replies: int
    """Replies per sequence."""
    told: int
    """Tokens before each reply."""
    sampled: int
    """Tokens of a reply."""


STEPS = (Step("default recipe", 192, 2, 120, 13), Step("long episodes", 64, 40, 500, 300))


def made_up(step: Step) -> tuple[list[tuple[Any, Any, Any]], list[Segment]]:
    """Generate the prompt, tokens and log-probabilities of each reply, and the sequences that contain them."""
    dice = np.random.default_rng(0)
    length = step.replies * (step.told + step.sampled)
    mask = np.tile(np.repeat([False, True], [step.told, step.sampled]), step.replies)
    replies, segments = [], []
    for _ in range(step.sequences):
        tokens = dice.integers(0, 1000, length).astype(np.int32)
        logprobs = np.where(mask, -dice.random(length), 0).astype(np.float32)
        ends = range(step.told + step.sampled, length + 1, step.told + step.sampled)
        parts = [
            (tokens[: end - step.sampled], *(each[end - step.sampled : end] for each in (tokens, logprobs)))
            for end in ends
        ]
        signed = sum(receipt(*reply) for reply in parts) % 2**64
        replies += parts
        segments.append(Segment(tokens, mask, logprobs, np.where(mask, 0, -1), receipt=signed))
    return replies, segments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--record", action="store_true", help="write the table to docs/benchmarks.md")
    args = parser.parse_args()
    rows = []
    for step in STEPS:
        replies, segments = made_up(step)
        took: dict[str, list[float]] = {"made": [], "checked": []}
        for _ in range(args.repeats):
            began = time.process_time()
            for reply in replies:
                receipt(*reply)
            took["made"].append(1e3 * (time.process_time() - began))
            began = time.process_time()
            report = audit(segments)
            took["checked"].append(1e3 * (time.process_time() - began))
            assert (report.altered, report.unsigned) == (0, 0), report
        shape = f"{step.sequences} sequences, {len(replies):,} replies of {step.sampled} tokens"
        rows.append([step.name, shape, *map(spread, took.values())])
    lines = table(["a step", "of", "made by the generator, ms", "checked by the trainer, ms"], rows)
    print("\n".join(lines))
    if args.record:
        record("receipts", "Receipts of tokens", "make bench ARGS='receipts --record'", [*lines, "", ABOUT])


if __name__ == "__main__":
    main()
