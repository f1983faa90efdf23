"""What differs between a CPU and a GPU, in one table."""

from __future__ import annotations

import ctypes
import os
import warnings
from dataclasses import dataclass

import torch

MALLOPT = {-3: 2**25, -1: 2**30, -2: 2**24}
"""Of glibc, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_TOP_PAD: what is freed is used again. Given back to the kernel it
would come back page by page, each cleared: an eighth of a small model's step."""

UNCOMPILED = "TORCHDYNAMO_DISABLE"
"""A variable of torch's: `torch.compile` gives back what it is given."""


@dataclass(frozen=True, slots=True)
class Device:
    """Where the trainer computes.

    Attributes:
        type: torch device type.
        optimizer_implementation: TorchTitan's optimizer implementation.
        side_by_side: threads run whole microbatches side by side instead of working on the same operation.
        packed: sequences share rows, instead of one padded row each.
    """

    type: str
    optimizer_implementation: str
    side_by_side: bool
    packed: bool

    @property
    def torch(self) -> torch.device:
        """The torch device."""
        return torch.device(self.type)

    def release_memory(self) -> None:
        """Give back what torch keeps for later."""
        if self.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def peak_flops(self) -> float | None:
        """Floating-point operations a second that the hardware is sold with (bfloat16), or None for a CPU."""
        if self.type == "cpu":
            return None
        from torchtitan.tools.utils import get_peak_flops

        return float(get_peak_flops(torch.cuda.get_device_name()))


CPU = Device("cpu", "foreach", side_by_side=True, packed=True)
GPU = Device("cuda", "fused", side_by_side=False, packed=True)


def import_titan() -> None:
    """Import TorchTitan without what it compiles as it is imported: an attention that nothing here uses.

    Torch's compiler would be imported for that, which takes 1.5 s. Afterwards whoever wants it has it.
    """
    before = os.environ.get(UNCOMPILED)
    os.environ[UNCOMPILED] = "1"
    try:
        import torchtitan.models.common.attention  # noqa: F401
    finally:
        os.environ.pop(UNCOMPILED)
        if before is not None:
            os.environ[UNCOMPILED] = before


def use_device(with_gpus: bool) -> Device:
    """Choose the device and tell TorchTitan, which otherwise assumes an accelerator; call it before other imports."""
    device = GPU if with_gpus else CPU
    import_titan()
    if device is CPU:
        torch.set_num_threads(1)  # `TitanEngine` runs whole microbatches side by side instead
        if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
            for name, value in MALLOPT.items():
                mallopt(name, value)
        import torchtitan.distributed.parallel_dims as parallel_dims
        import torchtitan.distributed.utils as distributed
        from torchtitan.tools import utils

        for module in (utils, distributed):
            module.device_type = "cpu"
            module.device_module = torch.cpu
        parallel_dims.device_type = "cpu"
        # its router asks for float32 in autocast, which a CPU can only turn off, to the same effect
        warnings.filterwarnings("ignore", "In CPU autocast, but the target dtype is not supported")
    return device
