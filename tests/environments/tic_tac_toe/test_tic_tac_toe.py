"""Tic-tac-toe: the positions are what their level says, both seats' views, and players that are what they say."""

from __future__ import annotations

from functools import cache
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forge_env as fe
from environments.tic_tac_toe import Perfect
from environments.tic_tac_toe.game import (
    EMPTY,
    Board,
    after,
    alike,
    cells,
    has_won,
    is_over,
    perfect_move,
    read_board,
    read_move,
    to_move,
    turned,
    value,
    wins,
    written,
)
from forge_env.errors import UsageError
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import GoldPolicy, ReplayPolicy


@cache
def wins_within(board: Board, moves: int) -> bool:
    """Whether the player who is to move can force a win with so many moves of its own: by trying everything."""
    mark = to_move(board)
    for cell in cells(board) if moves and not is_over(board) else []:
        taken = after(board, cell)
        if has_won(taken, mark):
            return True
        if not is_over(taken) and all(wins_within(after(taken, other), moves - 1) for other in cells(taken)):
            return True
    return False


def test_positions_of_a_level_are_won_in_so_many_moves_and_no_fewer() -> None:
    assert {moves: len(boards) for moves, boards in wins().items()} == {1: 207, 2: 37, 3: 10}
    for moves, boards in wins().items():
        assert all(wins_within(board, moves) and not wins_within(board, moves - 1) for board in boards)
    assert value(EMPTY)[0] == 0, "nobody wins who makes no mistake"


def test_no_held_out_position_is_like_one_that_is_trained_on() -> None:
    env = fe.make("tic_tac_toe")
    seen = {
        split: {alike(env.task(split, index).data["public_board"]) for index in range(1500)}
        for split in ("train", "eval")
    }
    assert not seen["train"] & seen["eval"]
    assert len(seen["eval"]) == 42 + 8 + 2


@given(st.lists(st.integers(1, 9), max_size=9), st.randoms(use_true_random=False))
def test_boards_are_read_as_they_are_written(moves: list[int], rng: Random) -> None:
    board = EMPTY
    for cell in moves:
        if not is_over(board) and cell in cells(board):
            board = after(board, cell)
    assert read_board(f"The other takes 3.\n{written(board)}") == board
    assert alike(turned(board, rng)) == alike(board)


@pytest.mark.parametrize(
    ("text", "move"),
    [("5", 5), (" 5\n", 5), ("Not <move>1</move>, but <move> 9 </move>", 9), ("0", None), ("cell 5", None), ("", None)],
)
def test_moves_are_read(text: str, move: int | None) -> None:
    assert read_move(text) == move


async def test_each_seat_sees_the_rules_once_and_the_board_that_it_moves_on() -> None:
    played = await run_episode(lambda: fe.make("tic_tac_toe", levels=[3]), GoldPolicy(), seed=3)
    board = fe.resolve_task(fe.make("tic_tac_toe", levels=[3]), 3, None).data["public_board"]
    shown: dict[str, list[str]] = {"first": [], "second": []}
    for number, turn in enumerate(played.turns):
        assert turn.seat == ("first", "second")[number % 2]
        shown[turn.seat] += [message.content for message in turn.observation]
        assert read_board(shown[turn.seat][-1]) == board
        board = after(board, int(turn.message.content))
    assert len(played.turns) == 5
    assert [sum("You are X" in text for text in texts) for texts in shown.values()] == [1, 0]
    assert [sum("You are O" in text for text in texts) for texts in shown.values()] == [0, 1]
    assert played.rewards == {"first": 1.0, "second": 0.0}


@pytest.mark.parametrize("said", ["", "0", "X", "taken"])
async def test_no_free_cell_loses(said: str) -> None:
    env = fe.make("tic_tac_toe", levels=[1])
    if said == "taken":
        said = str(fe.resolve_task(env, 0, None).data["public_board"].index("O") + 1)
    played = await run_episode(lambda: env, ReplayPolicy([said]), seed=0)
    assert played.rewards == {"first": 0.0, "second": 1.0}
    assert (len(played.turns), played.metrics["legal"]) == (1, 0.0)


async def test_a_draw_is_worth_half() -> None:
    board, env = EMPTY, fe.make("tic_tac_toe")
    task = env.task("train", 0).model_copy(update={"data": {"public_board": EMPTY}})
    played = await run_episode(lambda: env, Perfect(), task=task)
    assert played.rewards == {"first": 0.5, "second": 0.5}
    for _ in range(9):
        board = after(board, perfect_move(board))
    assert not has_won(board, "X")
    assert not has_won(board, "O")
    with pytest.raises(UsageError, match="reset"):
        await env.step("1")
