"""Nim: a game for two seats with self-play and scripted opponents."""

from environments.nim.environment import Nim, NimConfig
from environments.nim.players import Careless, Perfect

__all__ = ["Careless", "Nim", "NimConfig", "Perfect"]
