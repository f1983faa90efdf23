"""What plays an episode: a policy opens a session per episode, and the session answers turn by turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from forge_env.errors import ForgeError
from forge_env.types import Message, Observation, ToolSpec


@dataclass(slots=True)
class Reply:
    """One assistant turn. The token fields are empty where the endpoint gives no tokens.

    Attributes:
        message: what the model said, parsed (content, tool calls).
        prompt_ids: every token the model was conditioned on, [P].
        token_ids: tokens the model sampled, [N].
        logprobs: log-probability of each sampled token under the policy that sampled it, [N].
        versions: policy version that sampled each token, [N].
        stop_reason: "stop" (the model ended its turn) or "length".
        forked: the prompt does not continue the previous turn's tokens.
        metadata: JSON-ready facts worth recording: "usage", "latency_s", "attempts", ...
    """

    message: Message
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop_reason: str = "stop"
    forked: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)


class LimitReached(ForgeError):
    """A policy's session says that a limit (tokens, cost, tool calls) ends the episode: it is truncated.

    The message is the limit's name. `reply` is the turn that went beyond; it is recorded and not acted on.
    """

    def __init__(self, message: str, *, fix: str | None = None, reply: Reply | None = None) -> None:
        super().__init__(message, fix=fix)
        self.reply = reply


class PolicySession(Protocol):
    """One conversation. It keeps the history, so that a turn passes only the messages that are new."""

    async def reply(self, observation: Observation) -> Reply:
        """The assistant's answer to the new messages.

        Raises:
            ContextLengthExceeded: the conversation no longer fits; the episode is truncated.
            LimitReached: another limit; the episode is truncated.
            GeneratorError: the model could not be asked; the episode is tried again.
        """


class Policy(Protocol):
    """Anything that can play: a generator, an endpoint, a script."""

    def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
        """Open a conversation with these tools."""
