"""Throughput of a step: tokens per second, floating-point operations per second, and their share of the peak."""

from __future__ import annotations

from dataclasses import dataclass

from trainers.titan.device import Device
from trainers.titan.model import TitanModel


@dataclass(frozen=True, slots=True)
class Work:
    """Sizes of the work of a training step.

    Attributes:
        tokens: tokens of all sequences.
        targets: tokens to be learned.
        computed: tokens that the layers compute: what the sequences of a microbatch begin with counts once.
        attended: sum of squared lengths, without those of tokens that aren't computed.
    """

    tokens: int
    targets: int
    computed: int
    attended: int


class Throughput:
    """Counts the floating-point operations of a batch.

    A token costs 6 operations per parameter of the layers (2 forward, 4 backward; Kaplan et al. 2020). Attention adds
    6 * layers * heads * head_dim for each token of its sequence; layers with a sliding window are left out. A target
    token adds 6 per parameter of the head. If adapters are trained, the frozen weights have no gradients and cost 4
    instead of 6; adapters cost 6. Recomputed activations and padding don't count: this is model FLOPs utilisation (MFU,
    Chowdhery et al. 2022).
    """

    def __init__(self, model: TitanModel, device: Device) -> None:
        self._layers, self._head, self._attention = model.layer_parameters, model.head_parameters, model.attention_cost
        self._adapters = model.adapter_parameters
        self._ranks = model.ranks.size
        self._peak = device.peak_flops

    def flops(self, work: Work) -> float:
        """Floating-point operations of one forward and backward pass."""
        weights = self._layers * work.computed + self._head * work.targets
        trained = self._adapters * work.computed + self._attention * work.attended
        return (4.0 if self._adapters else 6.0) * weights + 6.0 * trained

    def metrics(self, work: Work, seconds: float) -> dict[str, float]:
        """Metrics of a step, all ranks together; `mfu` only if the hardware's peak is known."""
        rate = self.flops(work) / seconds
        metrics = {
            "tokens": float(work.tokens),
            "tokens_per_s": work.tokens / seconds,
            "tokens_shared": 1 - work.computed / work.tokens if work.tokens else 0.0,
            "tflops_per_s": rate / 1e12,
        }
        if self._peak is not None:
            metrics["mfu"] = rate / (self._peak * self._ranks)
        return metrics
