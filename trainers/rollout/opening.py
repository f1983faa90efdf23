"""How the first groups of a run begin: whether the model was shown its tasks, and whether it answers them differently.

Seen by a rollout worker, which has messages and tokens; the controller's contract (`trainers.loop.contract`) judges.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from forge_env.trajectory import Trajectory, Turn
from forge_env.types import Message

FIRST = 16
"""Groups that each worker looks at, at its start."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How a group begins.

    Attributes:
        task: id of its task.
        prompt: hash of the first prompt's tokens.
        words: of the messages that the first prompt is made of.
        missing: of those, the ones that the model's prompt doesn't have, in order; [] is as it should be.
        answers: hash of the tokens of each episode's first reply.
    """

    task: str
    prompt: str
    words: int
    missing: tuple[str, ...]
    answers: tuple[str, ...]


def opening(episodes: Sequence[Trajectory], decode: Callable[[list[int]], str]) -> Opening | None:
    """How a group's valid episodes begin; None where none of them has tokens.

    Args:
        episodes: of one task.
        decode: tokens to text, as the model's tokenizer has it.
    """
    firsts = [turn for episode in episodes if (turn := _first(episode)) is not None]
    if not firsts:
        return None
    turn = firsts[0]
    said = words_of(turn.observation)
    missing = lacking(said, decode(turn.reply.prompt_ids.tolist()))
    answers = tuple(_hash(own.reply.token_ids.tobytes()) for own in firsts)
    return Opening(episodes[0].task_id, _hash(turn.reply.prompt_ids.tobytes()), len(said), missing, answers)


def words_of(observation: Sequence[Message]) -> list[str]:
    """The words of what the agent is told at first."""
    return [word for message in observation if message.role in ("system", "user") for word in message.content.split()]


def lacking(words: Sequence[str], prompt: str) -> tuple[str, ...]:
    """The words that a prompt lacks, wherever it has the others: a chat format may put its own between them.

    Tokenizers may compose accents and lower letters: that is the same word.
    """
    there = _plain(prompt)
    known = set(there.split())
    return tuple(word for word in words if (plain := _plain(word)) not in known and plain not in there)


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def _first(episode: Trajectory) -> Turn | None:
    return next((turn for turn in episode.turns if len(turn.reply.token_ids) and not turn.reply.continues), None)


def _hash(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()
