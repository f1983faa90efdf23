"""A curriculum, which selects tasks of the difficulty that currently teaches most.

    order = Curriculum(lambda index: env.task("train", index), env.num_tasks("train"), seed=0)
    task = env.task("train", order[position])
    order.record(position, success)              # fraction of attempts that succeeded, 0 to 1
    saved = order.state_dict(first=position)     # JSON; `load_state_dict` resumes exactly there

A level is a value of `Task.difficulty`. Every position draws a level with a probability proportional to

    explore + 4 p (1 - p)        p: recent success rate of that level, 1/2 if unknown

because a group of attempts that all succeed or all fail has no advantage to learn from, and the variance of one
attempt is p (1 - p) (the learnability score of Rutherford et al., "No Regrets", 2024). `explore` gives every level a
minimum share: a level that was too hard is tried again, and forgetting of a mastered level is detected.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from forge_env.config.reader import construct
from forge_env.config.recipe import ORDERS, TasksSection
from forge_env.environment.base import Environment
from forge_env.errors import PluginError, UsageError
from forge_env.plugins import check_registered, load_plugin
from forge_env.tasks.order import Order, TaskOrder
from forge_env.types import Task

PROBED = 256
"""Number of tasks of an endless generator that are read first to learn its levels."""
MOST_SCANNED = 2_000
"""Maximum tasks read in search of a rare level before another level is drawn."""
MOST_SORTED = 100_000
"""Maximum tasks that are all sorted by level at the start; larger sets are read one by one, as if endless."""
MOST_WAITING = 1_000
"""Maximum tasks of one level that are queued; further ones are skipped."""


class Curriculum(Order):
    """Maps a position to the index of a task, depending on the results of earlier tasks.

    Args:
        num_tasks: number of tasks; None for an endless generator.
        seed: seed of the draws, and of the permutation of each level.
        explore: constant added to every level's share; 0 excludes levels that never or always succeed.
        half_life: number of groups of a level after which an old result counts half.
        weights: level -> factor of its share; other levels are left out. Empty: 1 for all.
        adaptive: whether results affect the shares; if False, the shares are the weights alone.
    """

    def __init__(
        self,
        task: Callable[[int], Task],
        num_tasks: int | None,
        *,
        seed: int = 0,
        explore: float = 0.1,
        half_life: float = 16.0,
        weights: Mapping[int, float] | None = None,
        adaptive: bool = True,
    ) -> None:
        self.seed = seed
        self.explore = explore
        self.adaptive = adaptive
        self._decay = 0.5 ** (1.0 / half_life)
        self._weights = dict(weights or {})
        self._results: dict[int, tuple[float, float]] = {}  # level -> (successes, groups), old ones decayed
        self._assigned: dict[int, tuple[int, int]] = {}  # position -> (index, level)
        self._deck: _Endless | _Finite
        if num_tasks is None or num_tasks > MOST_SORTED:
            self._deck = _Endless(task, num_tasks)
        else:
            self._deck = _Finite(task, num_tasks, seed)
        if not self.shares():
            raise UsageError(
                f"no task has a difficulty of {sorted(self._weights)}", fix=f"available: {sorted(self._deck.levels)}"
            )

    def __getitem__(self, position: int) -> int:
        if position not in self._assigned:
            self._assigned[position] = self._draw(position)
        return self._assigned[position][0]

    def _draw(self, position: int) -> tuple[int, int]:
        rng = random.Random(f"{self.seed}/{position}")
        shares = self.shares()
        while shares:
            [level] = rng.choices(list(shares), list(shares.values()))
            index = self._deck.take(level)
            if index is not None:
                return index, level
            del shares[level]  # too rare to be drawn now
        raise UsageError("the environment has no more tasks of its initial levels")

    def rate(self, level: int) -> float:
        """Recent success rate, smoothed towards 1/2 by one imaginary success and one imaginary failure."""
        successes, groups = self._results.get(level, (0.0, 0.0))
        return (successes + 1.0) / (groups + 2.0)

    def shares(self) -> dict[int, float]:
        """Probability of each level at the next position."""
        shares = {}
        for level in sorted(self._deck.levels):
            rate = self.rate(level)
            factor = self._weights.get(level, 0.0) if self._weights else 1.0
            shares[level] = factor * (self.explore + 4.0 * rate * (1.0 - rate) if self.adaptive else 1.0)
        total = sum(shares.values())
        return {level: share / total for level, share in shares.items() if share > 0}

    def record(self, position: int, success: float) -> None:
        """Record the fraction of successes at a position, or the mean reward, within [0, 1]."""
        if position not in self._assigned:
            return  # drawn by an earlier run
        level = self._assigned[position][1]
        successes, groups = self._results.get(level, (0.0, 0.0))
        success = min(max(success, 0.0), 1.0)
        self._results[level] = (successes * self._decay + success, groups * self._decay + 1.0)

    def state_dict(self, first: int = 0) -> dict[str, Any]:
        """State to resume from, as JSON; positions before `first` are finished and are forgotten."""
        self._assigned = {position: drawn for position, drawn in self._assigned.items() if position >= first}
        return {
            "results": {str(level): list(result) for level, result in self._results.items()},
            "assigned": {str(position): list(drawn) for position, drawn in self._assigned.items()},
            "deck": self._deck.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict`: unfinished positions get the same tasks again.

        The empty state, as saved by an order without state, starts from the beginning.
        """
        if not state:
            return
        self._results = {int(level): (float(a), float(b)) for level, (a, b) in state["results"].items()}
        self._assigned = {int(position): (int(a), int(b)) for position, (a, b) in state["assigned"].items()}
        self._deck.load_state_dict(state["deck"])


