"""The reference model: what the KL term of a loss compares the policy with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_env.run.account import Account
from forge_env.run.clock import Reading, read_clock
from trainers.actors.actor import ForgeActor, concurrent_endpoint, endpoint

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from forge_env.trajectory import Segment


class ReferenceModel(ForgeActor):
    """A copy of the policy that is never trained, on a GPU or a CPU whatever the trainer runs on.

    It stays the checkpoint it was loaded from, or follows the policy (`load_version`).

    Args:
        folder: Hugging Face checkpoint folder with weights.
        max_length: longest row.
        microbatch_tokens: tokens in one forward pass.
        temperature: sampling temperature of the tokens it is shown.
        threads: CPU threads.
        dtype: precision of the arithmetic; weights are float32.
    """

    def __init__(
        self,
        folder: str,
        *,
        max_length: int,
        microbatch_tokens: int = 8192,
        temperature: float = 1.0,
        threads: int = 1,
        with_gpus: bool = False,
        dtype: str = "float32",
    ) -> None:
        self._folder = folder
        self._max_length = max_length
        self._microbatch_tokens = microbatch_tokens
        self._temperature = temperature
        self._threads = threads
        self._with_gpus = with_gpus
        self._dtype = dtype
        self._model: Any = None
        self._scorer: Any = None
        self._store: Any = None
        self._spans: list[tuple[str, float, float]] = []
        self._account = Account(
            "reference", "wait for calls", on_span=lambda _, doing, start, end: self._spans.append((doing, start, end))
        )

    @concurrent_endpoint
    async def get_account(self) -> tuple[dict[str, float], list[tuple[str, float, float]], Reading]:
        """Seconds by what was done; what was done when since the last call; what this process's clock says."""
        spans = self._spans[:]
        self._spans.clear()
        return self._account.seconds(), spans, read_clock()

    @endpoint
    async def setup(self) -> None:
        """Load the weights."""
        from trainers.titan.device import use_device
        from trainers.titan.model import TitanModel
        from trainers.titan.score import Scorer
        from trainers.weights.store import WeightStore

        device = use_device(self._with_gpus)
        self._model = TitanModel(self._folder, max_length=self._max_length, device=device.torch, dtype=self._dtype)
        self._scorer = Scorer(
            self._model,
            device=device,
            microbatch_tokens=self._microbatch_tokens,
            temperature=self._temperature,
            threads=self._threads,
        )
        self._model.module.requires_grad_(False)
        self._store = WeightStore()

    @endpoint
    async def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probability of every token but the first, [B, T] int64 -> [B, T - 1] float32 on the CPU."""
        import torch

        from forge_env.trajectory import Segment

        rows = [Segment(row, row >= 0) for row in tokens.cpu().numpy()]
        return torch.stack([torch.from_numpy(values) for values in self._scorer.logprobs(rows)])

    @endpoint
    async def score(self, buffer: Any, step: int) -> None:
        """Give the sequences that the buffer holds for `step` their `ref_logprobs`."""
        from trainers.titan.score import score

        with self._account.during("score"):
            await score(self._scorer, buffer, step)

    @endpoint
    async def logprobs(self, segments: list[Segment]) -> list[NDArray[np.float32]]:
        """Log-probabilities of the target tokens of each segment, float32 [N] each."""
        with self._account.during("score"):
            found: list[NDArray[np.float32]] = await asyncio.to_thread(self._scorer.logprobs, segments)
        return found

    @endpoint
    async def load_version(self, version: int) -> None:
        """Become policy `version`, which the weight store must still hold."""
        from trainers.weights.adapter import whole_weights

        with self._account.during("load weights"):
            published = await self._store.pull(version)
            self._model.load_hf(dict(whole_weights(published, Path(self._folder), everything=True)))
