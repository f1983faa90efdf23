"""Generators as a `forge_env.Policy`: exact tokens in, exact tokens out, the chat format between."""

from __future__ import annotations

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

    def __init__(self, policy: GeneratorPolicy, tools: list[ToolSpec], seed: int | None) -> None:
        self._policy = policy
        self._tools = tools
        self._seed = seed
        self._messages: list[Message] = []
        self._tokens = np.empty(0, np.int32)
        self._sampled = 0  # of them, at their end
        self._turns = 0

    async def reply(self, observation: Observation) -> Reply:
        """Sample the next assistant message.

        Raises:
            ContextLengthExceeded: the conversation leaves no room for another token.
        """
        policy = self._policy
        self._messages += observation
        prompt_ids = np.array(self._next_prompt(observation), np.int32)  # as a list it would be kept while this waits
        room = policy.max_length - len(prompt_ids)
        if room < 1:
            raise ContextLengthExceeded(f"the conversation has {len(prompt_ids)} of {policy.max_length} tokens")
        known = prompt_ids[: len(self._tokens)]
        if np.array_equal(known, self._tokens):
            self._tokens = known  # one copy while this waits
        options = SamplingOptions(
            max_tokens=min(policy.max_tokens, room),
            temperature=policy.temperature,
            stop_token_ids=policy.stop_token_ids,
            seed=None if self._seed is None else turn_seed(self._seed, self._turns),
            priority=-self._turns,  # what is nearly done first: groups become complete sooner
            shaping=policy.shaping,
        )
        completion = await policy.generate(prompt_ids, options, self)
        self._turns += 1
        message = policy.chat.parse(completion.token_ids.tolist(), self._tools, prompt_ids.tolist())
        self._messages.append(message)
        reply = Reply(
            message=message,
            prompt_ids=prompt_ids,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            stop_reason=completion.stop_reason,
        )
        self._tokens, self._sampled = reply.follow(self._tokens), len(reply.token_ids)
        return reply

    def _next_prompt(self, observation: Observation) -> list[int]:
        """The prompt that continues the tokens so far, or, where the format can't, a new rendering (a fork)."""
        chat = self._policy.chat
        if len(self._tokens):
            tokens, end = self._tokens.tolist(), len(self._tokens) - self._sampled
            extended = chat.extend(tokens[:end], tokens[end:], observation, self._tools)
            if extended is not None:
                return extended
        return chat.render(self._messages, self._tools)


def turn_seed(seed: int, turn: int) -> int:
    """The seed of one request of an episode, below 2**63."""
    return int.from_bytes(blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest()) >> 1
