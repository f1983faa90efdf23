"""Simulated parts for `benchmarks.rollouts`: an environment without work, and generators with fixed answers."""

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
from trainers.generator.types import Completion, SamplingOptions

NEWEST = 1 << 20
"""Policy version of every token; the buffer treats unknown versions as the newest that it knows."""
LETTERS = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=20_000))
"""Text with about one token per letter, for any tokenizer."""


class ChatterConfig(ToolEnvironmentConfig):
    """Options of `Chatter`."""

    told: int = 60
    """Characters of every tool result."""


def talked(task: fe.Task, completion: str) -> float:
    """Return an arbitrary reward of 0 or 1."""
    return float(hash(completion) % 2)


class Chatter(fe.ToolEnvironment):
    """Conversation with a tool that does nothing."""

    config_class = ChatterConfig
    config: ChatterConfig
    splits = ("train", "eval")
    rubric = fe.Rubric(talked)

    def task(self, split: str, index: int) -> fe.Task:
        """Return a task; there is no limit to their number."""
        return fe.Task(id=f"{split}-{index}", split=split, prompt=f"Conversation {index}: begin.")

    def demonstrate(self, task: fe.Task, rng: random.Random) -> list[Message]:
        """Return sample text to build a tokenizer from."""
        return [*self.prompt(task), Message(role="assistant", content=f"{rng.random()}")]

    @fe.tool
    async def note(self, text: str) -> str:
        """Take a note.

        Args:
            text: the note.
        """
        return LETTERS[: self.config.told]


def reply(length: int) -> str:
    """Return an assistant message with `length` letters and a call of the tool."""
    call = json.dumps({"name": "note", "arguments": {"text": "as above"}})
    return f"{LETTERS[:length]}\n<tool_call>\n{call}\n</tool_call><|im_end|>"


class SimulatedGenerator(ForgeActor):
    """Generator that answers every request with the same tokens after a delay.

    Args:
        token_ids: sampled tokens of every answer.
        latency_s: seconds until the answer.
    """

    def __init__(self, token_ids: list[int], latency_s: float) -> None:
        self._token_ids = np.array(token_ids, np.int32)
        self._latency_s = latency_s

    @concurrent_endpoint
    async def setup(self) -> None:
        """Prepare the process; there is no model to load."""
        settle_heap()

    @concurrent_endpoint
    async def generate(
        self, prompt_ids: Any, options: SamplingOptions, request_id: str, held: bool = False, at_least: int = 0
    ) -> Completion:
        """See `Generator.generate`."""
        await asyncio.sleep(self._latency_s)
        count = len(self._token_ids)
        logprobs, versions = np.full(count, -1.0, np.float32), np.full(count, NEWEST, np.int32)
        return Completion(NO_TOKENS, self._token_ids, logprobs, versions, "stop", 0)

    @concurrent_endpoint
    async def abort(self, request_id: str) -> None:
        """Do nothing: the caller no longer waits for the request."""
