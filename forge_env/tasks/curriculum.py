"""A curriculum: tasks of the difficulty that teaches most now.

    order = Curriculum(lambda index: env.task("train", index), env.num_tasks("train"), seed=0)
    task = env.task("train", order[position])
    order.record(position, success)              # share of attempts that succeeded, 0 to 1
    saved = order.state_dict(first=position)     # JSON; `load_state_dict` goes on exactly there

A level is a value of `Task.difficulty`. Every position draws a level with a probability in proportion to

    explore + 4 p (1 - p)        p: recent success rate of that level, 1/2 where nothing is known

because a group of attempts that all succeed or all fail has no advantage to learn from, and the variance of one
attempt is p (1 - p) (the learnability score of Rutherford et al., "No Regrets", 2024). `explore` keeps every level
in sight: a level that was too hard is tried again, one that was mastered is noticed when it is forgotten.
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
"""Tasks of an endless generator that are looked at first, to know its levels."""
MOST_SCANNED = 2_000
"""Tasks looked at for one of a rare level, before another level is taken."""
MOST_SORTED = 100_000
"""Tasks up to which all are sorted by level at the start; more are looked at one after the other, as if endless."""
MOST_WAITING = 1_000
"""Tasks of one level that wait to be drawn; further ones are passed over."""


class Curriculum(Order):
    """Position -> index of a task; which one depends on how the tasks before went.

    Args:
        task: the task of an index.
        num_tasks: how many there are; None for an endless generator.
        seed: of the draws, and of the permutation of each level.
        explore: added to every level's share; 0 leaves out what never or always succeeds.
        half_life: groups of a level after which an old result counts half.
        weights: level -> factor on its share; levels that aren't named are left out. Empty: 1 for all.
        adaptive: False: the shares are the weights alone, however the tasks go.
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
                f"no task has a difficulty of {sorted(self._weights)}", fix=f"there are {sorted(self._deck.levels)}"
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
            del shares[level]  # too rare to be found now
        raise UsageError("the environment has no more tasks of the levels it began with")

    def rate(self, level: int) -> float:
        """Recent success rate, drawn towards 1/2 by one imagined success and one failure."""
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
        """How the attempts at a position went: the share of successes, or the mean reward, within [0, 1]."""
        if position not in self._assigned:
            return  # of a run before this one
        level = self._assigned[position][1]
        successes, groups = self._results.get(level, (0.0, 0.0))
        success = min(max(success, 0.0), 1.0)
        self._results[level] = (successes * self._decay + success, groups * self._decay + 1.0)

    def state_dict(self, first: int = 0) -> dict[str, Any]:
        """All that is needed to go on, as JSON; positions before `first` are done with and forgotten."""
        self._assigned = {position: drawn for position, drawn in self._assigned.items() if position >= first}
        return {
            "results": {str(level): list(result) for level, result in self._results.items()},
            "assigned": {str(position): list(drawn) for position, drawn in self._assigned.items()},
            "deck": self._deck.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken: positions that were under way get the same tasks again.

        The empty state of an order that learns nothing starts anew.
        """
        if not state:
            return
        self._results = {int(level): (float(a), float(b)) for level, (a, b) in state["results"].items()}
        self._assigned = {int(position): (int(a), int(b)) for position, (a, b) in state["assigned"].items()}
        self._deck.load_state_dict(state["deck"])


def make_order(config: TasksSection, env: Environment, split: str, *, seed: int) -> Order:
    """The order that a recipe asks for; one of your own is called with environment, split, seed and its options.

    Raises:
        NotRegisteredError: there is none of that name.
        PluginError: it can't be imported, or is not an `Order`.
        UsageError: it doesn't take these options.
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
    """Every level's tasks in a permutation of their own, each used once before any is used again."""

    def __init__(self, task: Callable[[int], Task], num_tasks: int, seed: int) -> None:
        self.levels: dict[int, array[int]] = {}
        for index in range(num_tasks):
            self.levels.setdefault(task(index).difficulty, array("q")).append(index)
        self._orders = {level: TaskOrder(len(own), seed=seed) for level, own in self.levels.items()}
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
    """Tasks in their order, sorted by level as far as they were looked at.

    Args:
        task: the task of an index.
        num_tasks: after so many they come again; None: there is no end.
    """

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
        if "scanned" not in state:  # of a version that sorted all tasks at the start
            return
        self._scanned = int(state["scanned"])
        self.levels = {int(level): deque(map(int, waiting)) for level, waiting in state["waiting"].items()}
