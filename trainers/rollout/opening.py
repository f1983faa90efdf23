"""Checks of a run's first groups: whether prompts contain the task's messages, and whether the answers differ.

Rollout workers collect the data, since they have messages and tokens; the controller's contract
(`trainers.loop.contract`) evaluates it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from forge_env.trajectory import Trajectory, Turn
from forge_env.types import Message

FIRST = 16
"""Number of groups that each worker inspects after its start."""


@dataclass(frozen=True, slots=True)
class Opening:
    """First prompt and first replies of a group.

    Attributes:
        prompt: hash of the first prompt's tokens.
        words: number of words in the messages that the first prompt was rendered from.
        missing: those of the words that the prompt's text lacks, in order; expected to be empty.
        answers: hash of the tokens of each episode's first reply.
    """

    task: str
    prompt: str
    words: int
    missing: tuple[str, ...]
    answers: tuple[str, ...]


def opening(episodes: Sequence[Trajectory], decode: Callable[[list[int]], str]) -> Opening | None:
    """Build the `Opening` of a group's valid episodes; None if none of them has sampled tokens."""
    firsts = [turn for episode in episodes if (turn := _first(episode)) is not None]
    if not firsts:
        return None
    turn = firsts[0]
    words = words_of(turn.observation)
    missing = lacking(words, decode(turn.reply.prompt_ids.tolist()))
    answers = tuple(_hash(first.reply.token_ids.tobytes()) for first in firsts)
    return Opening(episodes[0].task_id, _hash(turn.reply.prompt_ids.tobytes()), len(words), missing, answers)


def words_of(observation: Sequence[Message]) -> list[str]:
    """The words of the system and user messages in an observation."""
    return [word for message in observation if message.role in ("system", "user") for word in message.content.split()]


def lacking(words: Sequence[str], prompt: str) -> tuple[str, ...]:
    """The words that a prompt lacks, whatever their order: a chat format may insert text between them.

    Words are compared case-folded and in Unicode form NFKC, since tokenizers may lowercase text or compose accents.
    """
    text = _plain(prompt)
    present = set(text.split())
    return tuple(word for word in words if (plain := _plain(word)) not in present and plain not in text)


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def _first(episode: Trajectory) -> Turn | None:
    return next((turn for turn in episode.turns if len(turn.reply.token_ids) and not turn.reply.continues), None)


def _hash(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()
