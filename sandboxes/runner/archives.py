"""Folders as tar archives: writable folders of an image as they are at the start, and what a program left in them."""

from __future__ import annotations

import errno
import os
import sys
import tarfile
from collections.abc import Sequence
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
    """Write what is in folders (absolute paths) to an archive: files, links, folders; nothing else.

    Raises:
        OSError: a folder can't be read, or they hold more than `max_bytes`.
    """
    left = max_bytes - 2 * tarfile.RECORDSIZE

    def kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        nonlocal left
        path = f"/{entry.name}"
        if any(path == place or path.startswith(f"{place}/") for place in leave_out):
            return None
        if not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()):
            return None
        left -= 2048 + entry.size
        if max_bytes and left < 0:
            raise OSError(errno.EFBIG, f"more than {max_bytes} bytes", path)
        return entry

    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for folder in folders:
            for name in sorted(os.listdir(folder)):
                archive.add(os.path.join(folder, name), filter=kept)


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
