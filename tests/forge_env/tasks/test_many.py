"""Orders of very many tasks: no list of them, and no loop over all of them."""

from __future__ import annotations

import tracemalloc
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

import forge_env as fe
from forge_env.tasks import order as orders
from forge_env.tasks.curriculum import PROBED, Curriculum
from forge_env.tasks.order import TaskOrder, _permuted


@given(st.integers(1, 300), st.text(max_size=5))
def test_a_permutation_that_is_not_stored_is_one(count: int, seed: str) -> None:
    assert sorted(_permuted(offset, count, seed) for offset in range(count)) == list(range(count))


def test_it_depends_on_the_seed_and_shuffles() -> None:
    count = 1000
    one, other = ([_permuted(offset, count, seed) for offset in range(count)] for seed in "ab")
    assert one != other
    assert sum(place == offset for offset, place in enumerate(one)) < 10
    halves = Counter(place < count // 2 for place in one[: count // 2])
    assert abs(halves[True] - halves[False]) < 100


def test_a_hundred_million_tasks_are_shuffled_without_a_list_of_them() -> None:
    tracemalloc.start()
    order = TaskOrder(100_000_000, seed=3)
    first = [order[position] for position in range(100)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000
    assert len(set(first)) == 100
    assert first == [TaskOrder(100_000_000, seed=3)[position] for position in range(100)]
    assert first[0] != order[100_000_000], "every epoch is a permutation of its own"


def test_few_tasks_are_shuffled_as_before() -> None:
    """A run that is resumed goes on with the order that it began with."""
    assert orders.MOST_SHUFFLED >= 1_000_000
    assert [TaskOrder(5, seed=0)[position] for position in range(5)] == [0, 1, 4, 3, 2]


def test_a_curriculum_over_a_hundred_million_tasks_looks_at_a_few() -> None:
    made: list[int] = []

    def task(index: int) -> fe.Task:
        made.append(index)
        return fe.Task(id=str(index), prompt="", difficulty=1 + index % 3)

    order = Curriculum(task, 100_000_000, seed=1)
    drawn = [order[position] for position in range(200)]
    assert len(set(drawn)) == 200
    assert len(made) < 4 * PROBED


def test_a_curriculum_comes_to_the_first_tasks_again() -> None:
    from forge_env.tasks.curriculum import _Endless

    deck = _Endless(lambda index: fe.Task(id=str(index), prompt="", difficulty=1), num_tasks=300)
    assert [deck.take(1) for _ in range(600)] == [*range(300), *range(300)]
