"""What differs between a CPU and a GPU, in one table."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Device:
    """Where the trainer computes.

    Attributes:
        type: torch device type.
        optimizer_implementation: TorchTitan's optimizer implementation.
        backend: torch.distributed backend.
    """

    type: str
    optimizer_implementation: str
    backend: str

    @property
    def torch(self) -> torch.device:
        """The torch device."""
        return torch.device(self.type)


CPU = Device("cpu", "foreach", "gloo")
GPU = Device("cuda", "fused", "nccl")


def use_device(with_gpus: bool) -> Device:
    """Choose the device and tell TorchTitan, which otherwise assumes an accelerator."""
    device = GPU if with_gpus else CPU
    if device is CPU:
        torch.set_num_threads(1)  # `TitanEngine` runs whole microbatches side by side instead
        import torchtitan.distributed.utils as distributed
        from torchtitan.tools import utils

        for module in (utils, distributed):
            module.device_type = "cpu"
            module.device_module = torch.cpu
    return device
