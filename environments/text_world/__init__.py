"""A text adventure with rooms, locked doors, keys and things to collect."""

from environments.text_world.environment import TextWorld, TextWorldConfig

__all__ = ["TextWorld", "TextWorldConfig"]
