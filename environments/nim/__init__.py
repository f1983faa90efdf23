"""Nim: two seats, self-play, and players to measure against."""

from environments.nim.environment import Nim, NimConfig
from environments.nim.players import Careless, Perfect

__all__ = ["Careless", "Nim", "NimConfig", "Perfect"]
