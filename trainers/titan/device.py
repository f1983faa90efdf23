"""Settings that differ between CPU and GPU."""

from __future__ import annotations

import ctypes
import resource
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from trainers.compat.torch import multiply_with_onednn
from trainers.compat.torchtitan import import_uncompiled, use_cpu

MALLOPT = {-3: 2**25, -1: 2**30, -2: 2**24}
"""glibc's M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_TOP_PAD, set so that freed memory is reused. Memory returned to the
kernel would come back page by page, each one cleared, which takes an eighth of a small model's step."""
MOST_UNUSED = 3 * 2**30
"""Bytes of freed memory that a CPU's trainer keeps for reuse. Batches of other shapes leave gaps of other sizes: after
two steps, a trainer of 135M parameters held 5.7 GB, of which 2.0 were in use."""
_MAPPED, _USED = 4, 7
"""Indices of `hblkhd` and `uordblks`, which are in use, in glibc's `struct mallinfo2`."""


@dataclass(frozen=True, slots=True)
class Device:
    """The device that the trainer computes on, by torch's type."""

    type: str

    @property
    def is_cpu(self) -> bool:
        """Whether it is a CPU, on which threads run whole microbatches in parallel."""
        return self.type == "cpu"

    @property
    def torch(self) -> torch.device:
        """The torch device."""
        return torch.device(self.type)

    def release_memory(self) -> None:
        """Free the GPU memory that torch caches for reuse."""
        if not self.is_cpu:
            torch.cuda.empty_cache()

    def trim_memory(self) -> None:
        """On a CPU, return the allocator's unused memory to the kernel if it is more than `MOST_UNUSED`."""
        if self.is_cpu and unused_bytes() > MOST_UNUSED:
            ctypes.CDLL(None).malloc_trim(0)

    @property
    def peak_flops(self) -> float | None:
        """Nominal peak of the hardware in bfloat16 floating-point operations per second; None for a CPU."""
        if self.is_cpu:
            return None
        from torchtitan.tools.utils import get_peak_flops

        return float(get_peak_flops(torch.cuda.get_device_name()))


class _MallInfo(ctypes.Structure):
    _fields_ = [("sizes", ctypes.c_size_t * 10)]


def unused_bytes() -> int:
    """Bytes of this process's main memory that glibc's allocator does not use; 0 with another C library.

    The allocator's own count of free bytes includes those that it has returned to the kernel.
    """
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _MallInfo
    sizes = mallinfo().sizes
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    private = (int(resident) - int(shared)) * resource.getpagesize()
    return max(0, private - int(sizes[_MAPPED]) - int(sizes[_USED]))


def use_device(with_gpus: bool) -> Device:
    """Choose the device and configure TorchTitan for it; call this before other imports of TorchTitan."""
    device = Device("cuda" if with_gpus else "cpu")
    import_uncompiled()
    if device.is_cpu:
        torch.set_num_threads(1)  # `TitanEngine` runs whole microbatches in parallel instead
        if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
            for name, value in MALLOPT.items():
                mallopt(name, value)
        multiply_with_onednn()
        use_cpu()
        # its router requests float32 autocast; on a CPU this turns autocast off, which has the same effect
        warnings.filterwarnings("ignore", "In CPU autocast, but the target dtype is not supported")
    return device
