"""Blackjack: gymnasium's own game, played in words."""

from environments.blackjack.environment import Blackjack, BlackjackConfig

__all__ = ["Blackjack", "BlackjackConfig"]
