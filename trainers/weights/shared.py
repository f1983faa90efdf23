"""Memory of tensors that processes of one machine share by mapping it, and that other machines fetch as bytes.

Each block is a `memfd`, which has no name in the file system that could be left behind. The owner sends its process id
and the descriptor's number; a reader opens the descriptor through /proc, which the same user may do, and maps the same
pages. The kernel frees them with the last mapping. Other machines fetch the bytes (`trainers.weights.network`).

Allocating new pages costs several times as much as the copy, so the owner refills blocks and readers keep them mapped.
A reader holds a lock on the block (`flock`, which the kernel releases if the process dies). The owner refills a block
only if no reader holds the lock (`reuse`), and changes its stamp, which invalidates earlier handles.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any
from weakref import WeakValueDictionary, finalize

import numpy as np
import torch

from trainers.weights import network

log = logging.getLogger(__name__)

DROPPED = "the weights were dropped before they were read"
STAMP = struct.Struct("=q")
"""Format of the stamp, which is the last bytes of a block."""


class Descriptor:
    """A file descriptor that is closed when the object is deleted, or by the kernel when the process ends."""

    def __init__(self, number: int) -> None:
        finalize(self, os.close, number).atexit = False
        self.number = number
        self.inode = os.fstat(number).st_ino


class Block(mmap.mmap):
    """Mapped memory, with the descriptor through which other processes map it."""

    file: Descriptor
    pinned: bool = False
    """Whether `pin` was called for it in this process."""
    unpin: Callable[[], object] | None = None
    """Called before the memory is unmapped."""

    def __del__(self) -> None:
        # not in a finalizer, which Python calls only after the memory is unmapped
        if self.unpin is not None:
            self.unpin()

    @property
    def room(self) -> int:
        """Size in bytes, without the stamp."""
        return len(self) - STAMP.size

    @property
    def stamp(self) -> int:
        """Number that changes whenever the block is refilled."""
        (stamp,) = STAMP.unpack_from(self, self.room)
        return int(stamp)

    @stamp.setter
    def stamp(self, value: int) -> None:
        STAMP.pack_into(self, self.room, value)


class Reading(np.ndarray[Any, np.dtype[np.uint8]]):
    """Contents of a block without the stamp. The block is not refilled as long as this array exists."""

    lock: Descriptor


_blocks: WeakValueDictionary[int, Block] = WeakValueDictionary()
"""Blocks mapped in this process, by memory address."""
_kept: dict[tuple[int, torch.dtype], deque[Block]] = {}
"""The two blocks last read of each process and data type, because a process alternates between two blocks."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process that publishes weights, by its `host` and its id there.

    `source` is where other machines fetch its blocks; None if the run has no other machines.
    """

    host: str
    pid: int
    source: network.Source | None

    @property
    def is_local(self) -> bool:
        """Whether it is on this process's host."""
        return self.host == host()

    async def end(self) -> None:
        """Wait until it has ended or can't be reached."""
        if self.is_local:
            from trainers.actors.processes import end_of  # imports Monarch, which takes seconds

            await end_of(self.pid)
        elif self.source is not None:
            await network.end_of(self.source)


@dataclass(frozen=True, slots=True)
class Handle:
    """Reference to a tensor in a block of a process: the block's descriptor there, its inode, and its current stamp."""

    process: Process
    descriptor: int
    inode: int
    stamp: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@cache
def host() -> str:
    """Identifier of this machine and of this process's PID namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"


def empty(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Create a vector like `torch.empty`, [size], that `handle` accepts; one without elements is not shared."""
    if size == 0:
        return torch.empty(0, dtype=dtype)
    file = Descriptor(os.memfd_create("weights", os.MFD_CLOEXEC))
    os.ftruncate(file.number, size * dtype.itemsize + STAMP.size)
    block = _map(file)
    return _tensor(block, block, dtype)


def handle(tensor: torch.Tensor) -> Handle:
    """Create the handle with which another process maps or fetches `tensor`, which must be the whole of a block."""
    block = _block(tensor)
    number, inode = block.file.number, block.file.inode
    return Handle(this_process(), number, inode, block.stamp, tuple(tensor.shape), tensor.dtype)


