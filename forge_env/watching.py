"""Waiting for changes in folders, with inotify(7)."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from pathlib import Path

MODIFY, MOVED_TO, CREATE, DELETE = 0x2, 0x80, 0x100, 0x200
ANYWAY_S = 5.0
"""Seconds between checks without an event, as inotify doesn't report writes of other machines to a shared folder."""


async def changes(folders: Sequence[Path], anyway_s: float = ANYWAY_S) -> AsyncGenerator[None]:
    """Yield at once, then whenever a file in one of these folders was written, created, renamed or removed.

    Changes while the caller is busy are combined into one item. An item is also yielded after `anyway_s` seconds
    without changes: the file system may not support inotify, and a process may end without writing.

    Args:
        folders: folders to watch, without their subfolders; missing ones are ignored.
        anyway_s: maximum seconds between two items.
    """
    descriptor = _watch(folders)
    changed = asyncio.Event()
    loop = asyncio.get_running_loop()
    if descriptor >= 0:
        loop.add_reader(descriptor, _heard, descriptor, changed)
    try:
        while True:
            yield
            with suppress(TimeoutError):
                async with asyncio.timeout(anyway_s):
                    await changed.wait()
            changed.clear()
    finally:
        if descriptor >= 0:
            loop.remove_reader(descriptor)
            os.close(descriptor)


def _watch(folders: Sequence[Path]) -> int:
    """Create an inotify descriptor, which becomes readable on changes; -1 if the kernel has or gives none."""
    if sys.platform != "linux":
        return -1
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
