"""Memory of tensors that the processes of one machine map, and that other machines fetch as it is.

A `memfd` has no name that could be left behind. Who has one tells the other its process and descriptor; the other
opens it through /proc, as the same user may, and maps the same pages. The kernel frees them with the last mapping.
From another machine the bytes are fetched (`trainers.weights.network`).
"""

from __future__ import annotations

import asyncio
import mmap
import os
from dataclasses import dataclass
from functools import cache
from math import prod
from weakref import WeakValueDictionary

import torch

from trainers.weights import network


class Descriptor:
    """A file descriptor that is closed when nobody holds it any more."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.inode = os.fstat(number).st_ino

    def __del__(self) -> None:
        os.close(self.number)


class Block(mmap.mmap):
    """Mapped memory and the descriptor through which other processes map it too; freed with its last tensor."""

    file: Descriptor
    borrowed = False
    """Another process fills it."""


_blocks: WeakValueDictionary[int, Block] = WeakValueDictionary()
"""Of this process, by address."""


@dataclass(frozen=True, slots=True)
class Handle:
    """A tensor in a block of some process.

    Attributes:
        host: of the process (see `host`).
        pid: its id there.
        descriptor: of the block.
        inode: of the block, by which it is known for certain.
        shape: of the tensor.
        dtype: of the tensor.
        source: where other machines fetch it; None: there are none.
    """

    host: str
    pid: int
    descriptor: int
    inode: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: network.Source | None


@cache
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
    file, source = block.file, network.serve(_find)
    return Handle(host(), os.getpid(), file.number, file.inode, tuple(tensor.shape), tensor.dtype, source)


def _find(inode: int) -> memoryview | None:
    """The memory of a block of this process."""
    found = next((block for block in list(_blocks.values()) if block.file.inode == inode), None)
    return None if found is None else memoryview(found)


def attach(shared: Handle) -> torch.Tensor:
    """The tensor of another process of this machine, in the same memory.

    Raises:
        OSError: that process let go of it, or ended.
    """
    file = Descriptor(os.open(f"/proc/{shared.pid}/fd/{shared.descriptor}", os.O_RDWR | os.O_CLOEXEC))
    if file.inode != shared.inode:
        raise FileNotFoundError("the weights were dropped before they were read")
    return _map(file, shared.dtype, borrowed=True).view(shared.shape)


def borrowed(tensor: torch.Tensor) -> bool:
    """Whether it lies in memory that another process fills."""
    block = _blocks.get(tensor.data_ptr())
    return block is not None and block.borrowed


async def fetch(shared: Handle, into: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor of a process of another machine, brought here.

    Args:
        shared: of the tensor.
        into: a tensor like it, contiguous, to be filled; by default a fresh one.

    Raises:
        OSError: that process let go of it, ended, or can't be reached.
    """
    if shared.source is None:
        raise ConnectionError(f"process {shared.pid} of another machine shares its memory with its own machine only")
    if into is None:
        into = empty(prod(shared.shape), shared.dtype).view(shared.shape)
    memory = into.view(-1).view(torch.uint8).numpy().data
    await asyncio.to_thread(network.fetch, shared.source, shared.inode, memory)
    return into


def _map(file: Descriptor, dtype: torch.dtype, *, borrowed: bool = False) -> torch.Tensor:
    """All of a `memfd` as a vector."""
    block = Block(file.number, 0)
    block.file, block.borrowed = file, borrowed
    tensor = torch.frombuffer(block, dtype=dtype)
    _blocks[tensor.data_ptr()] = block
    return tensor
