"""Folders as tar archives: the initial content of writable image folders, and files that programs leave in them."""

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
"""Folder of archives of an image's writable folders, each named by its folder's index."""


def seed(folders: Sequence[str]) -> None:
    """Archive the content of the writable folders while an image is built."""
    for folder in folders:
        if os.__file__.startswith(f"{folder}/") or f"{sys.prefix}/".startswith(f"{folder}/"):
            raise SystemExit(f"{folder} can't be writable: it contains the Python that runs the sandbox")
    os.makedirs(SEEDS)
    for number, folder in enumerate(folders):
        if os.path.isdir(folder) and os.listdir(folder):
            with open(f"{SEEDS}/{number}", "wb") as out:
                pack([folder], out)


def pack(folders: Sequence[str], out: IO[bytes], *, leave_out: Sequence[str] = (), max_bytes: int = 0) -> None:
    """Archive the content of folders (absolute paths): files, links, and folders of any depth; nothing else.

    Files of the calling user that it may not read are read nevertheless, and keep their mode. Files removed meanwhile
    are left out. Raises `OSError` if something can't be read, or the content exceeds `max_bytes`.
    """
    remaining = max_bytes - 2 * tarfile.RECORDSIZE
    unlocked: dict[str, int] = {}
    with contextlib.ExitStack() as after:
        after.callback(_lock, unlocked)
        archive = after.enter_context(tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT))
        for folder in folders:
            paths = _inside(folder, unlocked)
            while paths:
                path = paths.pop()
                if any(path == excluded or path.startswith(f"{excluded}/") for excluded in leave_out):
                    continue
                with contextlib.suppress(FileNotFoundError, NotADirectoryError), _opened(path) as file:
                    entry = archive.gettarinfo(path, path, file)
                    if entry is None or not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()):
                        continue
                    remaining -= 2048 + entry.size
                    if max_bytes and remaining < 0:
                        raise OSError(errno.EFBIG, f"more than {max_bytes} bytes", path)
                    archive.addfile(entry, file if entry.isreg() else None)
                    if entry.isdir():
                        paths += _inside(path, unlocked)


def files(top: str) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the path and open file of every regular file below a folder, ordered by path.

    Files of the calling user that it may not read are read nevertheless, and keep their mode. Files that can't be read,
    have a path longer than PATH_MAX, or are removed meanwhile are left out.
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
    """Open a regular file for reading, keeping its mode. None for other kinds of files."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        return contextlib.nullcontext()
    unlocked: dict[str, int] = {}
    _unlock(path, os.R_OK, unlocked)
    try:
        return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    finally:
        _lock(unlocked)


def _inside(folder: str, unlocked: dict[str, int]) -> list[str]:
    """The paths in a folder, sorted by name in descending order."""
    _unlock(folder, os.R_OK | os.X_OK, unlocked)
    return [os.path.join(folder, name) for name in sorted(os.listdir(folder), reverse=True)]


def _unlock(path: str, wanted: int, unlocked: dict[str, int]) -> None:
    """Give the owner (the caller) the `wanted` rights, if missing, and record the previous mode in `unlocked`."""
    if not os.access(path, wanted):
        mode = stat.S_IMODE(os.lstat(path).st_mode)
        os.chmod(path, mode | wanted << 6)
        unlocked[path] = mode


def _lock(unlocked: dict[str, int]) -> None:
    """Restore recorded modes, inner paths first."""
    for path, mode in reversed(list(unlocked.items())):
        with contextlib.suppress(OSError):  # removed meanwhile
            os.chmod(path, mode)


def unpack(source: str | int) -> None:
    """Extract an archive of `pack`, from a path or descriptor, as files of the calling user. Raises `OSError`."""
    try:
        with (
            open(source, "rb", closefd=isinstance(source, str)) as file,
            tarfile.open(fileobj=file, mode="r|") as archive,
        ):
            trusted: Any = getattr(tarfile, "fully_trusted_filter", None)
            archive.extraction_filter = trusted  # keeps modes and links; the kernel restricts where to write
            archive.extractall("/", numeric_owner=True)
    except tarfile.TarError as error:
        raise OSError(errno.EINVAL, f"not an archive: {error}") from error
