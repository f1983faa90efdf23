"""What plays an episode: a policy opens a session per episode, and the session answers turn by turn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forge_env.errors import ForgeError, InfrastructureError, UsageError
from forge_env.types import Message, Observation, Task, ToolSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from forge_env.environment.base import Environment

    IntArray = NDArray[np.int32]
    FloatArray = NDArray[np.float32]
    BoolArray = NDArray[np.bool_]


NO_TOKENS: Any = ()
"""Stands for an empty array where there are no token ids, so that numpy isn't needed there."""
TOKEN_FIELDS = ("prompt_ids", "token_ids", "logprobs", "versions")
BYTES_A_TOKEN = 4
"""Of UTF-8, where tokens are estimated."""


def estimated_tokens(text: str) -> int:
    """About how many tokens a text has: right for English and code, within a factor of two for other scripts."""
    return -(-len(text.encode("utf-8", "replace")) // BYTES_A_TOKEN)


def words_of(message: Message) -> str:
    """All that a message says: text, thoughts, calls."""
    calls = (call.function.name + call.function.arguments for call in message.tool_calls)
    return "".join([message.content, message.reasoning_content or "", *calls])


@dataclass(slots=True, eq=False)
class Reply:
    """One assistant turn. The token fields are empty where the endpoint gives no tokens; lists become arrays.

    A conversation's replies hold each token once: `prompt_ids` begins where the tokens of the turn before end.

    Attributes:
        message: what the model said, parsed (content, tool calls).
        prompt_ids: the tokens the model was conditioned on, without the first `continues` of them, int32 [P].
        token_ids: tokens the model sampled, int32 [N].
        logprobs: log-probability of each sampled token under the policy that sampled it, float32 [N].
        versions: policy version that sampled each token, int32 [N].
        stop_reason: "stop" (the model ended its turn), "length" or "content_filter".
        forked: the prompt does not continue the previous turn's tokens.
        metadata: JSON-ready facts worth recording: "usage", "latency_s", "attempts", ...
        continues: how many tokens the prompt has before `prompt_ids`: all of the turn before, prompt and sampled, or
            none (0: `prompt_ids` is the whole prompt).
        receipt: hash of the sampled tokens by whoever sampled them (`trainers.generator.receipt`), by which a trainer
            knows them again; None: nobody signs for them. It is not recorded.
    """

    message: Message
    prompt_ids: IntArray = NO_TOKENS
    token_ids: IntArray = NO_TOKENS
    logprobs: FloatArray = NO_TOKENS
    versions: IntArray = NO_TOKENS
    stop_reason: str = "stop"
    forked: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    continues: int = 0
    receipt: int | None = None

    def __post_init__(self) -> None:
        if self.has_tokens:
            import numpy as np

            self.prompt_ids, self.token_ids, self.versions = (
                np.asarray(values, np.int32) for values in (self.prompt_ids, self.token_ids, self.versions)
            )
            self.logprobs = np.asarray(self.logprobs, np.float32)
            if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
                counts = f"{len(self.token_ids)}, {len(self.logprobs)} and {len(self.versions)}"
                raise ValueError(f"{counts} sampled tokens, log-probs and versions in a reply: there is one of each")

    @property
    def has_tokens(self) -> bool:
        """Whether it says which tokens it was conditioned on, or sampled."""
        return bool(self.prompt_length or len(self.token_ids))

    @property
    def prompt_length(self) -> int:
        """Tokens the model was conditioned on."""
        return self.continues + len(self.prompt_ids)

    def follow(self, before: IntArray) -> IntArray:
        """Of a whole prompt, keep what it adds to `before`: the tokens of the turn before, prompt and sampled.

        Args:
            before: int32 [P].

        Returns:
            `before` of the next turn.
        """
        if not self.has_tokens:
            return before
        import numpy as np

        whole = np.concatenate([self.prompt_ids, self.token_ids])
        self.forked = not np.array_equal(self.prompt_ids[: len(before)], before)
        if not self.forked and len(before):
            self.continues, self.prompt_ids = len(before), self.prompt_ids[len(before) :].copy()
        return whole

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Reply):
            return NotImplemented
        return all(
            list(getattr(self, name)) == list(getattr(other, name))
            if name in TOKEN_FIELDS
            else getattr(self, name) == getattr(other, name)
            for name in self.__slots__
            if name != "receipt"  # no record has it
        )

    __hash__ = None  # type: ignore[assignment]


class LimitReached(ForgeError):
    """A policy's session says that a limit (tokens, cost, tool calls) ends the episode: it is truncated.

    The message is the limit's name. `reply` is the turn that went beyond; it is recorded and not acted on.
    """

    truncates = True

    def __init__(self, message: str, *, fix: str | None = None, reply: Reply | None = None) -> None:
        super().__init__(message, fix=fix)
        self.reply = reply


class PolicySession(ABC):
    """One conversation. It keeps the history, so that a turn passes only the messages that are new."""

    __slots__ = ()

    @abstractmethod
    async def reply(self, observation: Observation) -> Reply:
        """The assistant's answer to the new messages.

        Raises:
            ContextLengthExceeded: the conversation no longer fits; the episode is truncated.
            ChatFormatError: the model's chat format can't write the conversation; the episode is truncated.
            LimitReached: another limit; the episode is truncated.
            GeneratorError: forge-env could not ask the model; the episode is tried again. In an evaluation, one that
                the policy's own code raises is a crash of the agent.
        """

    def limit_reply(self, tokens: int) -> None:  # noqa: B027 - a session that can't be told ignores it
        """Let no further reply be longer than this. A session may ignore it: the limit then ends the episode after the
        reply that went beyond."""

    def fork(self, turns: int, *, seed: int | None = None) -> PolicySession | None:
        """A conversation that begins as this one did, to the end of its `turns`-th reply, and then goes its own way.

        Its `reply` is told only what comes after. Its first reply continues nothing: its whole prompt is in
        `prompt_ids`. None: this session can't, and another is opened, which is told all messages.

        Args:
            turns: replies of this session, at least one.
            seed: of what the new one samples.
        """
        return None

    def unanswered(self) -> InfrastructureError | None:
        """A time limit has just ended a reply. Why that is the fault of the infrastructure (an endpoint that did not
        answer), or None: the model took too long."""
        return None


class Policy:
    """Anything that can play: a generator, an endpoint, a script."""

    name: str = ""
    """What an evaluation records as the model; empty is the class's name."""

    def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
        """Open a conversation with these tools. One of this method and `session_inside` is a policy's own.

        Args:
            tools: that the conversation may call.
            seed: of sampling, where the policy samples.
        """
        name = type(self).__name__
        raise UsageError(f"{name} plays through run_episode only", fix=f"or define {name}.session")

    def session_inside(self, env: Environment, task: Task, *, seed: int | None = None) -> PolicySession:
        """Open a conversation for one episode. Scripted policies override this to see the environment and the task's
        hidden data; every other policy is given the tools alone.

        Args:
            env: the environment.
            task: with its hidden data.
            seed: of sampling, where the policy samples.
        """
        return self.session(env.tools, seed=seed)
