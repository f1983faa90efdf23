"""Scripted players and demonstrations of the bundled games with two seats."""

from __future__ import annotations

from random import Random
from types import ModuleType
from typing import Any

import pytest

import forge_env as fe
from environments import nim, tic_tac_toe
from forge_env.environment.optional import demonstrate, gold_actions
from forge_env.rollout.episode import run_episode
from forge_env.types import as_message


@pytest.mark.parametrize(("game", "careless_wins"), [(nim, 0.3), (tic_tac_toe, 0.6)])
async def test_perfect_players_win(game: ModuleType, careless_wins: float) -> None:
    def make() -> fe.Environment:
        return fe.make(game.__name__.rpartition(".")[2])

    async def share(first: Any, second: Any) -> float:
        played = [await run_episode(make, first, seed=seed, opponents={"second": second}) for seed in range(40)]
        assert all(episode.metrics["legal"] for episode in played)
        return sum(episode.reward for episode in played) / len(played)

    perfect, careless = game.Perfect(), game.Careless()
    assert await share(perfect, careless) == await share(perfect, game.Perfect()) == 1.0
    assert await share(careless, perfect) < careless_wins


@pytest.mark.parametrize(("name", "level"), [("nim", 1), ("tic_tac_toe", 2)])
async def test_demonstrations_are_one_seats_moves_of_a_perfect_game(name: str, level: int) -> None:
    env: Any = fe.make(name, levels=[level], demo_skill=1.0)
    task = env.task("train", 0)
    gold = [as_message(move).content for move in gold_actions(env, task)]
    shown = {
        tuple(message.content for message in demonstrate(env, task, Random(seed)) if message.role != "user")
        for seed in range(6)
    }
    assert shown == {tuple(gold[0::2]), tuple(gold[1::2])}
    await env.close()
