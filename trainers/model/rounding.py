"""How much of a change of weights is left after rounding to fewer bits.

In bfloat16, neighbouring numbers differ by 0.4 to 0.8 %. A weight that training moved by less than half of that is
rounded back to its old value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Change:
    """Sums over the weights that training `changed`, of which rounding sets `reverted` back to the value before.

    `exact` is the sum of squares of the changes, `rounded` that of products of each and what rounding leaves of it.
    """

    changed: int = 0
    reverted: int = 0
    exact: float = 0.0
    rounded: float = 0.0

    def add(self, before: torch.Tensor, after: torch.Tensor, dtype: torch.dtype) -> None:
        """Add weights before and after their training, which are rounded to `dtype`."""
        exact = after.float() - before.float()
        rounded = after.to(dtype).float() - before.to(dtype).float()
        moved = exact != 0
        self.changed += int(moved.sum())
        self.reverted += int((moved & (rounded == 0)).sum())
        self.exact += float(exact.square().sum(dtype=torch.float64))
        self.rounded += float((exact * rounded).sum(dtype=torch.float64))

    @property
    def share(self) -> float:
        """The share of the change that rounding leaves: its projection on the exact one, about 0 to 1."""
        return self.rounded / self.exact if self.exact else 1.0
