"""Seeds for the worlds that tasks are about, divided among the splits."""

from __future__ import annotations

from random import Random


def draw_seed(rng: Random, split: str) -> str:
    """A seed that only `split` has: one number in five belongs to `eval`, whatever the environment's own seed is."""
    number = 5 * rng.randrange(200_000)
    return str(number if split == "eval" else number + rng.randint(1, 4))
