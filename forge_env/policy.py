"""What plays an episode: a policy opens a session per episode, and the session answers turn by turn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forge_env.errors import ForgeError, InfrastructureError
from forge_env.types import Message, Observation, Task, ToolSpec

if TYPE_CHECKING:
    from forge_env.environment.base import Environment


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


class PolicySession(ABC):
    """One conversation. It keeps the history, so that a turn passes only the messages that are new."""

    @abstractmethod
    async def reply(self, observation: Observation) -> Reply:
        """The assistant's answer to the new messages.

        Raises:
            ContextLengthExceeded: the conversation no longer fits; the episode is truncated.
            LimitReached: another limit; the episode is truncated.
            GeneratorError: the model could not be asked; the episode is tried again.
        """

    def limit_reply(self, tokens: int) -> None:  # noqa: B027 - a session that can't be told ignores it
        """Let no further reply be longer than this. A session may ignore it: the limit then ends the episode after the
        reply that went beyond."""

    def unanswered(self) -> InfrastructureError | None:
        """A time limit has just ended a reply. Why that is the fault of the infrastructure (an endpoint that did not
        answer), or None: the model took too long."""
        return None


class Policy(ABC):
    """Anything that can play: a generator, an endpoint, a script."""

    name: str = ""
    """What an evaluation records as the model; empty is the class's name."""

    @abstractmethod
    def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
        """Open a conversation with these tools."""

    def session_inside(self, env: Environment, task: Task, *, seed: int | None = None) -> PolicySession:
        """Open a conversation for one episode. Scripted policies override this to see the environment and the task's
        hidden data; every other policy is given the tools alone."""
        return self.session(env.tools, seed=seed)
