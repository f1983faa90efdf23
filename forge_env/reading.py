"""Reading files that strangers may have made: regular files below the folder that was named, in bounded pieces.

A run folder may come from anybody. A named pipe in it would block its reader for ever, a link to `/dev/zero` has no
end, a link to `~/.ssh` shows a page of the viewer what the folder does not hold, and a line may have any length. All
that is read from the folder of a run, an evaluation or a checkpoint is opened here.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, NamedTuple

from forge_env.errors import UsageError

ANYWHERE = Path("/")
"""As `root`: a file that a person named, who may name a link."""
LONGEST_LINE = 64 << 20
"""Bytes of a line that is read, such as the record of an episode."""
LONGEST_ROW = 4 << 20
"""Bytes of a line of figures, events or the log."""
LONGEST_SKIPPED = 1 << 30
"""Bytes of a line that is skipped; a file with a longer one is not read on."""
LARGEST_DOCUMENT = 8 << 20
"""Bytes of a JSON document that is read as a whole."""
LARGEST_RECIPE = 1 << 19
"""Bytes of a recipe in a run folder; YAML takes longer."""
LARGEST_TABLE = 128 << 20
"""Bytes of a file that is held in memory: rows of figures, a tokenizer, a checkpoint's index."""
_PIECE = 1 << 20
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class UnsafeFileError(UsageError):
    """A file that is not read: it is not a regular file below its folder, or too large."""


class Line(NamedTuple):
    """A line of a file.

    Attributes:
        offset: of its first byte.
        length: bytes, its line feed included.
        text: with its line feed; empty if the line is longer than was asked for.
    """

    offset: int
    length: int
    text: bytes


def folder_of(path: Path) -> Path:
    """The folder that a file belongs to: RUN for `RUN/metrics.jsonl` and `RUN/trajectories/train.jsonl`."""
    return path.parent.parent if path.parent.name == "trajectories" else path.parent


def open_file(path: Path, *, root: Path | None = None, largest: int | None = None) -> BufferedReader:
    """Open a regular file below `root` for reading; never waits, and has no effect on what is not a file.

    Args:
        path: of the file. Links are followed as long as they stay below `root`.
        root: the folder that it must be in; by default the one it belongs to (`folder_of`), `ANYWHERE` for none.
        largest: bytes that it may have; None: any number.

    Raises:
        UnsafeFileError: it is something else, elsewhere, or larger.
        OSError: it is missing, or can't be read.
    """
    # O_PATH opens nothing yet: no pipe waits, no tape rewinds; and the descriptor goes on referring to the same file
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        there = f"/proc/self/fd/{place}"
        folder, target = os.path.realpath(folder_of(path) if root is None else root), os.readlink(there)
        if not target.startswith(os.path.join(folder, "")):
            raise UnsafeFileError(f"{path} is a link to {target}, outside of {folder}", fix="replace it with a copy")
        found = os.fstat(place)
        if not stat.S_ISREG(found.st_mode):
            kind = _KINDS.get(stat.S_IFMT(found.st_mode), "no regular file")
            raise UnsafeFileError(f"{path} is {kind}, not a file", fix="remove it")
        if largest is not None and found.st_size > largest:
            raise UnsafeFileError(f"{path} has {found.st_size:,} bytes; at most {largest:,} are read", fix="shorten it")
        return open(path, "rb", opener=lambda _, flags: os.open(there, flags | os.O_NONBLOCK | os.O_CLOEXEC))
    finally:
        os.close(place)


def read_bytes(path: Path, *, largest: int = LARGEST_DOCUMENT, root: Path | None = None) -> bytes:
    """The content of a file; raises as `open_file`."""
    with open_file(path, root=root, largest=largest) as file:
        return file.read(largest)  # it may have grown


def read_text(path: Path, *, largest: int = LARGEST_DOCUMENT, root: Path | None = None) -> str:
    """The content of a file as text, what is not UTF-8 replaced; raises as `open_file`."""
    return read_bytes(path, largest=largest, root=root).decode("utf-8", "replace")


def whole_lines(file: BinaryIO, longest: int = LONGEST_LINE) -> Iterator[Line]:
    """The lines of a file from its current position; an incomplete last one, which may be being written, is left out.

    Args:
        file: as `open_file` gives it.
        longest: bytes of a line whose text is given.

    Raises:
        UnsafeFileError: a line is longer than `LONGEST_SKIPPED`.
    """
    offset = file.tell()
    while (text := file.readline(longest)).endswith(b"\n") or len(text) == longest:
        length = len(text)
        if not text.endswith(b"\n"):
            text = b""
            while (end := (piece := file.read(_PIECE)).find(b"\n") + 1) == 0:
                length += len(piece)
                if not piece:
                    return
                if length > LONGEST_SKIPPED:
                    raise UnsafeFileError(f"{file.name}: the line at byte {offset:,} is too long", fix="remove it")
            length += end
            file.seek(offset + length)
        yield Line(offset, length, text)
        offset += length


def unsafe(path: Path, *, root: Path | None = None, largest: int | None = None) -> str:
    """Why a file is not read; empty if it is, or is missing. The arguments are those of `open_file`."""
    try:
        open_file(path, root=root, largest=largest).close()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except UnsafeFileError as error:
        return error.message
    except OSError as error:
        return f"{path} can't be read: {error.strerror}"
    return ""


def is_below(path: Path, root: Path) -> bool:
    """Whether a path, links followed, is a folder or below it."""
    return os.path.join(os.path.realpath(path), "").startswith(os.path.join(os.path.realpath(root), ""))


def regular_files(folder: Path, root: Path) -> list[os.DirEntry[str]]:
    """The regular files in a folder; links count if they stay below `root`. Empty if the folder itself doesn't.

    Raises:
        OSError: the folder is missing, or can't be read.
    """
    if not is_below(folder, root):
        return []
    with os.scandir(folder) as entries:
        return [
            entry
            for entry in entries
            if entry.is_file(follow_symlinks=False)
            or (entry.is_symlink() and entry.is_file() and is_below(Path(entry.path), root))
        ]


def check_files(folder: Path, root: Path) -> None:
    """Refuse a folder in which, at any depth, something is not a regular file below `root`.

    Raises:
        UnsafeFileError: names the first one.
    """
    for path in sorted(folder.rglob("*")):
        if not path.is_dir() and (why := unsafe(path, root=root)):
            raise UnsafeFileError(why, fix="remove it")
