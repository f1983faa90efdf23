"""Tic-tac-toe: two seats, starting positions with a forced win, and scripted opponents."""

from environments.tic_tac_toe.environment import Careless, Perfect, TicTacToe, TicTacToeConfig

__all__ = ["Careless", "Perfect", "TicTacToe", "TicTacToeConfig"]
