"""A text world of rooms, doors, keys and things to bring home."""

from environments.text_world.environment import TextWorld, TextWorldConfig

__all__ = ["TextWorld", "TextWorldConfig"]
