"""What a generator is asked and what it answers."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_env.errors import GeneratorError
from forge_env.trajectory import runs
from forge_env.types import ToolCall


class EngineFailedError(GeneratorError):
    """vLLM's engine has failed, or a process of it died: this replica answers no request any more."""


class WeightsHeldError(GeneratorError):
    """This replica's weights are held for others: ask another replica."""


class WeightsOldError(GeneratorError):
    """This replica doesn't have the weights yet that a request asks for: ask another replica."""


class WeightsLostError(GeneratorError):
    """The replica whose weights were held is gone, and they with it."""


class WeightsDroppedError(GeneratorError):
    """The version that was to be pulled is not in the store any more: a newer one is."""


@dataclass(slots=True)
class SamplingOptions:
    """How to sample one completion."""

    max_tokens: int = 256
    temperature: float = 1.0
    stop_token_ids: list[int] = field(default_factory=list)
    seed: int | None = None
    priority: int = 0
    """Lower goes first where more wait than fit into the batch."""
    shaping: dict[str, Any] = field(default_factory=dict)
    """Further parameters of vLLM's sampling (`top_p`, ...). The log-probabilities are of the distribution they make."""


@dataclass(slots=True)
class Completion:
    """One sampled completion with exact tokens; lists become arrays.

    Attributes:
        prompt: the prompt's text, where the caller gave text.
        text: what the sampled tokens spell, where a tokenizer was at hand.
        prompt_ids: tokens conditioned on, int32 [P]; none in a replica's answer, since whoever asked has them.
        token_ids: tokens sampled, the stop token included, int32 [N].
        logprobs: log-probability of each under the weights that sampled it, float32 [N].
        versions: policy version of those weights, int32 [N].
        stop_reason: "stop", "length" or "abort".
        generator_version: policy version when the request ended.
        metadata: whatever the caller wants to keep with it.
        tool_calls: parsed tool calls, where the caller parsed.
        content: text besides tool calls, where the caller parsed.
        receipt: hash of the sampled tokens, made where they were sampled (`trainers.generator.receipt`).
    """

    prompt_ids: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    stop_reason: str
    generator_version: int
    prompt: str | None = None
    text: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tool_calls: list[ToolCall] = field(default_factory=list)
    content: str | None = None
    receipt: int | None = None

    def __post_init__(self) -> None:
        self.prompt_ids, self.token_ids, self.versions = (
            np.asarray(values, np.int32) for values in (self.prompt_ids, self.token_ids, self.versions)
        )
        self.logprobs = np.asarray(self.logprobs, np.float32)
        self.stop_reason = sys.intern(self.stop_reason)

    def __reduce__(self) -> tuple[object, ...]:  # numpy's own way takes longer, and has two headers for each array
        arrays = [values.tobytes() for values in (self.prompt_ids, self.token_ids, self.logprobs)]
        versions = [values.tolist() for values in runs(self.versions)]
        return _received, (arrays, versions, [getattr(self, name) for name in self.__slots__[4:]])


def _received(arrays: list[bytes], versions: list[list[int]], rest: list[Any]) -> Completion:
    prompt_ids, token_ids = (np.frombuffer(data, np.int32).copy() for data in arrays[:2])
    return Completion(prompt_ids, token_ids, np.frombuffer(arrays[2], np.float32).copy(), _spread(*versions), *rest)


def _spread(versions: list[int], counts: list[int]) -> NDArray[np.int32]:
    """Each version as often as counted, int32 [N]."""
    if len(versions) == 1:
        return _alone(versions[0], counts[0])
    return np.repeat(np.array(versions, np.int32), counts)


@lru_cache(maxsize=4096)
def _alone(version: int, count: int) -> NDArray[np.int32]:
    """The versions of nearly all completions, which share one array where they have one length; it can't be written."""
    return np.broadcast_to(np.array(version, np.int32), count)
