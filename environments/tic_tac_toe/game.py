"""Rules of tic-tac-toe: positions, their game values and symmetries, and their text format."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from random import Random

from forge_env.rewards.spans import last_between

Board = str
"""Nine characters, row by row: X, O, or a dot for a free cell."""

EMPTY: Board = "." * 9
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
TURNED, MIRRORED = (6, 3, 0, 7, 4, 1, 8, 5, 2), (2, 1, 0, 5, 4, 3, 8, 7, 6)
"""Cell permutations of a quarter turn and of a left-right reflection."""
_ROWS = re.compile(r"^([1-9XO]) ([1-9XO]) ([1-9XO])$", re.MULTILINE)


def cells(board: Board) -> list[int]:
    """Numbers of the free cells, from 1 to 9."""
    return [number for number, mark in enumerate(board, start=1) if mark == "."]


def to_move(board: Board) -> str:
    """The mark to move, X or O; X begins."""
    return "X" if board.count("X") == board.count("O") else "O"


def after(board: Board, cell: int) -> Board:
    """The board after the player to move takes a free cell."""
    return f"{board[: cell - 1]}{to_move(board)}{board[cell:]}"


def has_won(board: Board, mark: str) -> bool:
    """Whether three of a mark are in a line."""
    return any(all(board[cell] == mark for cell in line) for line in LINES)


def is_over(board: Board) -> bool:
    """Whether one of the two has won, or no cell is free."""
    return "." not in board or has_won(board, "X") or has_won(board, "O")


@cache
def value(board: Board) -> tuple[int, int]:
    """Value for the player to move under perfect play (1 win, 0 draw, -1 loss), and the number of moves to the end."""
    if is_over(board):
        return (-1 if has_won(board, "X") or has_won(board, "O") else 0), 0
    return max((_for_mover(after(board, cell)) for cell in cells(board)), key=_better)


def _for_mover(board: Board) -> tuple[int, int]:
    worth, moves = value(board)
    return -worth, moves + 1


def _better(found: tuple[int, int]) -> tuple[int, int]:
    """Sort key that prefers fast wins and slow losses."""
    worth, moves = found
    return worth, -moves if worth > 0 else moves


def perfect_move(board: Board) -> int:
    """The move of the fastest forced win; without one, of the longest resistance. The first of equal moves."""
    return max(cells(board), key=lambda cell: _better(_for_mover(after(board, cell))))


def careless_move(board: Board, rng: Random) -> int:
    """A random free cell."""
    return rng.choice(cells(board))


def alike(board: Board) -> Board:
    """Canonical form of a board under turning and mirroring."""
    boards = []
    for _ in range(4):
        board = "".join(board[cell] for cell in TURNED)
        boards += [board, "".join(board[cell] for cell in MIRRORED)]
    return min(boards)


@lru_cache(maxsize=1)
def wins() -> Mapping[int, list[Board]]:
    """Positions with X to move and a forced win, without symmetric duplicates, by the number of X moves to win."""
    positions = defaultdict(set)
    for board in _reached(EMPTY, set()):
        if not is_over(board) and to_move(board) == "X" and value(board)[0] == 1:
            positions[(value(board)[1] + 1) // 2].add(alike(board))
    return {moves: sorted(boards) for moves, boards in sorted(positions.items())}


def _reached(board: Board, seen: set[Board]) -> Iterator[Board]:
    if board in seen:
        return
    seen.add(board)
    yield board
    for cell in [] if is_over(board) else cells(board):
        yield from _reached(after(board, cell), seen)


def turned(board: Board, rng: Random) -> Board:
    """The board, randomly turned and mirrored."""
    for _ in range(rng.randrange(4)):
        board = "".join(board[cell] for cell in TURNED)
    return "".join(board[cell] for cell in MIRRORED) if rng.random() < 0.5 else board


def written(board: Board) -> str:
    """Format the board as three lines; free cells show their numbers."""
    signs = [mark if mark != "." else str(number) for number, mark in enumerate(board, start=1)]
    return "\n".join(" ".join(signs[row : row + 3]) for row in (0, 3, 6))


def read_board(text: str) -> Board:
    """Parse the last board in a text."""
    signs = "".join("".join(row) for row in _ROWS.findall(text)[-3:])
    return re.sub(r"\d", ".", signs)


def read_move(text: str) -> int | None:
    """Parse the cell in the last `<move>` tag, or an untagged message that is only a digit; None if neither."""
    tagged = last_between(text, "<move>", "</move>")
    answer = (text if tagged is None else tagged).strip()
    return int(answer) if re.fullmatch("[1-9]", answer) else None
