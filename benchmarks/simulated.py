"""What `benchmarks.rollouts` plays: an environment without work, and generators that say what they were told to."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import numpy as np

import forge_env as fe
from forge_env.environment.tool_environment import ToolEnvironmentConfig
from forge_env.policy import NO_TOKENS
from forge_env.types import Message
from trainers.actors.actor import ForgeActor, concurrent_endpoint
from trainers.actors.processes import settle_heap
from trainers.generator.types import Completion

NEWEST = 1 << 20
"""The version of every token: the buffer takes those that it doesn't know of for the newest it knows."""
LETTERS = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=20_000))
"""Text of about a token a letter, whatever the tokenizer."""


class ChatterConfig(ToolEnvironmentConfig):
    """How much is said."""

    told: int = 60
    """Characters of every answer of the tool."""


def talked(task: fe.Task, answer: str) -> float:
    """A reward like any other."""
    return float(hash(answer) % 2)


class Chatter(fe.ToolEnvironment):
    """A conversation with a tool that does nothing."""

    config_class = ChatterConfig
    config: ChatterConfig
    splits = ("train", "eval")
    rubric = fe.Rubric(talked)

    def task(self, split: str, index: int) -> fe.Task:
        """One of as many as are wanted."""
        return fe.Task(id=f"{split}-{index}", split=split, prompt=f"Conversation {index}: begin.")

    def demonstrate(self, task: fe.Task, rng: random.Random) -> list[Message]:
        """Something for a tokenizer to be made of."""
        return [*self.prompt(task), Message(role="assistant", content=f"{rng.random()}")]

    @fe.tool
    async def note(self, text: str) -> str:
        """Take a note.

        Args:
            text: the note.
        """
        return LETTERS[: self.config.told]


def reply(length: int) -> str:
    """An assistant message of so many letters that calls the tool."""
    call = json.dumps({"name": "note", "arguments": {"text": "as above"}})
    return f"{LETTERS[:length]}\n<tool_call>\n{call}\n</tool_call><|im_end|>"


class SimulatedGenerator(ForgeActor):
    """Answers every request with the same tokens, after a while.

    Args:
        token_ids: what it samples.
        latency_s: how long that takes.
    """

    def __init__(self, token_ids: list[int], latency_s: float) -> None:
        self._token_ids = np.array(token_ids, np.int32)
        self._latency_s = latency_s

    @concurrent_endpoint
    async def setup(self) -> None:
        """Nothing to load."""
        settle_heap()

    @concurrent_endpoint
    async def generate(
        self, prompt_ids: Any, options: dict[str, Any], request_id: str, held: bool = False, at_least: int = 0
    ) -> Completion:
        """See `Generator.generate`."""
        await asyncio.sleep(self._latency_s)
        count = len(self._token_ids)
        logprobs, versions = np.full(count, -1.0, np.float32), np.full(count, NEWEST, np.int32)
        return Completion(NO_TOKENS, self._token_ids, logprobs, versions, "stop", 0)

    @concurrent_endpoint
    async def abort(self, request_id: str) -> None:
        """Nobody waits for it any more."""
