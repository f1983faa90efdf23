"""Gymnasium spaces of messages. Gymnasium batches custom spaces as tuples, so they work with `make_vec`."""

from __future__ import annotations

import string
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
from gymnasium import Space

from forge_env.types import Action, Message

T = TypeVar("T")
_CHARACTERS = list(string.printable)


def _random_text(rng: np.random.Generator) -> str:
    return "".join(rng.choice(_CHARACTERS, size=int(rng.integers(1, 65))))


class _Space(Space[T]):
    """Base class of message spaces. They have no shape; instances of the same class are equal."""

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(shape=None, dtype=None, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """False: messages are not arrays."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self))

    __hash__ = None  # type: ignore[assignment]  # like gymnasium's own spaces

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Messages(_Space[tuple[Message, ...]]):
    """Space of observations: tuples of any number of messages that are new to the agent."""

    def sample(self, mask: Any = None, probability: Any = None) -> tuple[Message, ...]:
        """Sample a user message of random printable text."""
        return (Message(role="user", content=_random_text(self.np_random)),)

    def contains(self, x: Any) -> bool:
        """Whether `x` is a tuple of messages."""
        return isinstance(x, tuple) and all(isinstance(message, Message) for message in x)

    def to_jsonable(self, sample_n: Iterable[tuple[Message, ...]]) -> list[Any]:
        """Convert observations to lists of OpenAI chat dictionaries."""
        return [[message.to_openai() for message in sample] for sample in sample_n]

    def from_jsonable(self, sample_n: list[Any]) -> list[tuple[Message, ...]]:
        """Convert the output of `to_jsonable` back."""
        return [tuple(Message.model_validate(message) for message in sample) for sample in sample_n]


class AssistantMessage(_Space[Action]):
    """Space of actions: an assistant message, or its text."""

    def sample(self, mask: Any = None, probability: Any = None) -> Action:
        """Sample random printable text."""
        return _random_text(self.np_random)

    def contains(self, x: Any) -> bool:
        """Whether `x` is text or an assistant message."""
        return isinstance(x, str) or (isinstance(x, Message) and x.role == "assistant")

    def to_jsonable(self, sample_n: Iterable[Action]) -> list[Any]:
        """Convert messages to OpenAI chat dictionaries; texts stay unchanged."""
        return [action if isinstance(action, str) else action.to_openai() for action in sample_n]

    def from_jsonable(self, sample_n: list[Any]) -> list[Action]:
        """Convert the output of `to_jsonable` back."""
        return [action if isinstance(action, str) else Message.model_validate(action) for action in sample_n]
