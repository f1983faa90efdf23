"""Sentences about people, answered with a JSON object."""

from environments.cards.environment import Cards, CardsConfig

__all__ = ["Cards", "CardsConfig"]
