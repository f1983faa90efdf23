"""The curriculum follows success, uses every task once, and goes on exactly where it was saved."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import forge_env as fe
from forge_env.config.recipe import TasksSection
from forge_env.errors import NotRegisteredError, UsageError
from forge_env.tasks.curriculum import Curriculum, make_order
from forge_env.tasks.order import Order, TaskOrder

NUM_TASKS = st.sampled_from([None, 9, 40])


def task(index: int) -> fe.Task:
    return fe.Task(id=str(index), prompt="?", difficulty=1 + index % 3)


class Levels(fe.SingleTurnEnvironment):
    def task(self, split: str, index: int) -> fe.Task:
        return task(index)

    def reward(self, answer: str) -> float:
        return 0.0


def drawn(order: Curriculum, positions: range, success: dict[int, float]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for position in positions:
        level = task(order[position]).difficulty
        counts[level] += 1
        order.record(position, success[level])
    return counts


@pytest.mark.parametrize("num_tasks", [None, 90])
def test_levels_with_something_to_learn_come_most(num_tasks: int | None) -> None:
    order = Curriculum(task, num_tasks)
    counts = drawn(order, range(600), {1: 1.0, 2: 0.5, 3: 0.0})
    assert counts[2] > 2 * counts[1] > 0
    assert counts[2] > 2 * counts[3] > 0
    counts = drawn(order, range(600, 1200), {1: 1.0, 2: 1.0, 3: 0.6})  # the agent has got better
    assert counts[3] > 2 * counts[1] > 0
    assert counts[3] > 2 * counts[2] > 0


def test_weights_alone_are_kept_whatever_happens() -> None:
    order = make_order(TasksSection(weights={1: 1, 3: 3}), Levels(), "train", seed=1)
    assert isinstance(order, Curriculum)
    counts = drawn(order, range(2000), {1: 1.0, 3: 0.5})
    assert set(counts) == {1, 3}
    assert counts[3] / counts[1] == pytest.approx(3, rel=0.2)


@given(NUM_TASKS, st.integers(), st.lists(st.floats(-1, 2), min_size=1, max_size=60))
def test_no_task_repeats_before_its_level_is_used_up(num_tasks: int | None, seed: int, results: list[float]) -> None:
    order = Curriculum(task, num_tasks, seed=seed)
    used: dict[int, list[int]] = {}
    for position, success in enumerate(results):
        index = order[position]
        assert order[position] == index
        order.record(position, success)
        level = used.setdefault(task(index).difficulty, [])
        epoch = [] if num_tasks is None else level[: len(level) // (num_tasks // 3) * (num_tasks // 3)]
        assert index not in level[len(epoch) :]
        level.append(index)


@given(NUM_TASKS, st.integers(0, 40), st.integers(0, 10), st.lists(st.floats(0, 1), min_size=80, max_size=80))
def test_saved_curriculum_continues(num_tasks: int | None, trained: int, in_flight: int, results: list[float]) -> None:
    one = Curriculum(task, num_tasks, seed=5)
    for position in range(trained + in_flight):
        assert one[position] >= 0  # draws it
        if position < trained:
            one.record(position, results[position])
    state = json.loads(json.dumps(one.state_dict(first=trained)))
    two = Curriculum(task, num_tasks, seed=5)
    two.load_state_dict({})  # of an order that learns nothing
    two.load_state_dict(state)
    for position in range(trained, 80):
        assert one[position] == two[position]
        one.record(position, results[position])
        two.record(position, results[position])
    assert one.shares() == two.shares()


def test_a_rare_level_is_looked_for_and_given_up() -> None:
    def rare(index: int) -> fe.Task:
        return fe.Task(id=str(index), prompt="?", difficulty=9 if index == 3 else 1)

    order = Curriculum(rare, None, weights={9: 1000, 1: 1})
    assert [order[position] for position in range(2)] == [3, 0]
    order = Curriculum(rare, None, weights={9: 1})
    assert order[0] == 3
    with pytest.raises(UsageError, match="no more tasks"):
        order[1]
    with pytest.raises(UsageError, match=r"difficulty of \[7\].*available: \[1, 9\]"):
        Curriculum(rare, None, weights={7: 1})


def test_what_a_recipe_can_ask_for() -> None:
    assert isinstance(make_order(TasksSection(), Levels(), "train", seed=0), TaskOrder)
    assert make_order(TasksSection(order="sequential"), Levels(), "train", seed=0)[7] == 7
    shy = make_order(TasksSection(order="curriculum", explore=0.0, half_life=8.0), Levels(), "train", seed=0)
    assert isinstance(shy, Curriculum)
    drawn(shy, range(200), {1: 0.0, 2: 0.5, 3: 0.5})
    assert shy.shares()[1] < 0.2
    for wrong in (
        {"weights": {1: 0}},
        {"order": "sequential", "weights": {1: 1}},
        {"weights": {1: -1}},
        {"options": {"stride": 2}},
    ):
        with pytest.raises(ValidationError):
            TasksSection.model_validate(wrong)


class Backwards(Order):
    def __init__(self, environment: Levels, split: str, *, seed: int, first: int = 0) -> None:
        self._last, self._first = 99, first

    def __getitem__(self, position: int) -> int:
        return self._last - self._first - position


class Broken(Backwards):
    def __init__(self, environment: Levels, split: str, *, seed: int, weights: dict[str, float]) -> None:
        self.weight = weights[split]


def test_an_order_of_ones_own() -> None:
    own = TasksSection(order=f"{__name__}:Backwards", options={"first": 1})
    assert make_order(own, Levels(), "train", seed=0)[0] == 98
    for order, options, error, said in (
        ("shufled", {}, NotRegisteredError, "there is no task order 'shufled'.*did you mean 'shuffled'"),
        (f"{__name__}:Backwards", {"last": 1}, UsageError, "tasks.options.last: unknown key"),
        (f"{__name__}:Levels", {}, UsageError, "is rejected"),
        (f"{__name__}:Broken", {"weights": {}}, UsageError, rf"is rejected: KeyError: 'train' \[{__file__}:\d+\]"),
        ("builtins:print", {"sep": " "}, UsageError, "is rejected"),
    ):
        with pytest.raises(error, match=said):
            make_order(TasksSection(order=order, options=options), Levels(), "train", seed=0)
