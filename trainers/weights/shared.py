"""TorchStore between the processes of one machine: memory that both map, instead of bytes in a message.

A `memfd` has no name that could be left behind. Who has one tells the other its process and descriptor; the other
opens it through /proc, as the same user may, and maps the same pages. The kernel frees them with the last mapping.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torchstore.transport.buffers import MonarchTransportBuffer


class Descriptor:
    """A file descriptor that is closed when nobody holds it any more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class Block(mmap.mmap):
    """Mapped memory and the descriptor through which other processes map it too; freed with its last tensor."""

    file: Descriptor


_blocks: WeakValueDictionary[int, Block] = WeakValueDictionary()
"""Of this process, by address."""


@dataclass(frozen=True, slots=True)
class Handle:
    """A tensor in a block of a process of this machine."""

    pid: int
    descriptor: int
    inode: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def host() -> str:
    """This machine, and the processes of it that can be seen from here."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"


def empty(size: int, dtype: torch.dtype) -> torch.Tensor:
    """A vector like `torch.empty`, [size], that `handle` can be taken of. Zero elements share nothing."""
    if size == 0:
        return torch.empty(0, dtype=dtype)
    file = Descriptor(os.memfd_create("weights", os.MFD_CLOEXEC))
    os.ftruncate(file.number, size * dtype.itemsize)
    return _map(file, dtype)


def handle(tensor: torch.Tensor) -> Handle | None:
    """What another process needs to map the same memory; None where `tensor` is not the whole of a block."""
    block = _blocks.get(tensor.data_ptr()) if tensor.is_contiguous() else None
    if block is None or tensor.nbytes != len(block):
        return None
    number = block.file.number
    return Handle(os.getpid(), number, os.fstat(number).st_ino, tuple(tensor.shape), tensor.dtype)


def attach(shared: Handle) -> torch.Tensor:
    """The tensor of another process, in the same memory.

    Raises:
        OSError: that process let go of it, or ended.
    """
    file = Descriptor(os.open(f"/proc/{shared.pid}/fd/{shared.descriptor}", os.O_RDWR | os.O_CLOEXEC))
    if os.fstat(file.number).st_ino != shared.inode:
        raise FileNotFoundError("the weights were dropped before they were read")
    return _map(file, shared.dtype).view(shared.shape)


def _map(file: Descriptor, dtype: torch.dtype) -> torch.Tensor:
    """All of a `memfd` as a vector."""
    block = Block(file.number, 0)
    block.file = file
    tensor = torch.frombuffer(block, dtype=dtype)
    _blocks[tensor.data_ptr()] = block
    return tensor


class SharedTransportBuffer(MonarchTransportBuffer):  # type: ignore[misc]
    """TorchStore's transport that sends a `Handle` where it can, and the bytes where it can't."""

    def __init__(self) -> None:
        super().__init__()
        self.handle: Handle | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tensor": self.tensor if self.handle is None else None}

    async def write_from(self, tensor: torch.Tensor | None) -> None:
        """Offer a tensor."""
        self.tensor = tensor
        self.handle = None if tensor is None else handle(tensor)

    async def read_into(self, tensor: torch.Tensor | None = None) -> torch.Tensor:
        """Take what the other side offers."""
        if self.handle is not None:
            self.tensor = attach(self.handle)
        taken: torch.Tensor = await super().read_into(tensor)
        return taken

    def update(self, other_buffer: SharedTransportBuffer) -> None:
        """Take over the other side's answer."""
        super().update(other_buffer)
        self.handle = other_buffer.handle

    async def drop(self) -> None:
        """Let go of the tensor."""
        self.tensor = None
