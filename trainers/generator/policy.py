"""Generators as a `forge_env.Policy`: exact tokens in, exact tokens out, the chat format between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_env.config.recipe import SamplingSection
from forge_env.errors import ContextLengthExceeded
from forge_env.policy import Policy, PolicySession, Reply
from forge_env.types import Message, Observation, ToolSpec
from trainers.generator.types import Completion, SamplingOptions
from trainers.model.chat import Chat

GenerateFunction = Callable[[NDArray[np.int32], SamplingOptions, object], Awaitable[Completion]]
"""Prompt token ids, int32 [P], how to sample, and the conversation it belongs to, to a completion."""
LONG = 200_000
"""Characters that take long to spell, half a second and more: other episodes go on meanwhile."""


@dataclass(slots=True)
class GeneratorPolicy(Policy):
    """A policy whose replies are sampled by `generate`.

    Attributes:
        chat: the model family's chat format.
        generate: one request to a generator.
        max_length: tokens of a whole conversation.
        max_tokens: sampled tokens of one reply.
        temperature: of sampling.
        sampling: what else decides how a token is chosen.
        stop_token_ids: what ends a reply.
        shaping: of `sampling`, what is not the default, besides those.
    """

    chat: Chat
    generate: GenerateFunction
    max_length: int
    max_tokens: int
    temperature: float = 1.0
    sampling: SamplingSection = field(default_factory=SamplingSection)
    stop_token_ids: list[int] = field(init=False)
    shaping: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.stop_token_ids = [*self.chat.stop_token_ids, *self.sampling.stop_token_ids]
        self.shaping = self.sampling.model_dump(exclude={"stop_token_ids"}, exclude_defaults=True)

    def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
        """A conversation with these tools."""
        return _Session(self, tools, seed)


class _Session(PolicySession):
    """Keeps the conversation twice: as messages, and as the very tokens the model saw and sampled."""

    __slots__ = (
        "__weakref__",
        "_ends",
        "_home",
        "_messages",
        "_policy",
        "_prompt",
        "_replies",
        "_sampled",
        "_seed",
        "_tools",
        "_turns",
    )

    def __init__(self, policy: GeneratorPolicy, tools: list[ToolSpec], seed: int | None) -> None:
        self._policy = policy
        self._tools = tools
        self._seed = seed
        self._messages: list[Message] = []
        self._prompt = np.empty(0, np.int32)  # of the turn before
        self._sampled: NDArray[np.int32] | None = None  # in the turn before; None: there was none
        self._replies: list[Reply] = []  # since the conversation last began anew: their tokens are one sequence
        self._ends: list[tuple[int, list[Reply], int]] = []  # of turns: messages, and replies of that sequence
        self._turns = 0
        self._home: _Session | None = None  # whose replica has the tokens that this one begins with

    async def reply(self, observation: Observation) -> Reply:
        """Sample the next assistant message.

        Raises:
            ContextLengthExceeded: the conversation leaves no room for another token.
            ChatFormatError: the chat format can't write the conversation.
        """
        policy = self._policy
        self._messages += observation
        if sum(len(message.content) for message in observation) > LONG:
            prompt_ids, continues = await asyncio.to_thread(self._next_prompt, observation)
        else:
            prompt_ids, continues = self._next_prompt(observation)
        room = policy.max_length - len(prompt_ids)
        if room < 1:
            raise ContextLengthExceeded(f"the conversation has {len(prompt_ids)} of {policy.max_length} tokens")
        forked = self._sampled is not None and not continues
        if not self._ends:
            continues = 0  # what it goes on from is another's
        self._begin_with(prompt_ids, continues)
        options = SamplingOptions(
            max_tokens=min(policy.max_tokens, room),
            temperature=policy.temperature,
            stop_token_ids=policy.stop_token_ids,
            seed=None if self._seed is None else turn_seed(self._seed, self._turns),
            priority=-self._turns,  # what is nearly done first: groups become complete sooner
            shaping=policy.shaping,
        )
        completion = await policy.generate(prompt_ids, options, self._home or self)
        self._turns += 1
        message = policy.chat.parse(completion.token_ids.tolist(), self._tools, prompt_ids.tolist())
        self._messages.append(message)
        reply = Reply(
            message=message,
            prompt_ids=prompt_ids[continues:],
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            stop_reason=completion.stop_reason,
            forked=forked,
            continues=continues,
            receipt=completion.receipt,
        )
        self._replies.append(reply)
        self._sampled = reply.token_ids
        self._ends.append((len(self._messages), self._replies, len(self._replies)))
        return reply

    def fork(self, turns: int, *, seed: int | None = None) -> PolicySession:
        """A conversation that goes on from this one's very tokens, to the end of its `turns`-th reply."""
        messages, replies, count = self._ends[turns - 1]
        forked = _Session(self._policy, self._tools, seed)
        forked._messages = self._messages[:messages]
        tokens = [ids for reply in replies[:count] for ids in (reply.prompt_ids, reply.token_ids)]
        forked._prompt, forked._sampled = np.concatenate(tokens[:-1]), tokens[-1]
        forked._turns, forked._home = turns, self._home or self
        return forked

    def _next_prompt(self, observation: Observation) -> tuple[NDArray[np.int32], int]:
        """The next prompt, and how many tokens of it are the conversation so far: all, or none (a fork).

        It continues those tokens wherever the format can; else the conversation is rendered anew.
        """
        chat, sampled = self._policy.chat, self._sampled
        if sampled is None:
            return np.array(chat.render(self._messages, self._tools), np.int32), 0
        before, ids = self._prompt.tolist(), sampled.tolist()
        extended = chat.extend(before, ids, observation, self._tools)
        prompt = chat.render(self._messages, self._tools) if extended is None else extended
        before += ids
        if prompt[: len(before)] != before:
            return np.array(prompt, np.int32), 0
        news = np.array(prompt[len(before) :], np.int32)
        return np.concatenate([self._prompt, sampled, news]), len(before)

    def _begin_with(self, prompt_ids: NDArray[np.int32], continues: int) -> None:
        """From now on this is the prompt. The tokens that it continues are held in it, and nowhere else."""
        self._prompt = prompt_ids
        if not continues:
            self._replies = []
        start = 0
        for reply in self._replies:
            middle = start + len(reply.prompt_ids)
            end = middle + len(reply.token_ids)
            reply.prompt_ids, reply.token_ids = prompt_ids[start:middle], prompt_ids[middle:end]
            start = end


def turn_seed(seed: int, turn: int) -> int:
    """The seed of one request of an episode, below 2**63."""
    return int.from_bytes(blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest()) >> 1
