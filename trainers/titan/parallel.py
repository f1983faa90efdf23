"""The processes of one trainer: their ranks, how the model is sharded over them, and their collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.config.configs import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, FullAC, SelectiveAC
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.utils import set_spmd_backend

from forge_env.config.recipe import ParallelismSection
from trainers.losses import metrics as figures
from trainers.titan.context import Context

CHECKPOINTING: dict[str, type[ActivationCheckpointing]] = {"selective": SelectiveAC, "full": FullAC}


@dataclass(frozen=True, slots=True)
class Sharding:
    """Parallelism, activation checkpointing (`none`, `selective` or `full`) and compilation of a model's blocks."""

    dims: ParallelismSection = field(default_factory=ParallelismSection)
    activation_checkpoint: str = "none"
    compile: bool = False


class Ranks:
    """This process's rank among the processes of its trainer. A single process needs no process group."""

    def __init__(self, dims: ParallelismSection, device: torch.device) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.tensor_degree = dims.tensor_parallel_degree
        context_degree = dims.context_parallel_degree
        self.data_degree = self.size // (self.tensor_degree * context_degree)
        # TorchTitan treats ranks with different parts of a sequence like ranks with different parts of the batch.
        self._config = ParallelismConfig(
            data_parallel_shard_degree=self.data_degree * context_degree,
            tensor_parallel_degree=self.tensor_degree,
            spmd_backend="partial_dtensor",
        )
        self._dims: Any = None
        self.context: Context | None = None
        if self.size > 1:
            set_spmd_backend("partial_dtensor")
            self._dims = ParallelDims.from_config(self._config, self.size)
            self._dims.build_mesh()
        if context_degree > 1:
            shape, names = (self.data_degree, context_degree, self.tensor_degree), ("data", "context", "tensor")
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)["context"]
            self.context = Context(mesh.get_group(), mesh.get_local_rank(), context_degree)

    @property
    def alone(self) -> bool:
        """Whether this is the only process."""
        return self.size == 1

    @property
    def first(self) -> bool:
        """Whether this process is the first rank, which acts for all."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Index of this process's share of a batch, among `data_degree` shares."""
        return self.rank // (self.size // self.data_degree)

    @property
    def counts(self) -> bool:
        """Whether this process's metrics count: of ranks with the same data, only those of the first do."""
        return self.rank % (self.size // self.data_degree) == 0

    @property
    def row_multiple(self) -> int:
        """Divisor that the length of a row must have, since ranks split rows."""
        return self.tensor_degree * (1 if self.context is None else 2 * self.context.degree)

    @cached_property
    def saving_group(self) -> dist.ProcessGroup | None:
        """Process group for checkpoints, which are written while training continues; None for a single process.

        All ranks must access it for the first time together.
        """
        return None if self.alone else dist.new_group(backend="gloo")

    def parallelize(self, module: Any, shard: Callable[..., Any], sharding: Sharding, dtype: torch.dtype) -> None:
        """Checkpoint activations, compile, and shard with TorchTitan's function for the family, in place."""
        policy = CHECKPOINTING.get(sharding.activation_checkpoint)
        compile_config = CompileConfig(enable=sharding.compile, components=["model"])
        if self.alone:
            if policy is not None:
                policy(policy.Config()).apply(module)
            if sharding.compile:
                apply_compile(
                    module, compile_config=compile_config, parallel_dims=ParallelDims.from_config(self._config, 1)
                )
            return
        shard(
            module,
            parallel_dims=self._dims,
            training=TrainingConfig(mixed_precision_param=str(dtype).removeprefix("torch.")),
            parallelism=self._config,
            compile_config=compile_config,
            ac_config=None if policy is None else policy.Config(),
            dump_folder="",
        )
        if dist.get_backend() == "gloo":  # gloo has no reduction that also scales
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.set_force_sum_reduction_for_comms(True)

    def together(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Combine the metric shares of all ranks that count; the result is the same on every rank."""
        totals: dict[str, float] = {}
        for part in self.gather(dict(metrics) if self.counts else {}):
            figures.add(totals, part)
        return totals

    def gather(self, item: Any) -> list[Any]:
        """Gather an object from every rank, in rank order."""
        if self.alone:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item)
        return items


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather the shards of a tensor; every rank must call this for the same tensor."""
    if isinstance(tensor, DTensor):
        full: torch.Tensor = tensor.full_tensor()
        return full
    return tensor
