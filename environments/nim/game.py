"""The game: piles, moves, and how it is played perfectly; how both are written and read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import xor
from random import Random

Piles = tuple[int, ...]
"""Sticks of each pile."""
Move = tuple[int, int]
"""`(pile, sticks)`."""

NAMES = "ABC"
_TAGGED = re.compile(r"<move>\s*([A-C])\s*(\d{1,3})\s*</move>")
_BARE = re.compile(r"\s*([A-C])\s+(\d{1,3})\s*\.?\s*")
_STATE = re.compile(r"([A-C]): (\d+)")
_MOST = re.compile(r"at most (\d+)")


def moves(piles: Piles, most: int) -> Iterator[Move]:
    """Every legal move: 1 to `most` sticks of one pile."""
    for pile, sticks in enumerate(piles):
        for taken in range(1, min(sticks, most) + 1):
            yield pile, taken


def after(piles: Piles, move: Move) -> Piles:
    """The piles after a move."""
    pile, taken = move
    return tuple(sticks - taken * (place == pile) for place, sticks in enumerate(piles))


def nim_sum(piles: Piles, most: int) -> int:
    """0: whoever is to move loses against perfect play (Bouton 1901; a pile counts modulo `most` + 1)."""
    return reduce(xor, (sticks % (most + 1) for sticks in piles), 0)


def perfect_move(piles: Piles, most: int) -> Move:
    """A move that leaves a nim-sum of 0; where none does, the smallest."""
    legal = list(moves(piles, most))
    return next((move for move in legal if nim_sum(after(piles, move), most) == 0), legal[0])


def careless_move(piles: Piles, most: int, rng: Random) -> Move:
    """Any legal move."""
    return rng.choice(list(moves(piles, most)))


def written(piles: Piles) -> str:
    """The piles as text: `A: 3, B: 5`."""
    return ", ".join(f"{name}: {sticks}" for name, sticks in zip(NAMES, piles, strict=False))


def said(move: Move) -> str:
    """A move as a player says it: `A 2`."""
    return f"{NAMES[move[0]]} {move[1]}"


def read_move(text: str) -> Move | None:
    """The last tagged move of a message, or the move that is the whole message."""
    tagged = _TAGGED.findall(text)
    found = tagged[-1] if tagged else match.groups() if (match := _BARE.fullmatch(text)) else None
    return None if found is None else (NAMES.index(found[0]), int(found[1]))


def read_state(texts: Sequence[str]) -> tuple[Piles, int]:
    """Piles and the most that may be taken, from what a player was shown, in order."""
    piles = tuple(int(sticks) for _, sticks in _STATE.findall(next(text for text in reversed(texts) if "A: " in text)))
    return piles, next(int(found[1]) for text in texts if (found := _MOST.search(text)))