def make_order(config: TasksSection, env: Environment, split: str, *, seed: int) -> Order:
    """Create the order that a recipe configures; a plug-in is called with environment, split, seed and its options.

    Raises:
        PluginError: the plug-in can't be imported, or is not an `Order`.
        UsageError: the plug-in doesn't accept these options.
    """
    count = env.num_tasks(split)
    if config.order == "curriculum" or config.weights:
        return Curriculum(
            lambda index: env.task(split, index),
            count,
            seed=seed,
            explore=config.explore,
            half_life=config.half_life,
            weights=config.weights,
            adaptive=config.order == "curriculum",
        )
    if config.order in ORDERS:
        return TaskOrder(count, seed=seed, shuffle=config.order == "shuffled")
    check_registered("forge_env.task_orders", config.order, ORDERS)
    make = partial(load_plugin("forge_env.task_orders", config.order), env, split, seed=seed)
    order = construct(make, config.options, "tasks.options")
    if not isinstance(order, Order):
        raise PluginError(
            f"tasks.order: {config.order!r} is not an order of tasks", fix="derive it from forge_env.tasks.order.Order"
        )
    return order


class _Finite:
    """Tasks of each level in a separate permutation, each task used once before any is repeated."""

    def __init__(self, task: Callable[[int], Task], num_tasks: int, seed: int) -> None:
        self.levels: dict[int, array[int]] = {}
        for index in range(num_tasks):
            self.levels.setdefault(task(index).difficulty, array("q")).append(index)
        self._orders = {level: TaskOrder(len(indices), seed=seed) for level, indices in self.levels.items()}
        self._taken = dict.fromkeys(self.levels, 0)

    def take(self, level: int) -> int | None:
        position = self._taken[level]
        self._taken[level] += 1
        return self.levels[level][self._orders[level][position]]

    def state_dict(self) -> dict[str, Any]:
        return {"taken": {str(level): count for level, count in self._taken.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._taken |= {int(level): int(count) for level, count in state["taken"].items() if int(level) in self.levels}


class _Endless:
    """Tasks in their original order, sorted by level as far as they have been read."""

    def __init__(self, task: Callable[[int], Task], num_tasks: int | None = None) -> None:
        self._task = task
        self._num_tasks = num_tasks
        self._scanned = 0
        self.levels: dict[int, deque[int]] = {}
        while self._scanned < PROBED:
            self._scan()

    def _scan(self) -> None:
        index = self._scanned if self._num_tasks is None else self._scanned % self._num_tasks
        waiting = self.levels.setdefault(self._task(index).difficulty, deque())
        if len(waiting) < MOST_WAITING:
            waiting.append(index)
        self._scanned += 1

    def take(self, level: int) -> int | None:
        waiting = self.levels[level]
        for _ in range(MOST_SCANNED):
            if waiting:
                return waiting.popleft()
            self._scan()
        return waiting.popleft() if waiting else None

    def state_dict(self) -> dict[str, Any]:
        return {
            "scanned": self._scanned,
            "waiting": {str(level): list(waiting) for level, waiting in self.levels.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._scanned = int(state["scanned"])
        self.levels = {int(level): deque(map(int, waiting)) for level, waiting in state["waiting"].items()}
