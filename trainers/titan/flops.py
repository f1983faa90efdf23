"""Throughput of a step: tokens per second, floating-point operations per second, and their share of the peak."""

from __future__ import annotations

from dataclasses import dataclass

from trainers.titan.device import Device
from trainers.titan.model import TitanModel


@dataclass(frozen=True, slots=True)
class Work:
    """Sizes of a training step: tokens of all sequences, target tokens, and tokens that the layers compute.

    What sequences of a microbatch begin with is computed once. `attended` is the sum of squared lengths, without those
    of tokens that aren't computed.
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
        self._model, self._peak = model, device.peak_flops

    def flops(self, work: Work) -> float:
        """Floating-point operations of one forward and backward pass."""
        model = self._model
        weights = model.layer_parameters * work.computed + model.head_parameters * work.targets
        trained = model.adapter_parameters * work.computed + model.attention_cost * work.attended
        return (4.0 if model.adapter_parameters else 6.0) * weights + 6.0 * trained

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
            metrics["mfu"] = rate / (self._peak * self._model.ranks.size)
        return metrics
