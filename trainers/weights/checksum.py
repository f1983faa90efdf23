"""Checksums of weights that do not depend on how the weights are sharded, joined or padded.

A trainer has weights in shards; a generator joins layers into one matrix (queries, keys and values) and pads
vocabularies. The sum of the bits of all elements, modulo 2**64, is the same in both: sums of parts add up, and zeros
add nothing. The checksum detects changed values, but not two exchanged elements of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

MODULUS = 2**64
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 2**24
"""Elements converted at a time, so that a large tensor needs no second copy in memory."""

Sums = dict[str, int]
"""Checksums by tensor name."""


@dataclass(frozen=True, slots=True)
class Served:
    """Checksums of the weights that a generator serves.

    Attributes:
        version: policy version.
        taken: checksums of the published weights as received here; None if the weights were loaded from files.
        held: checksum of all weights that the first process of the engine computes with.
        whole: whether `held` must equal the sum of `taken`. False if the engine has several processes with a part of
            the weights each, adds adapters to its own weights, or stores experts in a kernel-specific order.
    """

    version: int
    taken: Sums | None
    held: int
    whole: bool

    @property
    def expected(self) -> int | None:
        """Expected value of `held`; None if unknown."""
        return None if self.taken is None or not self.whole else total(self.taken)


def checksum(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    """Sum of the bits of a tensor's elements; floating-point elements are converted to `dtype` first."""
    result, flat = 0, tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _AT_ONCE):
        part = flat[start : start + _AT_ONCE]
        result += int(bit_sum(part if dtype is None or not part.is_floating_point() else part.to(dtype)))
    return result % MODULUS


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The checksum of a tensor as an int64 scalar on its device, which the caller need not wait for."""
    flat = tensor.detach().reshape(-1).contiguous()
    return flat.view(_AS_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)


def read_sums(sums: Mapping[str, torch.Tensor]) -> Sums:
    """Read the results of `bit_sum` from their device, all at once."""
    values = torch.stack(list(sums.values())).tolist() if sums else []
    return {name: value % MODULUS for name, value in zip(sums, values, strict=True)}


def checksums(named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None) -> Sums:
    """Checksum of each tensor. Parts of a tensor with the same name are added up."""
    return together({name: checksum(tensor, dtype)} for name, tensor in named)


def together(parts: Iterable[Mapping[str, int]]) -> Sums:
    """Add up the checksums of several processes that each have parts of the tensors."""
    sums: Sums = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = (sums.get(name, 0) + value) % MODULUS
    return sums


def total(sums: Mapping[str, int]) -> int:
    """Checksum of all tensors together."""
    return sum(sums.values()) % MODULUS


def held_by(model: Any) -> int:
    """Checksum of all parameters of a module; shared parameters count once."""
    return total(checksums(model.named_parameters()))
