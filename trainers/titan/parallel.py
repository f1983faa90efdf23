"""The processes of one trainer: who they are, how the model is sharded over them, what they gather."""

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

CHECKPOINTING: dict[str, type[ActivationCheckpointing] | None] = {
    "none": None,
    "selective": SelectiveAC,
    "full": FullAC,
}


@dataclass(frozen=True, slots=True)
class Sharding:
    """What is done to the model besides building it.

    Attributes:
        dims: degrees of the parallelisms.
        activation_checkpoint: `none`, `selective` or `full`.
        compile: compile each transformer block.
    """

    dims: ParallelismSection = field(default_factory=ParallelismSection)
    activation_checkpoint: str = "none"
    compile: bool = False


class Ranks:
    """This process among the processes of its trainer. Alone, it needs no process group."""

    def __init__(self, dims: ParallelismSection, device: torch.device) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.tensor_degree = dims.tensor_parallel_degree
        context_degree = dims.context_parallel_degree
        self.data_degree = self.size // (self.tensor_degree * context_degree)
        # To TorchTitan a rank with another part of the sequences is one with another part of the batch.
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
        """Whether this process speaks for all."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Which of the `data_degree` shares of a batch is this process's."""
        return self.rank // (self.size // self.data_degree)

    @property
    def counts(self) -> bool:
        """Whether this process's metrics are its own: of ranks with the same data, the first counts."""
        return self.rank % (self.size // self.data_degree) == 0

    @property
    def row_multiple(self) -> int:
        """What the length of a row must be a multiple of, since ranks split it."""
        return self.tensor_degree * (1 if self.context is None else 2 * self.context.degree)

    @cached_property
    def saving_group(self) -> dist.ProcessGroup | None:
        """A process group for checkpoints alone, which are written beside training; None where there is one process.

        All ranks must ask for it for the first time together.
        """
        return None if self.alone else dist.new_group(backend="gloo")

    def parallelize(self, module: Any, shard: Callable[..., Any], sharding: Sharding, dtype: torch.dtype) -> None:
        """Checkpoint activations, compile, and shard with TorchTitan's function for the family, in place."""
        policy = CHECKPOINTING[sharding.activation_checkpoint]
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
        if dist.get_backend() == "gloo":  # it has no reduction that scales on the way
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.set_force_sum_reduction_for_comms(True)

    def together(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Metrics of the whole from the shares of the ranks that count, the same everywhere."""
        totals: dict[str, float] = {}
        for part in self.gather(dict(metrics) if self.counts else {}):
            figures.add(totals, part)
        return totals

    def gather(self, item: Any) -> list[Any]:
        """What every rank has, by rank."""
        if self.alone:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item)
        return items


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with all its shards; every rank must ask for the same one."""
    if isinstance(tensor, DTensor):
        full: torch.Tensor = tensor.full_tensor()
        return full
    return tensor
