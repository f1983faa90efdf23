"""Tensor parallelism over several processes: the first process decides, and the others repeat each of its steps.

vLLM's external launcher gives every process a separate engine. Engines that receive the same requests in the same order
between the same steps schedule and sample alike, and communicate only in the model's collectives. So before each step
the first process sends the others its orders (requests admitted and aborted since the last step); then all step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainers.generator.types import SamplingOptions


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that enters the batch; of each priority, vLLM serves the oldest first."""

    request_id: str
    prompt_ids: NDArray[np.int32]
    options: SamplingOptions
    arrived: float
    """Seconds of the monotonic clock."""


@dataclass(frozen=True, slots=True)
class Abortion:
    """A request that leaves the batch before its end."""

    request_id: str


Order = Admission | Abortion


def carry_out(engine: Any, orders: Sequence[Order], salt: str) -> dict[str, Exception]:
    """Apply orders to vLLM's engine between two steps; returns the errors of the requests that vLLM refused, by id.

    It refuses, for example, a prompt longer than the context, or an option out of range.
    """
    from vllm.exceptions import VLLMClientError

    refused: dict[str, Exception] = {}
    for order in orders:
        if isinstance(order, Abortion):
            engine.abort_request([order.request_id])
            continue
        prompt = {"prompt_token_ids": order.prompt_ids.tolist(), "cache_salt": salt}
        times = {"arrival_time": order.arrived, "priority": order.options.priority}
        try:
            engine.add_request(order.request_id, prompt, sampling_params(order.options), **times)
        except (ValueError, TypeError, VLLMClientError) as error:
            refused[order.request_id] = error
    return refused


def sampling_params(options: SamplingOptions) -> Any:
    """Convert options to vLLM's `SamplingParams`; a value out of range raises ValueError or `VLLMClientError`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=False,
        stop_token_ids=options.stop_token_ids,
        seed=options.seed,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **options.shaping,
    )
