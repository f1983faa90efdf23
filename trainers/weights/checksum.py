"""Checksums of weights that are the same wherever the weights are, and however they are cut, joined or padded there.

A trainer has weights in shards, a generator has layers joined into one matrix (queries, keys and values) and padded
vocabularies. The sum of the bits of all elements, modulo 2**64, is the same for all of them: it adds up over parts, and
zeros add nothing. That also means it doesn't see two elements of one tensor exchanged; that values differ it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

MODULUS = 2**64
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 2**24
"""Elements that are widened at once, so that a large tensor needs no memory of its size."""

Sums = dict[str, int]
"""By tensor."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a generator has.

    Attributes:
        version: of the policy.
        taken: checksums of what was published, as it can be taken from here; None: nothing was, it was loaded from
            files.
        held: of all weights that the engine computes with, of its first process.
        whole: whether that is the sum of what was taken: not in one of several processes, which holds a part of it, nor
            where the engine adds adapters to weights of its own, or keeps experts in an order of their kernel's.
    """

    version: int
    taken: Sums | None
    held: int
    whole: bool

    @property
    def expected(self) -> int | None:
        """What `held` has to be; None: nobody knows."""
        return None if self.taken is None or not self.whole else total(self.taken)


def checksum(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    """Sum of the bits of a tensor's elements, of floating-point ones as they are in `dtype`."""
    found, flat = 0, tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _AT_ONCE):
        part = flat[start : start + _AT_ONCE]
        if dtype is not None and part.is_floating_point():
            part = part.to(dtype)
        found += int(part.contiguous().view(_AS_INTEGERS[part.element_size()]).sum(dtype=torch.int64))
    return found % MODULUS


def checksums(named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None) -> Sums:
    """Of tensors, or of parts of tensors, which add up."""
    found: Sums = {}
    for name, tensor in named:
        found[name] = (found.get(name, 0) + checksum(tensor, dtype)) % MODULUS
    return found


def together(parts: Iterable[Mapping[str, int]]) -> Sums:
    """Of tensors of which several processes have parts."""
    found: Sums = {}
    for part in parts:
        for name, value in part.items():
            found[name] = (found.get(name, 0) + value) % MODULUS
    return found


def total(sums: Mapping[str, int]) -> int:
    """Of all tensors together."""
    return sum(sums.values()) % MODULUS


def held_by(model: Any) -> int:
    """Of all parameters of a module; those that share memory count once."""
    return total(checksums(model.named_parameters()))