def this_process() -> Process:
    """This process, which serves its blocks if the run has other machines."""
    return Process(host(), os.getpid(), network.serve(_find))


def pin(tensor: torch.Tensor) -> None:
    """Pin the block of `tensor` in this process, so that a GPU copies to and from it directly.

    It is unpinned before it is unmapped. If the driver refuses, copies still work, but more slowly.
    """
    if not len(tensor) or (block := _block(tensor)).pinned:
        return
    block.pinned = True
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if error := int(cuda.cudaHostRegister(tensor.data_ptr(), len(block), 0)):
        log.warning("pinning the memory of weights failed (CUDA error %d): GPU copies are slower", error)
        with suppress(RuntimeError):  # clears the error, which CUDA raises in the next operation
            torch.zeros(1, device="cuda")
        return
    block.unpin = partial(cuda.cudaHostUnregister, tensor.data_ptr())


def reuse(tensor: torch.Tensor) -> bool:
    """Claim the block of `tensor` for refilling, which invalidates earlier handles. False if it is being read."""
    block = _block(tensor)
    try:
        fcntl.flock(block.file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    block.stamp += 1
    fcntl.flock(block.file.number, fcntl.LOCK_UN)
    return True


def attach(shared: Handle) -> torch.Tensor:
    """Map a tensor of another process of this machine. Its block is not refilled as long as the result exists.

    Raises OSError if the process dropped or refilled the block, or ended.
    """
    for key in [key for key in _kept if not os.path.exists(f"/proc/{key[0]}")]:
        del _kept[key]
    path = f"/proc/{shared.process.pid}/fd/{shared.descriptor}"
    recent = _kept.setdefault((shared.process.pid, shared.dtype), deque(maxlen=2))
    block = next((each for each in recent if each.file.inode == shared.inode), None) or _map(_open(path, shared.inode))
    reading = _read(block, path, shared.stamp)
    if block in recent:
        recent.remove(block)
    recent.append(block)
    return _tensor(block, reading, shared.dtype).view(shared.shape)


async def fetch(shared: Handle, into: torch.Tensor | None = None) -> torch.Tensor:
    """Copy a tensor from a process of another machine, `into` a contiguous tensor or a new one.

    Raises OSError if the process dropped or refilled the block, ended, or can't be reached.
    """
    source = shared.process.source
    if source is None:
        raise ConnectionError(f"process {shared.process.pid} is on another machine, and shared memory is local")
    if into is None:
        into = empty(prod(shared.shape), shared.dtype).view(shared.shape)
    memory = into.view(-1).view(torch.uint8).numpy().data
    await asyncio.to_thread(network.fetch, source, shared.inode, shared.stamp, memory)
    return into


def _block(tensor: torch.Tensor) -> Block:
    block = _blocks.get(tensor.data_ptr()) if tensor.is_contiguous() else None
    if block is None or block.room != tensor.nbytes:
        raise ValueError(f"a tensor of {tensor.nbytes} bytes is not a whole block: allocate it with `empty`")
    return block


def _find(inode: int, stamp: int) -> memoryview | None:
    """Memory of a block of this process, which is not refilled as long as the result exists; None if it was dropped."""
    match = next((block for block in list(_blocks.values()) if block.file.inode == inode), None)
    if match is None:
        return None
    try:
        return _read(match, f"/proc/self/fd/{match.file.number}", stamp).data
    except OSError:
        return None


def _open(path: str, inode: int) -> Descriptor:
    file = Descriptor(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    if file.inode != inode:
        raise FileNotFoundError(DROPPED)
    return file


def _read(block: Block, path: str, stamp: int) -> Reading:
    """Lock a block and return its contents; raises FileNotFoundError if it was dropped, is being refilled, or has
    another stamp.
    """
    # Opened again, because a lock on the file of the mapping would last as long as the mapping.
    lock = _open(path, block.file.inode)
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
    """Map a whole `memfd`."""
    block = Block(file.number, 0)
    block.file = file
    return block


def _tensor(block: Block, memory: Block | Reading, dtype: torch.dtype) -> torch.Tensor:
    """Vector of a block's contents without the stamp. It keeps `memory` alive."""
    tensor = torch.frombuffer(memory, dtype=dtype, count=block.room // dtype.itemsize)
    _blocks[tensor.data_ptr()] = block
    return tensor
