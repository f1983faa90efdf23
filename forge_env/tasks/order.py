"""Orders of tasks: pure functions of a seed and a position, so that resuming needs one integer.

order = TaskOrder(env.num_tasks("train"), seed=0)
task = env.task("train", order[position])

`forge_env.tasks.curriculum` has an order that adapts to the agent's success, and saves its state.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from forge_env.errors import UsageError

MOST_SHUFFLED = 1 << 20
"""Maximum tasks for which a permutation is stored; for more, each element is computed on access."""
ROUNDS = 4
"""Number of rounds of the Feistel network."""


class Order(ABC):
    """Maps positions to tasks, and may learn from the results (`forge_env.tasks.curriculum`)."""

    @abstractmethod
    def __getitem__(self, position: int) -> int:
        """Index of the task at a position; it must not change until the position is finished."""

    def record(self, position: int, success: float) -> None:
        """Record the success rate of a position, 0 to 1; ignored by default."""
        return

    def state_dict(self, first: int = 0) -> dict[str, Any]:
        """State, besides the position, that is needed to resume from `first`, as JSON; empty by default."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state; by default there is nothing to load."""
        return


class TaskOrder(Order):
    """Maps a position to the index of a task.

    Every epoch is a different permutation.

    Args:
        num_tasks: number of tasks; None for an endless generator, whose order is not changed.
        shuffle: whether to shuffle; if False, the tasks remain in their order.
    """

    def __init__(self, num_tasks: int | None, *, seed: int = 0, shuffle: bool = True) -> None:
        if num_tasks == 0:
            raise UsageError("there are no tasks to choose from")
        self.num_tasks = num_tasks
        self.seed = seed
        self.shuffle = shuffle

    def __getitem__(self, position: int) -> int:
        if self.num_tasks is None:
            return position
        epoch, offset = divmod(position, self.num_tasks)
        if not self.shuffle:
            return offset
        seed = f"{self.seed}/{epoch}"
        if self.num_tasks > MOST_SHUFFLED:
            return _permuted(offset, self.num_tasks, seed)
        return _permutation(self.num_tasks, seed)[offset]


@lru_cache(maxsize=4)
def _permutation(count: int, seed: str) -> array[int]:
    order = array("q", range(count))
    random.Random(seed).shuffle(order)
    return order


def _permuted(offset: int, count: int, seed: str) -> int:
    """Element at `offset` of a permutation of `range(count)` that is not stored.

    A Feistel network over the smallest even number of bits that hold `count`, applied again while the result is not
    below `count` (M. Luby and C. Rackoff, 1988; cycle walking: J. Black and P. Rogaway, "Ciphers with arbitrary finite
    domains", 2002).
    """
    half = (max(count - 1, 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = offset >> half, offset & mask
        for number in range(ROUNDS):
            digest = hashlib.blake2b(f"{seed}/{number}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        offset = left << half | right
        if offset < count:
            return offset


class MixtureOrder:
    """Maps a position to (component, position within it), with exact proportions in every block of positions."""

    def __init__(self, weights: Mapping[str, float], *, seed: int = 0) -> None:
        if not weights or min(weights.values()) <= 0:
            raise UsageError("a mixture needs components with positive weights")
        self.seed = seed
        self._shares = _shares(weights, max(100, len(weights)))
        self._block = sum(self._shares.values())

    def __getitem__(self, position: int) -> tuple[str, int]:
        block, offset = divmod(position, self._block)
        slots = [name for name, share in self._shares.items() for _ in range(share)]
        random.Random(f"{self.seed}/{block}").shuffle(slots)
        name = slots[offset]
        return name, block * self._shares[name] + slots[:offset].count(name)


def _shares(weights: Mapping[str, float], block: int) -> dict[str, int]:
    """Number of positions of each component in a block: largest remainders, at least one each."""
    total = sum(weights.values())
    exact = {name: block * weight / total for name, weight in weights.items()}
    shares = {name: max(1, int(value)) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: exact[name] - int(exact[name]), reverse=True)
    for name in by_remainder[: max(0, block - sum(shares.values()))]:
        shares[name] += 1
    return shares
