"""Throughput of a step: tokens per second, floating-point operations per second, and their share of the peak."""

from __future__ import annotations

from trainers.buffer.sequences import BatchSizes
from trainers.titan.device import Device
from trainers.titan.model import TitanModel


class Throughput:
    """Counts the floating-point operations of a batch.

    A token costs 6 operations per parameter of the layers (2 forward, 4 backward; Kaplan et al. 2020). Attention adds
    6 * layers * heads * head_dim for each token of its sequence. A target token adds 6 per parameter of the head. If
    adapters are trained, the frozen weights have no gradients and cost 4 instead of 6; adapters cost 6. Recomputed
    activations and padding don't count: this is model FLOPs utilisation (MFU, Chowdhery et al. 2022).
    """

    def __init__(self, model: TitanModel, device: Device) -> None:
        self._layers, self._head, self._attention = model.layer_parameters, model.head_parameters, model.attention_cost
        self._adapters = model.adapter_parameters
        self._ranks = model.ranks.size
        self._peak = device.peak_flops

    def flops(self, sizes: BatchSizes) -> float:
        """Floating-point operations of one forward and backward pass over a batch's sequences."""
        lengths = sizes.lengths.astype(float)
        tokens, attended = float(lengths.sum()), float((lengths**2).sum())
        weights = self._layers * tokens + self._head * float(sizes.targets.sum())
        trained = self._adapters * tokens + self._attention * attended
        return (4.0 if self._adapters else 6.0) * weights + 6.0 * trained

    def metrics(self, sizes: BatchSizes, seconds: float) -> dict[str, float]:
        """Metrics of a step over a batch, all ranks together; `mfu` only if the hardware's peak is known."""
        tokens, rate = float(sizes.lengths.sum()), self.flops(sizes) / seconds
        metrics = {"tokens": tokens, "tokens_per_s": tokens / seconds, "tflops_per_s": rate / 1e12}
        if self._peak is not None:
            metrics["mfu"] = rate / (self._peak * self._ranks)
        return metrics
