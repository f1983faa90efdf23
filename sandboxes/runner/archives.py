"""Folders as tar archives: writable folders of an image as they are at the start, and what a program left in them."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import IO, Any

SEEDS = "/opt/forge_env/seeds"
"""Archives of an image's writable folders, each called as its folder's place among them."""


def seed(folders: Sequence[str]) -> None:
    """While an image is built: keep what is in its writable folders."""
    for folder in folders:
        if os.__file__.startswith(f"{folder}/") or f"{sys.prefix}/".startswith(f"{folder}/"):
            raise SystemExit(f"{folder} can't be writable: Python itself is there, which runs the sandbox")
    os.makedirs(SEEDS)
    for number, folder in enumerate(folders):
        if os.path.isdir(folder) and os.listdir(folder):
            with open(f"{SEEDS}/{number}", "wb") as out:
                pack([folder], out)


def pack(folders: Sequence[str], out: IO[bytes], *, leave_out: Sequence[str] = (), max_bytes: int = 0) -> None:
    """Write what is in folders (absolute paths) to an archive: files, links, folders of any depth; nothing else.

    What the calling user owns and may not read is read nevertheless, and keeps its mode. What somebody removes
    meanwhile is left out.

    Raises:
        OSError: something can't be read, or they hold more than `max_bytes`.
    """
    left = max_bytes - 2 * tarfile.RECORDSIZE
    unlocked: dict[str, int] = {}
    with contextlib.ExitStack() as after:
        after.callback(_lock, unlocked)
        archive = after.enter_context(tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT))
        for folder in folders:
            paths = _inside(folder, unlocked)
            while paths:
                path = paths.pop()
                if any(path == place or path.startswith(f"{place}/") for place in leave_out):
                    continue
                with contextlib.suppress(FileNotFoundError, NotADirectoryError), _opened(path) as file:
                    entry = archive.gettarinfo(path, path, file)
                    if entry is None or not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()):
                        continue
                    left -= 2048 + entry.size
                    if max_bytes and left < 0:
                        raise OSError(errno.EFBIG, f"more than {max_bytes} bytes", path)
                    archive.addfile(entry, file if entry.isreg() else None)
                    if entry.isdir():
                        paths += _inside(path, unlocked)


def files(top: str) -> Iterator[tuple[str, IO[bytes]]]:
    """The regular files below a folder, by path and open, in the order of their paths.

    What the calling user owns and may not read is read nevertheless, and keeps its mode. What can't be read, lies
    deeper than a path can say, or is removed meanwhile, is left out.
    """
    unlocked: dict[str, int] = {}
    paths = [top]
    try:
        while paths:
            path = paths.pop()
            with contextlib.suppress(OSError):
                if stat.S_ISDIR(os.lstat(path).st_mode):
                    paths += _inside(path, unlocked)
                    continue
            with contextlib.ExitStack() as opened:
                file = None
                with contextlib.suppress(OSError):
                    file = opened.enter_context(_opened(path))
                if file is not None:
                    yield path, file
    finally:
        _lock(unlocked)


def _opened(path: str) -> AbstractContextManager[IO[bytes] | None]:
    """A regular file to read, with its mode as it was; None for anything else."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        return contextlib.nullcontext()
    unlocked: dict[str, int] = {}
    _unlock(path, os.R_OK, unlocked)
    try:
        return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    finally:
        _lock(unlocked)


def _inside(folder: str, unlocked: dict[str, int]) -> list[str]:
    """The paths in a folder, last name first."""
    _unlock(folder, os.R_OK | os.X_OK, unlocked)
    return [os.path.join(folder, name) for name in sorted(os.listdir(folder), reverse=True)]


def _unlock(path: str, wanted: int, unlocked: dict[str, int]) -> None:
    """Allow the owner, who calls, to read it, and note its mode before."""
    if not os.access(path, wanted):
        mode = stat.S_IMODE(os.lstat(path).st_mode)
        os.chmod(path, mode | wanted << 6)
        unlocked[path] = mode


def _lock(unlocked: dict[str, int]) -> None:
    """Give back the modes, what is inside a folder first."""
    for path, mode in reversed(list(unlocked.items())):
        with contextlib.suppress(OSError):  # somebody has removed it
            os.chmod(path, mode)


def unpack(source: str | int) -> None:
    """Put what was packed, in a file or at a descriptor, where it was, as files of the calling user.

    Raises:
        OSError: it is no archive, or there is no room.
    """
    try:
        with (
            open(source, "rb", closefd=isinstance(source, str)) as file,
            tarfile.open(fileobj=file, mode="r|") as archive,
        ):
            trusted: Any = getattr(tarfile, "fully_trusted_filter", None)
            archive.extraction_filter = trusted  # modes and links as they were: the kernel says where may be written
            archive.extractall("/", numeric_owner=True)
    except tarfile.TarError as error:
        raise OSError(errno.EINVAL, f"not an archive: {error}") from error
