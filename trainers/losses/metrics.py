"""Combination of metrics of microbatches, minibatches and ranks: weighted means, and maxima of maxima."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

Scalar = TypeVar("Scalar", float, torch.Tensor)


def share_of(metrics: Mapping[str, Scalar], share: float) -> dict[str, Scalar]:
    """Contribution to the combined metrics of a part that is `share` of the whole."""
    return {name: value if name.endswith("_max") else value * share for name, value in metrics.items()}


def add(totals: dict[str, float], metrics: Mapping[str, float]) -> None:
    """Add a part's contribution to `totals`."""
    for name, value in metrics.items():
        if name.endswith("_max"):
            totals[name] = max(totals.get(name, value), value)
        else:
            totals[name] = totals.get(name, 0.0) + value


def to_floats(parts: Sequence[Mapping[str, torch.Tensor]]) -> list[dict[str, float]]:
    """Values of scalar tensors, read with a single device synchronization."""
    scalars = [value.detach().reshape(()).float() for metrics in parts for value in metrics.values()]
    values = iter(torch.stack(scalars).tolist() if scalars else [])
    return [{name: next(values) for name in metrics} for metrics in parts]
