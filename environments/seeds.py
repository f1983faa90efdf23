"""Seeds for generated task worlds, disjoint between `eval` and the other splits."""

from __future__ import annotations

from random import Random


def draw_seed(rng: Random, split: str) -> str:
    """Draw a world seed. Multiples of 5 are for `eval`, all others for other splits, for every environment seed."""
    number = 5 * rng.randrange(200_000)
    return str(number if split == "eval" else number + rng.randint(1, 4))
