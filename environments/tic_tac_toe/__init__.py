"""Tic-tac-toe: two seats, starting positions with a forced win, and scripted opponents."""

from environments.tic_tac_toe.environment import TicTacToe, TicTacToeConfig
from environments.tic_tac_toe.players import Careless, Perfect

__all__ = ["Careless", "Perfect", "TicTacToe", "TicTacToeConfig"]
