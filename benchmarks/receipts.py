"""Measure the cost of token receipts of a step: made by the generator for each reply, checked by the trainer.

python -m benchmarks receipts [--repeats 9] [--record]
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import numpy as np

from benchmarks.frame import in_turns, main, spread, table, timed
from forge_env.trajectory import Segment
from trainers.generator.receipt import audit, receipt


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
    turn = step.told + step.sampled
    mask = np.tile(np.repeat([False, True], [step.told, step.sampled]), step.replies)
    replies, segments = [], []
    for _ in range(step.sequences):
        tokens = dice.integers(0, 1000, len(mask)).astype(np.int32)
        logprobs = np.where(mask, -dice.random(len(mask)), 0).astype(np.float32)
        starts = range(step.told, len(mask), turn)
        parts = [(tokens[:at], tokens[at : at + step.sampled], logprobs[at : at + step.sampled]) for at in starts]
        replies += parts
        signed = sum(receipt(*reply) for reply in parts) % 2**64
        segments.append(Segment(tokens, mask, logprobs, np.where(mask, 0, -1), receipt=signed))
    return replies, segments


def measure(args: argparse.Namespace) -> list[str]:
    rows = []
    for step in STEPS:
        replies, segments = made_up(step)

        def make(replies: list[Any] = replies) -> None:
            for reply in replies:
                receipt(*reply)

        def check(segments: list[Segment] = segments) -> None:
            report = audit(segments)
            assert (report.altered, report.unsigned) == (0, 0), report

        taken = in_turns({"made": lambda: timed(make), "checked": lambda: timed(check)}, args.repeats)
        shape = f"{step.sequences} sequences, {len(replies):,} replies of {step.sampled} tokens"
        rows.append([step.name, shape, *(spread([1e3 * cpu for _, cpu in each]) for each in taken.values())])
    about = "CPU, median (smallest to largest) of the repeats; the tokens are made up."
    columns = ["a step", "of", "made by the generator, ms", "checked by the trainer, ms"]
    return [*table(columns, rows), "", about]


if __name__ == "__main__":
    main("Receipts of tokens", measure, repeats=9)
