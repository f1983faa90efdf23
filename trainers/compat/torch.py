"""torch: the class of gloo process groups, and functions of DTensor and of checkpoints that have no public name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from trainers.compat import Package

PACKAGE = Package("torch", ("2.13.0",))
_function = cache(PACKAGE.function)


def replace_gloo(group: type) -> None:
    """Make `group`, a subclass of `ProcessGroupGloo`, the class of gloo groups that this process creates from now on.

    Raises:
        ChangedPackageError: torch has no such class.
    """
    PACKAGE.replace("torch.distributed.distributed_c10d:ProcessGroupGloo", group)


def offset_of_shard(tensor: Any) -> tuple[int, ...]:
    """First index of this rank's shard of a DTensor, in each dimension."""
    locate = _function(
        "torch.distributed.tensor._utils:compute_local_shape_and_global_offset", "global_shape", "mesh", "placements"
    )
    _, offset = locate(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset)


def set_element(state: dict[str, Any], path: Sequence[str | int], value: Any) -> None:
    """Set a value in nested dictionaries and lists, as checkpoints name it."""
    _function("torch.distributed.checkpoint._traverse:set_element", "root_dict", "path", "value")(state, path, value)
