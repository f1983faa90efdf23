"""Measure the cost of token receipts of a step: made by the generator for each reply, checked by the trainer.

Measured on a CPU, with made-up tokens.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import numpy as np

from benchmarks.frame import in_turns, main, spread, table, timed
from forge_env.trajectory import Segment
from trainers.generator.receipt import audit, receipt

STEPS = {"default recipe": (192, 2, 120, 13), "long episodes": (64, 40, 500, 300)}
"""Sequences of a step, replies per sequence, tokens before each reply, and tokens of a reply."""


def made_up(sequences: int, count: int, told: int, sampled: int) -> tuple[list[tuple[Any, Any, Any]], list[Segment]]:
    """Generate the prompt, tokens and log-probabilities of each reply, and the sequences that contain them."""
    dice = np.random.default_rng(0)
    mask = np.tile(np.repeat([False, True], [told, sampled]), count)
    replies, segments = [], []
    for _ in range(sequences):
        tokens = dice.integers(0, 1000, len(mask)).astype(np.int32)
        logprobs = np.where(mask, -dice.random(len(mask)), 0).astype(np.float32)
        starts = range(told, len(mask), told + sampled)
        parts = [(tokens[:at], tokens[at : at + sampled], logprobs[at : at + sampled]) for at in starts]
        replies += parts
        signed = sum(receipt(*reply) for reply in parts) % 2**64
        segments.append(Segment(tokens, mask, logprobs, np.where(mask, 0, -1), receipt=signed))
    return replies, segments


def check(segments: list[Segment]) -> None:
    report = audit(segments)
    assert (report.altered, report.unsigned) == (0, 0), report


def measure(args: argparse.Namespace) -> list[str]:
    rows = []
    for name, shape in STEPS.items():
        replies, segments = made_up(*shape)
        ways = {
            "made": partial(timed, lambda replies=replies: [receipt(*reply) for reply in replies]),
            "checked": partial(timed, partial(check, segments)),
        }
        taken = in_turns(ways, args.repeats)
        of = f"{shape[0]} sequences, {len(replies):,} replies of {shape[3]} tokens"
        rows.append([name, of, *(spread([1e3 * cpu for _, cpu in each]) for each in taken.values())])
    return table(["a step", "of", "made by the generator, ms", "checked by the trainer, ms"], rows)


if __name__ == "__main__":
    main("Receipts of tokens", measure, repeats=9)
