"""The reference model, which the KL term of a loss compares the policy with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from forge_env.errors import InfrastructureError
from forge_env.run.account import Account
from forge_env.run.clock import Reading, read_clock
from trainers.actors.actor import concurrent_endpoint
from trainers.actors.processes import leave_as_it_stands
from trainers.actors.ranks import LedActor

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from forge_env.trajectory import Segment
    from trainers.buffer.sequences import Computed
    from trainers.weights.transport import Published

T = TypeVar("T")


class ReferenceModel(LedActor):
    """A copy of the policy that is never trained, on a GPU or a CPU regardless of the trainer's device.

    It keeps the weights of the checkpoint it was loaded from, or follows the policy (`load_weights`). With several
    processes, each holds a part of the weights (FSDP). Concurrent calls are processed one after the other.

    Arguments as for `TitanTrainer` and `Scorer`; `temperature` is the one that the scored tokens were sampled at.
    """

    def __init__(
        self,
        folder: str,
        *,
        max_length: int,
        microbatch_tokens: int = 8192,
        share_prefixes: bool = True,
        temperature: float = 1.0,
        threads: int = 1,
        with_gpus: bool = False,
        dtype: str = "float32",
    ) -> None:
        self._folder = folder
        self._options: dict[str, Any] = {"max_length": max_length, "dtype": dtype}
        self._passes: dict[str, Any] = {
            "microbatch_tokens": microbatch_tokens,
            "share_prefixes": share_prefixes,
            "temperature": temperature,
            "threads": threads,
        }
        self._with_gpus = with_gpus
        self._model: Any = None
        self._scorer: Any = None
        self._weights: Any = None
        self._one_at_a_time = asyncio.Lock()
        self._spans: list[tuple[str, float, float]] = []
        self._account = Account(
            "reference", "wait for calls", on_span=lambda _, doing, start, end: self._spans.append((doing, start, end))
        )

    @concurrent_endpoint
    async def get_account(self) -> tuple[dict[str, float], list[tuple[str, float, float]], Reading]:
        """Seconds by activity, activities since the last call with start and end, and a reading of this clock."""
        spans = self._spans[:]
        self._spans.clear()
        return self._account.seconds(), spans, read_clock()

    async def _in_turn(self, doing: str, own: Callable[..., Awaitable[T]], endpoint: str, *args: Any) -> T:
        """Run `own` here and `endpoint` in the other processes, after all earlier calls."""
        async with self._one_at_a_time:
            with self._account.during(doing):
                return await self.with_followers(own(*args), endpoint, *args)

    @concurrent_endpoint
    async def setup(self) -> None:
        """Load the weights."""
        await self._in_turn("wait for calls", self._setup, "setup")

    async def _setup(self) -> None:
        leave_as_it_stands()
        from trainers.titan.device import use_device

        device = use_device(self._with_gpus)
        from trainers.titan.model import TitanModel
        from trainers.titan.score import Scorer
        from trainers.weights.reader import Reader

        self._model = TitanModel(self._folder, device=device.torch, **self._options)
        self._scorer = Scorer(self._model, device=device, **self._passes)
        self._model.module.requires_grad_(False)
        self._weights = Reader()

    @concurrent_endpoint
    async def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probability of every token but the first, [B, T] int64 -> [B, T - 1] float32 on the CPU."""
        import torch

        from forge_env.trajectory import Segment

        rows = [Segment(row, row >= 0) for row in tokens.cpu().numpy()]
        scored = await self._in_turn("score", self._logprobs, "logprobs", rows)
        return torch.stack([torch.from_numpy(values) for values in scored])

    @concurrent_endpoint
    async def logprobs(self, segments: list[Segment]) -> list[NDArray[np.float32]]:
        """Log-probabilities of the target tokens of each segment, float32 [N] each."""
        return await self._in_turn("score", self._logprobs, "logprobs", segments)

    async def _logprobs(self, segments: list[Segment]) -> list[NDArray[np.float32]]:
        result: list[NDArray[np.float32]] = await asyncio.to_thread(self._scorer.logprobs, segments)
        return result

    @concurrent_endpoint
    async def score(self, buffer: Any, step: int, computed: Computed = "all") -> None:
        """Set `ref_logprobs` of the `computed` segments of `step`."""
        from trainers.titan.score import score

        await self._in_turn("score", partial(score, self._scorer), "score", buffer, step, computed)

    @concurrent_endpoint
    async def load_weights(self, published: Published) -> None:
        """Load weights that the trainer has published and not yet replaced."""
        await self._in_turn("load weights", self._load_weights, "load_weights", published)

    async def _load_weights(self, published: Published) -> None:
        from trainers.model.merging import whole_weights

        try:
            weights = await self._weights.take(published)
        except OSError as error:
            raise InfrastructureError(f"the published weights can't be fetched: {error}") from error
        self._model.load_hf(dict(whole_weights(weights, Path(self._folder), everything=True)))
