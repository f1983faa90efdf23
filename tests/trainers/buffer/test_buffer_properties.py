"""The replay buffer's promises, as properties over interleavings of everything that can happen to it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from forge_env.config.recipe import ReplaySection
from tests.trainers.buffer.buffer_model import FakeGroup, World
from trainers.buffer.pool import Pool
from trainers.buffer.types import BufferSettings, Held
from trainers.buffer.window import Window

CHOICE = st.integers(0, 10_000)


@st.composite
def buffer_settings(draw: Callable[[st.SearchStrategy[Any]], Any]) -> BufferSettings:
    bound = draw(st.integers(0, 4))
    uses = draw(st.integers(1, bound + 1))
    capacity = draw(st.none() | st.integers(1, 6)) if uses > 1 else None
    replay = ReplaySection(
        sampling=draw(st.sampled_from(["fifo", "freshest", "prioritized", "random"])),
        max_uses=uses,
        capacity=capacity,
        eviction="oldest" if capacity is None else draw(st.sampled_from(["oldest", "least_advantage", "most_used"])),
    )
    return BufferSettings(
        per_step=draw(st.integers(1, 5)),
        max_off_policy_steps=bound,
        steps=draw(st.none() | st.integers(1, 12)),
        replay=replay,
    )


class Machine(RuleBasedStateMachine):
    """Rollouts that end in any order or never, a trainer at any lag, stops, restarts, saves."""

    @initialize(own=buffer_settings(), rough=st.booleans())
    def start(self, own: BufferSettings, rough: bool) -> None:
        self.world = World(own, rough=rough)

    @rule(count=st.integers(1, 6))
    def admit(self, count: int) -> None:
        for _ in range(count):
            self.world.admit()

    @rule(choice=CHOICE, younger=st.integers(0, 3), priority=st.floats(0, 2))
    def complete(self, choice: int, younger: int, priority: float) -> None:
        self.world.complete(choice, younger=younger, priority=priority)

    @rule(choices=st.lists(CHOICE, max_size=8))
    def complete_some(self, choices: list[int]) -> None:
        for choice in choices:
            self.world.complete(choice)

    @rule(choice=CHOICE)
    def discard(self, choice: int) -> None:
        self.world.discard(choice)

    @rule(skip=st.integers(0, 2))
    def take(self, skip: int) -> None:
        self.world.take(skip)

    @rule()
    def release(self) -> None:
        self.world.release()

    @rule()
    def save(self) -> None:
        self.world.save()

    @rule(choice=CHOICE)
    def restart(self, choice: int) -> None:
        self.world.restart(choice)

    @rule(choice=CHOICE)
    def add_unasked(self, choice: int) -> None:
        self.world.add_unasked(choice)

    @rule()
    def clear(self) -> None:
        self.world.clear()

    @rule(choice=CHOICE)
    def undo(self, choice: int) -> None:
        self.world.undo(choice)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


TestMachine = pytest.mark.slow(Machine.TestCase)
TestMachine.settings = settings(max_examples=200, stateful_step_count=100, deadline=None)


# --- selection against its definition


@given(
    held=st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1)), min_size=1, max_size=8),
    rolling=st.lists(st.integers(0, 3), max_size=4),
    per_step=st.integers(1, 4),
    bound=st.integers(0, 3),
)
def test_picks_first_allowed(held: list[tuple[int, float]], rolling: list[int], per_step: int, bound: int) -> None:
    window = Window(per_step, bound, version=3)
    pool: Pool[FakeGroup] = Pool()
    entries = []
    for index, (version, key) in enumerate(held):
        if window.fits(version):
            window.add(version)
            own = Held(index, version, 1, 0.0, FakeGroup.of(index, version))
            pool.put(key, own)
            entries.append((key, index, version))
    under_way = [version for version in rolling if window.fits(version) and not window.add(version)]
    allowed = [
        sorted(chosen)
        for chosen in itertools.combinations(entries, per_step)
        if _in_time([entry[2] for entry in entries if entry not in chosen] + under_way, 4, per_step, bound)
    ]
    possible = len(pool) >= per_step and all(
        sum(pool.count(own) for own in range(version + 1)) >= count for version, count in window.quotas()
    )
    assert possible == bool(allowed)
    if allowed:
        picked = {own.index for own in pool.pick(per_step, window.quotas())}
        assert picked == {index for _, index, _ in min(allowed)}


def _in_time(versions: list[int], step: int, per_step: int, bound: int) -> bool:
    """Whether steps from `step` on can train on all of them: the definition, by earliest due date."""
    dates = sorted(version + bound for version in versions)
    return all(date >= step + position // per_step for position, date in enumerate(dates))


@given(
    pending=st.lists(st.integers(0, 6), max_size=30),
    per_step=st.integers(1, 4),
    bound=st.integers(0, 4),
    steps=st.none() | st.integers(7, 9),
)
def test_what_fits_can_be_trained_in_time(pending: list[int], per_step: int, bound: int, steps: int | None) -> None:
    window = Window(per_step, bound, steps, version=6)
    last = 10**9 if steps is None else steps - 1
    for version in pending:
        dates = sorted(min(own + bound, last) for own in [*window.pending.elements(), version])
        in_time = all(date >= 6 + position // per_step for position, date in enumerate(dates))
        assert window.fits(version) == in_time
        if in_time:
            window.add(version)
    assert window.excess() == []
