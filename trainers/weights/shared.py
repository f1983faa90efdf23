"""Memory of tensors that the processes of one machine map, and that other machines fetch as it is.

A `memfd` has no name that could be left behind. Who has one tells the other its process and descriptor; the other
opens it through /proc, as the same user may, and maps the same pages. The kernel frees them with the last mapping.
From another machine the bytes are fetched (`trainers.weights.network`).

Fresh pages cost several times the copy, so a block is filled again and again, and stays mapped where it was read.
Whoever reads it holds a lock on it (`flock`, which the kernel takes back from a process that dies); its owner fills it
anew only where nobody does (`reuse`), and gives it another stamp, by which the handles of before are known to be void.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import struct
from collections import deque
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from trainers.weights import network

DROPPED = "the weights were dropped before they were read"
STAMP = struct.Struct("=q")
"""The last bytes of a block."""


class Descriptor:
    """A file descriptor that is closed when nobody holds it any more."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.inode = os.fstat(number).st_ino

    def __del__(self) -> None:
        os.close(self.number)


class Block(mmap.mmap):
    """Mapped memory and the descriptor through which other processes map it too."""

    file: Descriptor

    @property
    def room(self) -> int:
        """Bytes, without the stamp's."""
        return len(self) - STAMP.size

    @property
    def stamp(self) -> int:
        """Changes whenever the block is filled anew."""
        (stamp,) = STAMP.unpack_from(self, self.room)
        return int(stamp)

    @stamp.setter
    def stamp(self, value: int) -> None:
        STAMP.pack_into(self, self.room, value)


class Reading(np.ndarray[Any, np.dtype[np.uint8]]):
    """All of a block but the stamp, which stays as it is as long as this is there."""

    lock: Descriptor


_blocks: WeakValueDictionary[int, Block] = WeakValueDictionary()
"""Of this process, by address."""
_kept: dict[tuple[int, torch.dtype], deque[Block]] = {}
"""Of each process and data type those two that were read last: its weights lie in the one and the other by turns."""


@dataclass(frozen=True, slots=True)
class Handle:
    """A tensor in a block of some process, as it is filled now.

    Attributes:
        host: of the process (see `host`).
        pid: its id there.
        descriptor: of the block.
        inode: of the block, by which it is known for certain.
        stamp: of the block.
        shape: of the tensor.
        dtype: of the tensor.
        source: where other machines fetch it; None: there are none.
    """

    host: str
    pid: int
    descriptor: int
    inode: int
    stamp: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: network.Source | None

    @property
    def nbytes(self) -> int:
        """Of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


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
    os.ftruncate(file.number, size * dtype.itemsize + STAMP.size)
    block = _map(file)
    return _tensor(block, block, dtype)


def handle(tensor: torch.Tensor) -> Handle:
    """What another process needs to map the same memory.

    Raises:
        ValueError: `tensor` is not the whole of a block.
    """
    block = _block(tensor)
    file, source = block.file, network.serve(_find)
    return Handle(host(), os.getpid(), file.number, file.inode, block.stamp, tuple(tensor.shape), tensor.dtype, source)


def reuse(tensor: torch.Tensor) -> bool:
    """Whether the block of `tensor` may be filled anew, since nobody reads it; handles of before are void then."""
    block = _block(tensor)
    try:
        fcntl.flock(block.file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    block.stamp += 1
    fcntl.flock(block.file.number, fcntl.LOCK_UN)
    return True


def attach(shared: Handle) -> torch.Tensor:
    """The tensor of another process of this machine, in the same memory, which stays as it is meanwhile.

    Raises:
        OSError: that process let go of it, fills it anew, or ended.
    """
    for key in [key for key in _kept if not os.path.exists(f"/proc/{key[0]}")]:
        del _kept[key]
    path = f"/proc/{shared.pid}/fd/{shared.descriptor}"
    kept = _kept.setdefault((shared.pid, shared.dtype), deque(maxlen=2))
    block = next((each for each in kept if each.file.inode == shared.inode), None) or _map(_open(path, shared.inode))
    reading = _read(block, path, shared.stamp)
    if block in kept:
        kept.remove(block)
    kept.append(block)
    return _tensor(block, reading, shared.dtype).view(shared.shape)


async def fetch(shared: Handle, into: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor of a process of another machine, brought here.

    Args:
        shared: of the tensor.
        into: a tensor like it, contiguous, to be filled; by default a fresh one.

    Raises:
        OSError: that process let go of it, fills it anew, ended, or can't be reached.
    """
    if shared.source is None:
        raise ConnectionError(f"process {shared.pid} of another machine shares its memory with its own machine only")
    if into is None:
        into = empty(prod(shared.shape), shared.dtype).view(shared.shape)
    memory = into.view(-1).view(torch.uint8).numpy().data
    await asyncio.to_thread(network.fetch, shared.source, shared.inode, shared.stamp, memory)
    return into


def _block(tensor: torch.Tensor) -> Block:
    block = _blocks.get(tensor.data_ptr()) if tensor.is_contiguous() else None
    if block is None or block.room != tensor.nbytes:
        raise ValueError(f"a tensor of {tensor.nbytes} bytes is not the whole of a block: make it with `empty`")
    return block


def _find(inode: int, stamp: int) -> memoryview | None:
    """The memory of a block of this process, which is not filled anew while that is held; None: it was dropped."""
    found = next((block for block in list(_blocks.values()) if block.file.inode == inode), None)
    if found is None:
        return None
    try:
        return _read(found, f"/proc/self/fd/{found.file.number}", stamp).data
    except OSError:
        return None


def _open(path: str, inode: int) -> Descriptor:
    file = Descriptor(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    if file.inode != inode:
        raise FileNotFoundError(DROPPED)
    return file


def _read(block: Block, path: str, stamp: int) -> Reading:
    """What is in a block, if it has this stamp."""
    lock = _open(path, block.file.inode)  # opened once more: a mapping keeps what it was made of open
    try:
        fcntl.flock(lock.number, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise FileNotFoundError(DROPPED) from error
    if block.stamp != stamp:
        raise FileNotFoundError(DROPPED)
    reading = np.frombuffer(block, np.uint8, block.room).view(Reading)
    reading.lock = lock
    return reading


def _map(file: Descriptor) -> Block:
    """All of a `memfd`."""
    block = Block(file.number, 0)
    block.file = file
    return block


def _tensor(block: Block, memory: Block | Reading, dtype: torch.dtype) -> torch.Tensor:
    """All of a block but the stamp, as a vector that holds `memory`."""
    tensor = torch.frombuffer(memory, dtype=dtype, count=block.room // dtype.itemsize)
    _blocks[tensor.data_ptr()] = block
    return tensor
