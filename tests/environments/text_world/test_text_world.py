"""Worlds can be solved, by their rules only; the plan is a shortest one."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.text_world import TextWorld, TextWorldConfig
from environments.text_world.environment import command_of
from environments.text_world.world import SIZES, State, World, draw_world

SMALL = World(
    exits={"hall": {"east": "attic", "west": "cellar"}, "attic": {"west": "hall"}, "cellar": {"east": "hall"}},
    doors={("hall", "east"): "red", ("attic", "west"): "red"},
    start=State("hall", (("lamp", "attic"), ("red key", "cellar")), frozenset({"red"})),
    wanted=("lamp",),
    target="hall",
)


def test_the_shortest_plan_of_a_small_world() -> None:
    plan = ["go west", "take red key", "go east", "unlock east", "go east", "take lamp", "go west", "drop lamp"]
    assert SMALL.plan() == plan
    assert SMALL.commands(SMALL.start) == ["go west"]
    no_key = World(SMALL.exits, SMALL.doors, State("hall", (("lamp", "attic"),), frozenset({"red"})), ("lamp",), "hall")
    assert no_key.plan() is None
    assert "Exits: east (the red door, locked), west. Here: nothing." in SMALL.describe(SMALL.start)


@pytest.mark.parametrize("level", list(SIZES))
def test_plans_grow_with_the_level_and_work(level: int) -> None:
    rooms, locks, things = SIZES[level]
    for seed in range(5):
        world = draw_world(str(seed), level)
        state, plan = world.start, world.plan()
        assert plan is not None
        for command in plan:
            assert not world.done(state)
            state = world.after(state, command)
        assert world.done(state)
        assert (len(world.exits), len(world.start.locked), len(world.wanted)) == (rooms, locks, things)
        assert len(plan) <= TextWorldConfig().max_turns
        assert sum(command.startswith("unlock") for command in plan) == locks


@given(st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_nothing_is_lost_or_doubled_whatever_is_done(rng: Random) -> None:
    world = draw_world(str(rng.randrange(20)), 2)
    state = world.start
    for _ in range(40):
        before = state
        state = world.after(state, rng.choice(world.commands(state)))
        assert [name for name, _ in state.places] == [name for name, _ in world.start.places]
        assert state.locked <= before.locked
        assert state.room == before.room or state.room in world.exits[before.room].values()


async def test_a_game_in_words() -> None:
    env = TextWorld(TextWorldConfig(levels=[1], max_turns=3))
    observation, _ = await env.reset(options={"split": "train", "index": 0})
    assert "You are in the" in observation[-1].content
    observation, *_ = await env.step("go to bed")
    assert observation[0].content.startswith("You can't do that: 'go to bed'. You are in the")
    observation, *_ = await env.step("<action> LOOK </action>")
    assert observation[0].content.startswith("You are in the")
    _, reward, terminated, truncated, info = await env.step("look")
    assert (reward, terminated, truncated, info["metrics"]["not_possible"]) == (0.0, False, True, 1.0)
    assert command_of("I go.\n<action>Go  North</action>") == "go north"
