"""torch: functions of DTensor and of distributed checkpoints that have no public name."""

from __future__ import annotations

from trainers.compat import Package

PACKAGE = Package("torch", ("2.13.0",))

set_element = PACKAGE.function("torch.distributed.checkpoint._traverse:set_element", "root_dict", "path", "value")
"""`set_element(root_dict, path, value)`: set a value in nested dictionaries and lists."""
compute_local_shape_and_global_offset = PACKAGE.function(
    "torch.distributed.tensor._utils:compute_local_shape_and_global_offset", "global_shape", "mesh", "placements"
)
"""`(global_shape, mesh, placements) -> (shape, offset)` of this rank's shard of a DTensor."""
