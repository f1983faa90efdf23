"""FUSE file system that mirrors another folder, with the delays of a busy network disk.

python -m benchmarks.chaos.slow_disk BEHIND MOUNT
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from mfusepy import FUSE, Operations

DELAYS_S = {"open": 0.01, "create": 0.02, "write": 0.001, "fsync": 0.2, "rename": 0.02, "mkdir": 0.02, "unlink": 0.02}
STATVFS = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_favail", "f_ffree", "f_files", "f_frsize", "f_namemax")


def on_path(function: Callable[..., Any]) -> Any:
    """Return a method that calls a function of `os` with the path in the mirrored folder."""
    return lambda self, path, *arguments: function(self.root + path, *arguments) or 0


class SlowFolder(Operations):  # type: ignore[misc]
    """File system that delays every operation and passes it on to a folder.

    Args:
        root: the mirrored folder.
    """

    use_ns = True
    chmod, mkdir, readlink, rmdir, unlink = map(on_path, (os.chmod, os.mkdir, os.readlink, os.rmdir, os.unlink))
    open = on_path(lambda path, flags: os.open(path, flags & ~os.O_APPEND))
    create = on_path(lambda path, mode, fi=None: os.open(path, os.O_RDWR | os.O_CREAT, mode))
    truncate = on_path(lambda path, length, handle=None: os.truncate(path, length))
    utimens = on_path(lambda path, times=None: os.utime(path, ns=times, follow_symlinks=False))
    access = on_path(lambda path, mode: 0)

    def __init__(self, root: str) -> None:
        self.root = root

    def __getattribute__(self, name: str) -> Any:
        time.sleep(DELAYS_S.get(name, 0.0))
        return super().__getattribute__(name)

    def getattr(self, path: str, handle: int | None = None) -> dict[str, Any]:
        status = os.lstat(self.root + path)
        times = {f"st_{name}time": getattr(status, f"st_{name}time_ns") for name in "amc"}
        return {name: getattr(status, name) for name in dir(status) if name.startswith("st_")} | times

    def statfs(self, path: str) -> dict[str, int]:
        status = os.statvfs(self.root + path)
        return {name: getattr(status, name) for name in STATVFS}

    def readdir(self, path: str, handle: int) -> list[tuple[str, dict[str, Any], int]]:
        return [(name, self.getattr(f"{path}/{name}"), 0) for name in (".", "..", *os.listdir(self.root + path))]

    def rename(self, old: str, new: str) -> None:
        os.rename(self.root + old, self.root + new)

    def link(self, target: str, source: str) -> None:
        os.link(self.root + source, self.root + target)

    def symlink(self, target: str, source: str) -> None:
        os.symlink(source, self.root + target)

    def read(self, path: str, size: int, offset: int, handle: int) -> bytes:
        return os.pread(handle, size, offset)

    def write(self, path: str, data: bytes, offset: int, handle: int) -> int:
        return os.pwrite(handle, data, offset)

    def fsync(self, path: str, only_data: int, handle: int) -> None:
        os.fsync(handle)

    def release(self, path: str, handle: int) -> None:
        os.close(handle)


if __name__ == "__main__":
    FUSE(SlowFolder(sys.argv[1]), sys.argv[2], use_ino=True)  # returns once mounted, and serves in the background
