"""Requests to generators, their admission, results and errors."""

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
    """vLLM's engine has failed, or one of its processes died; this replica answers no further requests."""


class WeightsHeldError(GeneratorError):
    """This replica's weights are held for other callers; another replica has to serve the request."""


class WeightsOldError(GeneratorError):
    """This replica's weights are older than the request asks for; another replica has to serve it."""


class WeightsLostError(GeneratorError):
    """The replica whose weights were held died, so the held weights are lost."""


class WeightsDroppedError(GeneratorError):
    """The requested version is no longer available, usually because a newer one replaced it."""


@dataclass(slots=True)
class SamplingOptions:
    """How to sample one completion."""

    max_tokens: int = 256
    temperature: float = 1.0
    stop_token_ids: list[int] = field(default_factory=list)
    seed: int | None = None
    priority: int = 0
    """Requests with lower values run first when not all fit into the batch."""
    shaping: dict[str, Any] = field(default_factory=dict)
    """Further vLLM sampling parameters (`top_p`, ...); log-probabilities are of the distribution after they apply."""


@dataclass(slots=True)
class Completion:
    """One sampled completion with exact tokens; lists are converted to arrays.

    Attributes:
        prompt: the prompt's text, if the caller gave text.
        text: decoded text of the sampled tokens, if a tokenizer was available.
        prompt_ids: tokens conditioned on, int32 [P]; empty in a replica's reply, since the client has them.
        token_ids: sampled tokens including the stop token, int32 [N].
        logprobs: log-probability of each token under the weights that sampled it, float32 [N].
        versions: policy version of those weights, int32 [N].
        stop_reason: "stop", "length" or "abort".
        generator_version: policy version when the request ended.
        metadata: arbitrary data of the caller.
        tool_calls: parsed tool calls, if the caller parsed the reply.
        content: text besides the tool calls, if the caller parsed the reply.
        receipt: hash of the sampled tokens, computed by the engine (`trainers.generator.receipt`).
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

    def __reduce__(self) -> tuple[object, ...]:  # numpy's pickling is slower and adds two headers for each array
        arrays = [values.tobytes() for values in (self.prompt_ids, self.token_ids, self.logprobs)]
        versions = [values.tolist() for values in runs(self.versions)]
        return _received, (arrays, versions, [getattr(self, name) for name in self.__slots__[4:]])


def _received(arrays: list[bytes], versions: list[list[int]], rest: list[Any]) -> Completion:
    prompt_ids, token_ids = (np.frombuffer(data, np.int32).copy() for data in arrays[:2])
    return Completion(prompt_ids, token_ids, np.frombuffer(arrays[2], np.float32).copy(), _spread(*versions), *rest)


def _spread(versions: list[int], counts: list[int]) -> NDArray[np.int32]:
    """Repeat each version by its count, int32 [N]."""
    if len(versions) == 1:
        return _alone(versions[0], counts[0])
    return np.repeat(np.array(versions, np.int32), counts)


@lru_cache(maxsize=4096)
def _alone(version: int, count: int) -> NDArray[np.int32]:
    """Read-only array with one version, int32 [N]; completions of equal length share it, and nearly all have one."""
    return np.broadcast_to(np.array(version, np.int32), count)


class Hold:
    """Admission of requests by a replica: refuses them while its weights are held for others or older than requested.

    The replica itself decides, because clients in other processes may not know the state of its weights yet.
    """

    held = False

    def check(self, version: int, *, held: bool, at_least: int) -> None:
        """Accept a request that arrives at weights of this version, or raise; `held`: it is for held weights."""
        if self.held and not held:
            raise WeightsHeldError("the weights of this replica are held")
        if version < at_least:
            raise WeightsOldError(f"this replica has version {version}; version {at_least} is required")
