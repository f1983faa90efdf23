"""Tic-tac-toe: two seats, positions in which one can force a win, and players to measure against."""

from environments.tic_tac_toe.environment import TicTacToe, TicTacToeConfig
from environments.tic_tac_toe.players import Careless, Perfect

__all__ = ["Careless", "Perfect", "TicTacToe", "TicTacToeConfig"]
