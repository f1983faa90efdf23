"""Rules of Nim: piles, legal moves and perfect play, and the text format of piles and moves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import xor
from random import Random

Piles = tuple[int, ...]
"""Number of sticks in each pile."""
Move = tuple[int, int]
"""`(pile, sticks)`."""

NAMES = "ABC"
_TAGGED = re.compile(r"<move>\s*([A-C])\s*(\d{1,3})\s*</move>")
_BARE = re.compile(r"\s*([A-C])\s+(\d{1,3})\s*\.?\s*")
_STATE = re.compile(r"([A-C]): (\d+)")
_MOST = re.compile(r"at most (\d+)")


def moves(piles: Piles, most: int) -> Iterator[Move]:
    """Iterate over the legal moves: 1 to `most` sticks from one pile."""
    for pile, sticks in enumerate(piles):
        for taken in range(1, min(sticks, most) + 1):
            yield pile, taken


def after(piles: Piles, move: Move) -> Piles:
    """The piles after a move."""
    pile, taken = move
    return tuple(sticks - taken * (index == pile) for index, sticks in enumerate(piles))


def nim_sum(piles: Piles, most: int) -> int:
    """Nim-sum of the piles modulo `most` + 1; at 0 the player to move loses against perfect play (Bouton 1901)."""
    return reduce(xor, (sticks % (most + 1) for sticks in piles), 0)


def perfect_move(piles: Piles, most: int) -> Move:
    """A move that leaves a nim-sum of 0; if there is none, one stick from the first non-empty pile."""
    legal = list(moves(piles, most))
    return next((move for move in legal if nim_sum(after(piles, move), most) == 0), legal[0])


def careless_move(piles: Piles, most: int, rng: Random) -> Move:
    """A random legal move."""
    return rng.choice(list(moves(piles, most)))


def written(piles: Piles) -> str:
    """Format the piles as text: `A: 3, B: 5`."""
    return ", ".join(f"{name}: {sticks}" for name, sticks in zip(NAMES, piles, strict=False))


def said(move: Move) -> str:
    """Format a move as text: `A 2`."""
    return f"{NAMES[move[0]]} {move[1]}"


def read_move(text: str) -> Move | None:
    """Parse the last tagged move of a message, or an untagged message that is only a move; None if neither."""
    tagged = _TAGGED.findall(text)
    groups = tagged[-1] if tagged else match.groups() if (match := _BARE.fullmatch(text)) else None
    return None if groups is None else (NAMES.index(groups[0]), int(groups[1]))


def read_state(texts: Sequence[str]) -> tuple[Piles, int]:
    """Parse the piles and the maximum sticks per move from the messages shown to a player, in order."""
    piles = tuple(int(sticks) for _, sticks in _STATE.findall(next(text for text in reversed(texts) if "A: " in text)))
    return piles, next(int(match[1]) for text in texts if (match := _MOST.search(text)))
