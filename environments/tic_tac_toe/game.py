"""The game: positions, who wins them, and how they are written and read."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from random import Random

from forge_env.rewards.spans import last_between

Board = str
"""Nine characters, row by row: X, O, or a dot where a cell is free."""

EMPTY: Board = "." * 9
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
TURNED, MIRRORED = (6, 3, 0, 7, 4, 1, 8, 5, 2), (2, 1, 0, 5, 4, 3, 8, 7, 6)
"""Which cell comes where: a quarter turn, and left for right."""
_ROWS = re.compile(r"^([1-9XO]) ([1-9XO]) ([1-9XO])$", re.MULTILINE)


def cells(board: Board) -> list[int]:
    """The free ones, from 1 to 9."""
    return [number for number, mark in enumerate(board, start=1) if mark == "."]


def to_move(board: Board) -> str:
    """X or O: X begins, and both move in turn."""
    return "X" if board.count("X") == board.count("O") else "O"


def after(board: Board, cell: int) -> Board:
    """The board after the player who is to move has taken a free cell."""
    return f"{board[: cell - 1]}{to_move(board)}{board[cell:]}"


def has_won(board: Board, mark: str) -> bool:
    """Whether three of a mark are in a line."""
    return any(all(board[place] == mark for place in line) for line in LINES)


def is_over(board: Board) -> bool:
    """Whether one of the two has won, or no cell is free."""
    return "." not in board or has_won(board, "X") or has_won(board, "O")


@cache
def value(board: Board) -> tuple[int, int]:
    """For the player who is to move, both playing perfectly: 1 a win, 0 a draw, -1 a loss; and the moves until then."""
    if is_over(board):
        return (-1 if has_won(board, "X") or has_won(board, "O") else 0), 0
    return max((_for_mover(after(board, cell)) for cell in cells(board)), key=_better)


def _for_mover(board: Board) -> tuple[int, int]:
    worth, moves = value(board)
    return -worth, moves + 1


def _better(found: tuple[int, int]) -> tuple[int, int]:
    """Wins that come soon, and losses that come late."""
    worth, moves = found
    return worth, -moves if worth > 0 else moves


def perfect_move(board: Board) -> int:
    """The quickest way to win; where there is none, to hold out longest. Of equal ones the first."""
    return max(cells(board), key=lambda cell: _better(_for_mover(after(board, cell))))


def careless_move(board: Board, rng: Random) -> int:
    """Any free cell."""
    return rng.choice(cells(board))


def alike(board: Board) -> Board:
    """One board for all that are the same but for turning and mirroring it."""
    found = []
    for _ in range(4):
        board = "".join(board[place] for place in TURNED)
        found += [board, "".join(board[place] for place in MIRRORED)]
    return min(found)


@lru_cache(maxsize=1)
def wins() -> Mapping[int, list[Board]]:
    """Positions in which X is to move and can force a win, by how many moves of X that takes; none like another."""
    found = defaultdict(set)
    for board in _reached(EMPTY, set()):
        if not is_over(board) and to_move(board) == "X" and value(board)[0] == 1:
            found[(value(board)[1] + 1) // 2].add(alike(board))
    return {moves: sorted(boards) for moves, boards in sorted(found.items())}


def _reached(board: Board, seen: set[Board]) -> Iterator[Board]:
    if board in seen:
        return
    seen.add(board)
    yield board
    for cell in [] if is_over(board) else cells(board):
        yield from _reached(after(board, cell), seen)


def turned(board: Board, rng: Random) -> Board:
    """The board, turned and mirrored in any way."""
    for _ in range(rng.randrange(4)):
        board = "".join(board[place] for place in TURNED)
    return "".join(board[place] for place in MIRRORED) if rng.random() < 0.5 else board


def written(board: Board) -> str:
    """Three lines, with the numbers of free cells."""
    signs = [mark if mark != "." else str(number) for number, mark in enumerate(board, start=1)]
    return "\n".join(" ".join(signs[row : row + 3]) for row in (0, 3, 6))


def read_board(text: str) -> Board:
    """The last board in a text."""
    signs = "".join("".join(row) for row in _ROWS.findall(text)[-3:])
    return re.sub(r"\d", ".", signs)


def read_move(text: str) -> int | None:
    """The cell in the last `<move>` of a message, or the message where it is a digit and nothing else."""
    tagged = last_between(text, "<move>", "</move>")
    said = (text if tagged is None else tagged).strip()
    return int(said) if re.fullmatch("[1-9]", said) else None
