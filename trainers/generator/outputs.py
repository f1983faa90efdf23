"""What vLLM's engine has sampled: of requests that have ended, and of those that have not.

vLLM is asked for the output of a request once, at its end: an object for every token of every request costs a tenth of
all time with a small model. It keeps the tokens meanwhile, and which weights sampled them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

import numpy as np

from trainers.generator.types import Completion


def fill(completion: Completion, output: Any) -> None:
    """Take tokens, log-probs and versions from a vLLM `CompletionOutput`."""
    _take(completion, output.token_ids, output.logprobs, output.weight_versions or ())


def fill_unfinished(completion: Completion, engine: Any, request_id: str) -> None:
    """The same of a request under way, from what vLLM's `engine` holds of it."""
    for state in _under_way(engine):
        if state.external_req_id == request_id:
            spans = state._weight_version_spans() or ()
            _take(completion, state.detokenizer.output_token_ids, state.logprobs_processor.logprobs, spans)


def count_unfinished(engine: Any, wanted: Container[str]) -> int:
    """Tokens that those requests under way have sampled so far."""
    return sum(state.detokenizer.num_output_tokens() for state in _under_way(engine) if state.external_req_id in wanted)


def _under_way(engine: Any) -> list[Any]:
    # a copy, since a step in another thread ends requests
    return list(engine.output_processor.request_states.values())


def _take(completion: Completion, token_ids: Sequence[int], logprobs: Any, spans: Iterable[Any]) -> None:
    completion.token_ids = np.array(token_ids, np.int32)
    completion.logprobs = np.array(logprobs.logprobs, np.float32)
    versions = np.array([(span.version, span.end - span.start) for span in spans], np.int32).reshape(-1, 2)
    completion.versions = np.repeat(versions[:, 0], versions[:, 1])
