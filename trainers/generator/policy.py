"""Generators as a `forge_env.Policy`: converts between messages and exact tokens with the model's chat format."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
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
"""Maps prompt token ids (int32 [P]), sampling options and a conversation object to a completion."""
LONG = 200_000
"""Observations with more characters are tokenized in a thread, so that other episodes continue: tokenizing takes half a
second or more."""


@dataclass(slots=True)
class GeneratorPolicy(Policy):
    """A policy whose replies, of up to `max_tokens`, are sampled by `generate`; a conversation has up to `max_length`.

    `shaping` has the settings of `sampling` that differ from the defaults, without `stop_token_ids`.
    """

    reads_images = False

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
        """Begin a conversation with these tools."""
        return _Session(self, tools, seed)


class _Session(PolicySession):
    """A conversation, stored both as messages and as the exact tokens that the model saw and sampled."""

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
        self._prompt = np.empty(0, np.int32)  # prompt of the previous turn
        self._sampled: NDArray[np.int32] | None = None  # tokens sampled in the previous turn; None before the first
        self._replies: list[Reply] = []  # replies since the last new rendering: their tokens form one sequence
        self._ends: list[tuple[int, list[Reply], int]] = []  # by turn: message count, `_replies`, and its length then
        self._turns = 0
        self._home: _Session | None = None  # session whose replica has this conversation's first tokens in its cache

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
            continues = 0  # a forked session: the tokens before are another session's
        self._begin_with(prompt_ids, continues)
        options = SamplingOptions(
            max_tokens=min(policy.max_tokens, room),
            temperature=policy.temperature,
            stop_token_ids=policy.stop_token_ids,
            seed=None if self._seed is None else turn_seed(self._seed, self._turns),
            priority=-self._turns,  # long conversations first, so that groups are complete sooner
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

    def resume(self, turns: Sequence[tuple[Observation, Reply]]) -> bool:
        """Take over a recorded conversation with its exact tokens; False if a reply has none."""
        if not all(reply.has_tokens for _, reply in turns):
            return False
        tokens: list[NDArray[np.int32]] = []
        for observation, reply in turns:
            self._messages += [*observation, reply.message]
            tokens = [*(tokens if reply.continues else []), reply.prompt_ids, reply.token_ids]
        self._prompt, self._sampled = np.concatenate(tokens[:-1]), tokens[-1]
        self._turns = len(turns)
        return True

    def fork(self, turns: int, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
        """Begin a conversation that continues this one's exact tokens after reply number `turns`, counted from 1."""
        messages, replies, count = self._ends[turns - 1]
        forked = _Session(self._policy, tools, seed)
        forked._messages = self._messages[:messages]
        tokens = [ids for reply in replies[:count] for ids in (reply.prompt_ids, reply.token_ids)]
        if tools != self._tools:
            first = next(end for end, rendered, _ in self._ends if rendered is replies)
            tokens[0] = np.array(self._policy.chat.render(self._messages[: first - 1], tools), np.int32)
        forked._prompt, forked._sampled = np.concatenate(tokens[:-1]), tokens[-1]
        forked._turns, forked._home = turns, self._home or self
        return forked

    def _next_prompt(self, observation: Observation) -> tuple[NDArray[np.int32], int]:
        """Build the next prompt and count its leading tokens that continue the conversation so far.

        The count is all tokens so far if the chat format can extend them, or 0 if the conversation had to be rendered
        again (a fork).
        """
        chat, sampled = self._policy.chat, self._sampled
        if sampled is None:
            return np.array(chat.render(self._messages, self._tools), np.int32), 0
        before, ids = self._prompt.tolist(), sampled.tolist()
        history = self._messages[: len(self._messages) - len(observation)]
        extended = chat.extend(before, ids, history, observation, self._tools)
        prompt = chat.render(self._messages, self._tools) if extended is None else extended
        before += ids
        if prompt[: len(before)] != before:
            return np.array(prompt, np.int32), 0
        added = np.array(prompt[len(before) :], np.int32)
        return np.concatenate([self._prompt, sampled, added]), len(before)

    def _begin_with(self, prompt_ids: NDArray[np.int32], continues: int) -> None:
        """Set the current prompt; the earlier replies' token arrays become views of it, to store each token once."""
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
