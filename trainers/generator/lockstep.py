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
    """A request that enters the batch."""

    request_id: str
    prompt_ids: NDArray[np.int32]
    options: SamplingOptions
    arrived: float
    """Time of arrival in seconds of the monotonic clock; vLLM serves the oldest request of a priority first."""


@dataclass(frozen=True, slots=True)
class Abortion:
    """A request that leaves the batch before its end."""

    request_id: str


Order = Admission | Abortion


def carry_out(engine: Any, orders: Sequence[Order], salt: str) -> dict[str, Exception]:
    """Apply orders to vLLM's engine between two steps.

    Args:
        engine: vLLM's engine.
        orders: admissions and abortions, in the order to apply.
        salt: salt of the prefix cache for admitted requests.

    Returns:
        Errors of the requests that vLLM refused, by id, such as a prompt longer than the context or an option out of
        range.
    """
    from vllm.exceptions import VLLMClientError

    refused: dict[str, Exception] = {}
    for order in orders:
        if isinstance(order, Abortion):
            engine.abort_request([order.request_id])
            continue
        try:
            _admit(engine, order, salt)
        except (ValueError, TypeError, VLLMClientError) as error:
            refused[order.request_id] = error
    return refused


def _admit(engine: Any, order: Admission, salt: str) -> None:
    prompt = {"prompt_token_ids": order.prompt_ids.tolist(), "cache_salt": salt}
    options = order.options
    engine.add_request(
        order.request_id, prompt, sampling_params(options), arrival_time=order.arrived, priority=options.priority
    )


def sampling_params(options: SamplingOptions) -> Any:
    """Convert options to vLLM's `SamplingParams`.

    Raises:
        ValueError: a value is out of range. vLLM may raise `VLLMClientError` instead.
    """
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
