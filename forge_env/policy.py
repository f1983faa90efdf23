"""Policies, which play episodes: a policy opens a session per episode, and the session answers turn by turn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextvars import ContextVar
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
"""Placeholder for an empty array of tokens, so that numpy needn't be imported."""
TOKEN_FIELDS = ("prompt_ids", "token_ids", "logprobs", "versions")
BYTES_A_TOKEN = 4
"""Bytes of UTF-8 per token, for estimates."""


def estimated_tokens(text: str) -> int:
    """Estimate the number of tokens of a text: good for English and code, within a factor of two for other scripts."""
    return -(-len(text.encode("utf-8", "replace")) // BYTES_A_TOKEN)


def words_of(message: Message) -> str:
    """Text of a message including its reasoning and tool calls."""
    calls = (call.function.name + call.function.arguments for call in message.tool_calls)
    return "".join([message.content, message.reasoning_content or "", *calls])


@dataclass(slots=True, eq=False)
class Reply:
    """One assistant turn. The token fields are empty if the endpoint returns no tokens; lists are converted to arrays.

    The replies of a conversation store each token once: `prompt_ids` begins after the tokens of the previous turn.

    Attributes:
        message: the model's parsed output (content, tool calls).
        prompt_ids: the tokens the model was conditioned on, without the first `continues` of them, int32 [P].
        token_ids: tokens the model sampled, int32 [N].
        logprobs: log-probability of each sampled token under the policy that sampled it, float32 [N].
        versions: policy version that sampled each token, int32 [N].
        stop_reason: "stop" (the model ended its turn), "length" (a limit of tokens cut it) or "content_filter".
        forked: the prompt does not continue the previous turn's tokens.
        metadata: JSON-ready facts worth recording: "usage", "latency_s", "attempts", ...
        continues: number of prompt tokens before `prompt_ids`: all tokens of the previous turn, prompt and sampled, or
            0 if `prompt_ids` is the whole prompt.
        receipt: hash of the sampled tokens made by the generator (`trainers.generator.receipt`), with which a trainer
            verifies them; None if there is none. It is not recorded.
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
                raise ValueError(
                    f"a reply has {counts} sampled tokens, log-probs and versions; they must be equally many"
                )

    @property
    def was_cut(self) -> bool:
        """Whether a limit of tokens ended the reply before the model did."""
        return self.stop_reason == "length"

    @property
    def has_tokens(self) -> bool:
        """Whether prompt or sampled tokens are known."""
        return bool(self.prompt_length or len(self.token_ids))

    @property
    def prompt_length(self) -> int:
        """Number of tokens the model was conditioned on."""
        return self.continues + len(self.prompt_ids)

    def follow(self, before: IntArray) -> IntArray:
        """Remove from a whole prompt the tokens of the previous turn, or mark the reply as forked if they differ.

        Args:
            before: prompt and sampled tokens of the previous turn, int32 [P].

        Returns:
            `before` for the next turn.
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
            if name != "receipt"  # not recorded
        )

    __hash__ = None  # type: ignore[assignment]


class LimitReached(ForgeError):
    """Raised by a policy's session when a limit (tokens, cost, tool calls) truncates the episode.

    The message is the limit's name. `reply` is the turn that exceeded it: it is recorded but not executed.
    """

    truncates = True

    def __init__(self, message: str, *, fix: str | None = None, reply: Reply | None = None) -> None:
        super().__init__(message, fix=fix)
        self.reply = reply


class PolicySession(ABC):
    """One conversation. The session stores the history, so each turn passes only the new messages."""

    __slots__ = ()

    @abstractmethod
    async def reply(self, observation: Observation) -> Reply:
        """Return the assistant's answer to the new messages.

        Raises:
            ContextLengthExceeded: the conversation no longer fits; the episode is truncated.
            ChatFormatError: the model's chat format can't write the conversation; the episode is truncated.
            LimitReached: another limit; the episode is truncated.
            GeneratorError: forge-env could not query the model; the episode is retried. If the policy's own code raises
                it, an evaluation counts it as a crash of the agent.
        """

    def limit_reply(self, tokens: int) -> None:  # noqa: B027 - sessions without a limit ignore it
        """Limit the tokens of further replies. If a session ignores this, the episode ends after the reply that exceeds
        the limit."""

    def fork(self, turns: int, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession | None:
        """Branch the conversation: the new session shares the history up to the end of the `turns`-th reply.

        Its `reply` receives only later messages. Its first reply has `continues == 0`, with the whole prompt in
        `prompt_ids`.

        Args:
            turns: number of this session's replies to share, at least one.
            tools: tools that the model may call in the new session. If they are not this session's, the prompt of its
                first reply is rendered anew, and the tokens after it are shared.

        Returns:
            The new session, or None if branching is not supported. The caller then opens a new session and sends it all
            messages.
        """
        return None

    def resume(self, turns: Sequence[tuple[Observation, Reply]]) -> bool:
        """Take over a conversation that another session began, before the first reply of this one.

        Returns:
            Whether the session now has this history, with the exact tokens. If not, the caller sends the messages as
            part of the first observation.
        """
        return False

    def unanswered(self) -> InfrastructureError | None:
        """Explain a reply that has just timed out.

        Returns:
            The error if the infrastructure is at fault (an endpoint that did not answer), or None if the model took too
            long.
        """
        return None


READS_IMAGES: ContextVar[bool] = ContextVar("READS_IMAGES", default=True)
"""Whether the policy of the episode that is being reset reads images."""


class Policy:
    """Base class of everything that can play episodes: a generator, an endpoint, a script."""

    name: str = ""
    """Model name recorded by evaluations; if empty, the class's name."""
    reads_images: bool = True
    """Whether it may be shown images; programs are told if it may not."""

    def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
        """Open a conversation. A policy overrides this method or `session_inside`.

        Args:
            tools: tools that the model may call.
            seed: sampling seed, if the policy samples.
        """
        name = type(self).__name__
        raise UsageError(f"{name} works only in run_episode", fix=f"use run_episode, or define {name}.session")

    def session_inside(self, env: Environment, task: Task, *, seed: int | None = None) -> PolicySession:
        """Open a conversation for one episode. Scripted policies override this to access the environment and the task's
        hidden data; by default a policy gets only the tools.

        Args:
            env: the environment.
            task: the task, including its hidden data.
            seed: sampling seed, if the policy samples.
        """
        return self.session(env.tools, seed=seed)
