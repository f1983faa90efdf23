"""Groups that were trained on and may be trained on again."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable
from typing import Generic

from forge_env.config.recipe import ReplaySection
from trainers.buffer.pool import Pool
from trainers.buffer.rules import EvictionRule, SamplingRule
from trainers.buffer.types import G, Held
from trainers.buffer.window import Window


class UsedGroups(Generic[G]):
    """Used groups with a use left and young enough for it, in the order of the sampling rule, within a capacity.

    Args:
        settings: how often a group may be used, and how many are kept.
        window: knows what is young enough.
        sampling: their order.
        eviction: who leaves beyond the capacity.
    """

    def __init__(self, settings: ReplaySection, window: Window, sampling: SamplingRule, eviction: EvictionRule) -> None:
        self._settings = settings
        self._window = window
        self._sampling = sampling
        self._eviction = eviction
        self.pool: Pool[G] = Pool()

    def usable(self, held: Held[G]) -> bool:
        """Whether the next step could use it again."""
        return held.uses < self._settings.max_uses and self._window.steps_left(held.version) > 0

    def expected(self, handed_out: Iterable[Held[G]]) -> int:
        """How many there are for the next step, once those in training have been released."""
        count = len(self.pool) + sum(map(self.usable, handed_out))
        return count if self._settings.capacity is None else min(count, self._settings.capacity)

    def keep(self, held: Held[G], rng: random.Random) -> None:
        """Keep a group, where it is usable."""
        if self.usable(held):
            self.pool.put(self._sampling(held, rng), held)

    def trim(self) -> int:
        """Drop what is beyond the capacity; returns how many."""
        capacity = self._settings.capacity
        excess = 0 if capacity is None else max(0, len(self.pool) - capacity)
        if excess:
            worst = heapq.nsmallest(excess, self.pool, key=lambda held: (self._eviction(held), held.index))
            self.pool.drop({held.index for held in worst})
        return excess

    def drop_old(self) -> None:
        """Drop what is too old for the next step."""
        if self.pool:
            self.pool.drop_before(self._window.next_step - self._window.max_off_policy_steps)
