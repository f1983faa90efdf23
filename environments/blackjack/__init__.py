"""Blackjack: gymnasium's game with observations and actions as text."""

from environments.blackjack.environment import Blackjack, BlackjackConfig

__all__ = ["Blackjack", "BlackjackConfig"]
