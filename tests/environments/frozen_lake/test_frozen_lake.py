"""Lakes: a way leads over each, the game is gymnasium's own, and splits share none."""

from __future__ import annotations

import pytest

import forge_env as fe
from environments.frozen_lake.environment import MOVES, SIZES, shortest_way
from forge_env.environment.optional import gold_actions
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import ReplayPolicy


def test_the_shortest_way_goes_around_holes() -> None:
    assert shortest_way(["SHF", "FHF", "FFG"]) == ["down", "down", "right", "right"]
    assert shortest_way(["SFF", "HHF", "GFF"]) == ["right", "right", "down", "down", "left", "left"]
    with pytest.raises(ValueError, match="no safe path"):
        shortest_way(["SH", "HG"])


@pytest.mark.parametrize("level", list(SIZES))
async def test_lakes_grow_with_the_level(level: int) -> None:
    env = fe.make("frozen_lake", levels=[level])
    for index in range(10):
        task = env.task("train", index)
        gold = gold_actions(env, task)
        assert gold is not None
        assert 2 * (SIZES[level] - 1) <= len(gold) <= 40
        (first,), _ = await env.reset(options={"task": task})
        assert first.content.splitlines()[-SIZES[level] :] == [
            "[S]" + task.data["public_lake"][0][1:],
            *task.data["public_lake"][1:],
        ]
        assert task.difficulty == level
    await env.close()


async def test_a_walk() -> None:
    env = fe.make("frozen_lake", levels=[1])
    task = env.task("eval", 0).model_copy(update={"data": {"seed": 0, "public_lake": ["SFFF", "HFFF", "FFFF", "FFFG"]}})
    lost = await run_episode(lambda: env, ReplayPolicy(["up", "fly", "<action>Down</action>", "right"]), task=task)
    assert [turn.observation[0].content.splitlines()[-4:] for turn in lost.turns[1:2]] == [
        ["[S]FFF", "HFFF", "FFFF", "FFFG"]
    ]
    assert lost.turns[2].observation[0].content.startswith("'fly' is not an action.")
    assert (lost.reward, lost.terminated, len(lost.turns)) == (0.0, True, 3)
    won = await run_episode(lambda: env, ReplayPolicy(shortest_way(task.data["public_lake"])), task=task)
    assert (won.reward, won.terminated) == (1.0, True)
    stood = await run_episode(lambda: fe.make("frozen_lake", max_turns=3), ReplayPolicy(["left"] * 3), task=task)
    assert (stood.reward, stood.truncation) == (0.0, "turns")
    assert list(MOVES) == env.config.model_dump()["actions"]
