"""Waiting until somebody writes to a folder, told by the kernel (inotify(7))."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from pathlib import Path

MODIFY, MOVED_TO, CREATE, DELETE = 0x2, 0x80, 0x100, 0x200
ANYWAY_S = 5.0
"""What another machine writes to a shared folder is not told: look after this long whether told or not."""


async def changes(folders: Sequence[Path], anyway_s: float = ANYWAY_S) -> AsyncGenerator[None]:
    """An item at first, then whenever something in one of these folders was written, made, renamed or removed.

    What happens while the caller is busy gives one item. Items also come after `anyway_s` seconds without any: a folder
    may be on a file system whose events the kernel doesn't hear of, and a process may end without writing.

    Args:
        folders: not what is in folders within them; one that isn't there is left out.
        anyway_s: seconds.
    """
    descriptor = _watch(folders)
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    if descriptor >= 0:
        loop.add_reader(descriptor, _heard, descriptor, told)
    try:
        while True:
            yield
            with suppress(TimeoutError):
                async with asyncio.timeout(anyway_s):
                    await told.wait()
            told.clear()
    finally:
        if descriptor >= 0:
            loop.remove_reader(descriptor)
            os.close(descriptor)


def _watch(folders: Sequence[Path]) -> int:
    """A descriptor that is readable when something happens; -1 where the kernel has none to give."""
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = int(library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if descriptor < 0:
        return -1
    for folder in folders:
        library.inotify_add_watch(descriptor, os.fsencode(folder), MODIFY | MOVED_TO | CREATE | DELETE)
    return descriptor


def _heard(descriptor: int, told: asyncio.Event) -> None:
    with suppress(BlockingIOError):
        os.read(descriptor, 1 << 16)
    told.set()
