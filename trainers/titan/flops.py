"""How fast a step was: tokens a second, floating-point operations a second, and their share of the hardware's."""

from __future__ import annotations

from collections.abc import Sequence

from trainers.titan.batch import TokenSequence
from trainers.titan.device import Device
from trainers.titan.model import TitanModel


class Throughput:
    """Counts the work of a batch.

    A token costs 6 operations per parameter of the layers (2 forward, 4 backward; Kaplan et al. 2020) plus those of
    attention, 6 * layers * heads * head_dim a token before it, and a token that is learned 6 per parameter of the head.
    Recomputed activations and padding don't count: this is model FLOPs utilisation (MFU, Chowdhery et al. 2022).
    """

    def __init__(self, model: TitanModel, device: Device) -> None:
        self._layers, self._head, self._attention = model.layer_parameters, model.head_parameters, model.attention_cost
        self._ranks = model.ranks.size
        self._peak = device.peak_flops

    def flops(self, sequences: Sequence[TokenSequence]) -> float:
        """Floating-point operations of one forward and backward pass over these sequences."""
        lengths = [len(sequence.token_ids) for sequence in sequences]
        learned = sum(len(sequence.target_positions) for sequence in sequences)
        attended = sum(length**2 for length in lengths)
        return 6.0 * (self._layers * sum(lengths) + self._head * learned + self._attention * attended)

    def metrics(self, sequences: Sequence[TokenSequence], seconds: float) -> dict[str, float]:
        """Of a step over these sequences, all ranks together; `mfu` where the hardware's peak is known."""
        tokens, rate = float(sum(len(sequence.token_ids) for sequence in sequences)), self.flops(sequences) / seconds
        metrics = {"tokens": tokens, "tokens_per_s": tokens / seconds, "tflops_per_s": rate / 1e12}
        if self._peak is not None:
            metrics["mfu"] = rate / (self._peak * self._ranks)
        return metrics
