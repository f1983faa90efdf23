"""A word game: find a word of five letters in six guesses."""

from environments.wordle.environment import Wordle, WordleConfig

__all__ = ["Wordle", "WordleConfig"]
