"""Nim: the rules, both seats' views, and players that are what they say."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from hypothesis import given
from hypothesis import strategies as st

import forge_env as fe
import forge_env.gym  # registers with gymnasium
from environments.nim import Careless
from environments.nim.game import Piles, after, moves, nim_sum, perfect_move, read_move, read_state, said
from forge_env.cli.main import main
from forge_env.errors import UsageError
from forge_env.evaluation.api import evaluate_async
from forge_env.evaluation.rescoring import rescore
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import GoldPolicy, ReplayPolicy
from forge_env.trajectory import read_trajectories


@cache
def can_win(piles: Piles, most: int) -> bool:
    """By trying everything."""
    return any(not can_win(after(piles, move), most) for move in moves(piles, most))


@given(st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple), st.integers(1, 7))
def test_the_nim_sum_says_who_wins(piles: Piles, most: int) -> None:
    assert can_win(piles, most) == bool(nim_sum(piles, most))
    if can_win(piles, most):
        assert not can_win(after(piles, perfect_move(piles, most)), most)


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("A 2", (0, 2)),
        (" B 10.", (1, 10)),
        ("First <move>A 1</move>, no: <move>C 3</move>", (2, 3)),
        ("A", None),
        ("D 1", None),
        ("I take A 1 now", None),
        ("A -1", None),
    ],
)
def test_moves_are_read(text: str, move: Any) -> None:
    assert read_move(text) == move
    assert move is None or read_move(said(move)) == move


async def test_each_seat_sees_the_rules_once_and_every_state_it_moves_in() -> None:
    played = await run_episode(lambda: fe.make("nim", levels=[3]), GoldPolicy(), seed=3)
    piles = tuple(fe.resolve_task(fe.make("nim", levels=[3]), 3, None).data["piles"])
    shown: dict[str, list[str]] = {"first": [], "second": []}
    for number, turn in enumerate(played.turns):
        assert turn.seat == ("first", "second")[number % 2]
        shown[turn.seat] += [message.content for message in turn.observation]
        assert read_state(shown[turn.seat]) == (piles, 7)
        move = read_move(turn.message.content)
        assert move is not None
        piles = after(piles, move)
    assert not any(piles)
    assert [sum("Nim." in text for text in texts) for texts in shown.values()] == [1, 1]
    assert played.rewards == {"first": 1.0, "second": 0.0}


@pytest.mark.parametrize("said_first", ["", "A 99", "A 0", "no"])
async def test_no_legal_move_loses(said_first: str) -> None:
    played = await run_episode(lambda: fe.make("nim", levels=[1]), ReplayPolicy([said_first]), seed=0)
    assert played.rewards == {"first": 0.0, "second": 1.0}
    assert (len(played.turns), played.metrics["legal"]) == (1, 0.0)


async def test_an_evaluation_has_opponents_and_is_scored_again(tmp_path: Path) -> None:
    result = await evaluate_async(
        ["nim"],
        "environments.nim:Careless",
        num_tasks=12,
        out=tmp_path / "one",
        opponents={"second": "environments.nim:Perfect"},
    )
    score = result.summary.environments["nim"].score
    for played in read_trajectories(tmp_path / "one" / "trajectories" / "eval.jsonl"):
        assert played.opponents == {"second": "environments.nim:Perfect"}
        assert played.reward == played.rewards["first"]
    lost = await evaluate_async(
        ["nim"],
        "environments.nim:Careless",
        num_tasks=12,
        out=tmp_path / "metric",
        opponents={"second": "environments.nim:Perfect"},
        score="reward_second",
    )
    seconds = lost.summary.environments["nim"].score
    assert seconds.value == pytest.approx(1 - score.value)
    again = await rescore(tmp_path / "one", tmp_path / "two")
    assert (again.diverged, again.changed, again.unscored) == ([], [], {})
    assert again.result.summary.environments["nim"].score == score


async def test_the_seats_of_a_mixture_are_those_of_the_game_that_is_played() -> None:
    def mixture() -> fe.Environment:
        return fe.make("mixture", environments={"nim": {}, "wordle": {}})

    played = [
        await run_episode(mixture, Careless() if name == "nim" else ReplayPolicy(["crane"] * 6), task=task)
        for index in range(6)
        for task in [mixture().task("train", index)]
        for name in [task.tags[0]]
    ]
    assert {(item.environment or item.tags[0], *item.rewards) for item in played} == {
        ("nim", "first", "second"),
        ("wordle",),
    }


def test_gymnasiums_twin_plays_every_seat_in_turn() -> None:
    game = gymnasium.make("forge_env/nim", levels=[1])
    observation, info = game.reset(seed=3)
    shown: dict[str, list[str]] = {"first": [], "second": []}
    earned = dict.fromkeys(shown, 0.0)
    ended = False
    while not ended:
        seat = info["seat"]
        shown[seat] += [message.content for message in observation]
        move = perfect_move(*read_state(shown[seat]))
        observation, reward, ended, _, info = game.step(said(move))
        earned[seat] += float(reward)
    assert earned == {"first": 1.0, "second": 0.0}
    game.close()


@pytest.mark.parametrize(
    ("words", "said_of_it"),
    [
        (["--seat", "third", "--against", "random"], "nim has no seat 'third'"),
        (["--against", "random"], "--against needs --seat"),
        (["--seat", "first"], "--seat needs opponents"),
        (["--seat", "first", "--against", "gold"], "--against.second: 'gold' plays all seats together"),
    ],
)
def test_a_seat_that_cannot_be_played(
    words: list[str], said_of_it: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert main(["play", "nim", *words]) == 2
    assert said_of_it in capsys.readouterr().err


@pytest.mark.parametrize(
    ("opponents", "said_of_it"),
    [
        ({"third": "random"}, "nim has no seat 'third'"),
        ({"second": "nobody"}, "'nobody' is no scripted policy"),
        ({"second": {"modle": "x"}}, "opponents.second.modle"),
        ({"first": "random", "second": "random"}, "every seat of nim has an opponent"),
    ],
)
async def test_opponents_that_are_refused(opponents: Any, said_of_it: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        await evaluate_async(["nim"], "random", num_tasks=1, out=tmp_path / "one", opponents=opponents)
    assert said_of_it in str(caught.value)
    with pytest.raises(UsageError, match="plays all seats of nim together"):
        await evaluate_async(["nim"], "gold", num_tasks=1, out=tmp_path / "two", opponents={"second": "random"})
