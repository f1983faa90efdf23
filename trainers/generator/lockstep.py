"""One engine over several processes (tensor parallel): the first decides, the others do the same, step by step.

vLLM's external launcher gives every process an engine of its own. Fed the same requests in the same order between
the same steps, they schedule and sample alike, and meet only in the collectives of the model. So before each step
the first process sends the others its orders, what it admitted and aborted since the last one, and all step at once.
"""

from __future__ import annotations

import os
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
    """Seconds of the monotonic clock; of requests of one priority, vLLM serves the oldest first."""


@dataclass(frozen=True, slots=True)
class Abortion:
    """A request that leaves it."""

    request_id: str


Order = Admission | Abortion


def carry_out(engine: Any, orders: Sequence[Order], salt: str) -> dict[str, Exception]:
    """Do to vLLM's `engine` what was decided, between two of its steps.

    Args:
        engine: vLLM's.
        orders: what to do, in this order.
        salt: of the prefix cache, for the requests that are admitted.

    Returns:
        The requests that it refused, by id, and why: a prompt longer than the context, an option out of range.
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
    """vLLM's parameters of a request.

    Raises:
        ValueError: one is out of range; also vLLM's own `VLLMClientError`.
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


def name_rank(rank: int, local_rank: int) -> None:
    """Tell vLLM's external launcher who this process is, in the process group that exists already, and on its host."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    os.environ["RANK"], os.environ["LOCAL_RANK"] = str(rank), str(local_rank)
    place = (f"tcp://rank-{rank}:{rank}", rank, local_rank)
    ExecutorWithExternalLauncher._distributed_args = lambda self: place
