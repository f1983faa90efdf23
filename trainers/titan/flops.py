"""How fast a step was: tokens a second, floating-point operations a second, and their share of the hardware's."""

from __future__ import annotations

from collections.abc import Sequence

from trainers.titan.device import Device
from trainers.titan.model import TitanModel


class Throughput:
    """Counts the work of a batch.

    A token costs 6 operations per parameter (2 forward, 4 backward; Kaplan et al. 2020) plus those of attention,
    6 * layers * heads * head_dim a token before it. Recomputed activations and padding don't count: this is model
    FLOPs utilisation (MFU, Chowdhery et al. 2022).
    """

    def __init__(self, model: TitanModel, device: Device) -> None:
        self._parameters: int = model.parameters
        self._quadratic: float = model.quadratic_cost
        self._ranks = model.ranks.size
        self._peak = device.peak_flops

    def flops(self, lengths: Sequence[int]) -> float:
        """Floating-point operations of one forward and backward pass over sequences of these lengths."""
        return 6.0 * self._parameters * sum(length + self._quadratic * length**2 for length in lengths)

    def metrics(self, lengths: Sequence[int], seconds: float) -> dict[str, float]:
        """Of a step over these sequences, all ranks together; `mfu` where the hardware's peak is known."""
        tokens, rate = float(sum(lengths)), self.flops(lengths) / seconds
        metrics = {"tokens": tokens, "tokens_per_s": tokens / seconds, "tflops_per_s": rate / 1e12}
        if self._peak is not None:
            metrics["mfu"] = rate / (self._peak * self._ranks)
        return metrics
