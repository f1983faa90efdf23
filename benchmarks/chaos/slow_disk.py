"""A FUSE file system: another folder, with the delays of a busy network disk.

python -m benchmarks.chaos.slow_disk BEHIND MOUNT
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from mfusepy import FUSE, Operations

DELAYS_S = {"open": 0.01, "create": 0.02, "write": 0.001, "fsync": 0.2, "rename": 0.02, "mkdir": 0.02, "unlink": 0.02}
STATVFS = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_favail", "f_ffree", "f_files", "f_frsize", "f_namemax")


class SlowFolder(Operations):
    """Passes every operation on to a folder, late.

    Args:
        root: the folder.
    """

    use_ns = True

    def __init__(self, root: str) -> None:
        self._root = root

    def __getattribute__(self, name: str) -> Any:
        time.sleep(DELAYS_S.get(name, 0.0))
        return super().__getattribute__(name)

    def _at(self, path: str) -> str:
        return self._root + path

    def access(self, path: str, amode: int) -> int:
        return 0

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(self._at(path))
        return {name: getattr(found, name) for name in dir(found) if name.startswith("st_")}

    def readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, Any], int]]:
        return [(name, self.getattr(f"{path}/{name}"), 0) for name in (".", "..", *os.listdir(self._at(path)))]

    def open(self, path: str, flags: int) -> int:
        return os.open(self._at(path), flags & ~os.O_APPEND)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        os.fsync(fh)
        return 0

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._at(path), length)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def rename(self, old: str, new: str) -> int:
        os.rename(self._at(old), self._at(new))
        return 0

    def link(self, target: str, source: str) -> int:
        os.link(self._at(source), self._at(target))
        return 0

    def symlink(self, target: str, source: str) -> int:
        os.symlink(source, self._at(target))
        return 0

    def readlink(self, path: str) -> str:
        return os.readlink(self._at(path))

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._at(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._at(path))
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._at(path))
        return 0

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._at(path), mode)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        os.utime(self._at(path), ns=times, follow_symlinks=False)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._at(path))
        return {name: getattr(found, name) for name in STATVFS}


if __name__ == "__main__":
    FUSE(SlowFolder(sys.argv[1]), sys.argv[2], foreground=True, nothreads=False, use_ino=True)
