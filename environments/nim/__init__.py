"""Nim: a game for two seats with self-play and scripted opponents."""

from environments.nim.environment import Careless, Nim, NimConfig, Perfect

__all__ = ["Careless", "Nim", "NimConfig", "Perfect"]
