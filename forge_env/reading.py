"""Safe reading of untrusted files: only regular files below a given folder, in bounded pieces.

A run folder may come from an untrusted source. A named pipe in it would block its reader forever, a link to
`/dev/zero` never ends, a link to `~/.ssh` would expose files outside the folder to the viewer, and a line may have any
length. Every file in the folder of a run, an evaluation or a checkpoint is therefore opened by this module.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from forge_env.errors import UsageError

T = TypeVar("T")
ANYWHERE = Path("/")
"""Value of `root` for a file named by the user, which may be a link to any place."""
LONGEST_LINE = 64 << 20
"""Maximum bytes of a line that is read, such as the record of an episode."""
LONGEST_ROW = 4 << 20
"""Maximum bytes of a line of metrics, events or the log."""
LONGEST_SKIPPED = 1 << 30
"""Maximum bytes of a line that is skipped; reading a file stops with an error at a longer one."""
LARGEST_DOCUMENT = 8 << 20
"""Maximum bytes of a JSON document."""
LARGEST_RECIPE = 1 << 19
"""Maximum bytes of a recipe in a run folder; smaller because YAML is slower to parse."""
LARGEST_TABLE = 128 << 20
"""Maximum bytes of a file that is loaded into memory: rows of metrics, a tokenizer, a checkpoint's index."""
LARGEST_NUMBER = 1e100
"""Maximum absolute value of a number that is read: sums of squares of such numbers fit in a float."""
LONGEST_NUMBER = 1_000
"""Maximum characters of a number."""
LARGEST_COUNT = 2**63 - 1
"""Maximum absolute value of a count, a position or an id that is read; SQLite and numpy hold no larger ones."""
_PIECE = 1 << 20
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class UnsafeFileError(UsageError):
    """A file that is refused: it is not a regular file, is outside its folder, or is too large."""


class Line(NamedTuple):
    """A line of a file.

    Attributes:
        offset: position of its first byte in the file.
        length: bytes, including the line feed.
        text: content including the line feed; empty if the line exceeds the requested length.
    """

    offset: int
    length: int
    text: bytes


def folder_of(path: Path) -> Path:
    """Run folder that a file belongs to: RUN for `RUN/metrics.jsonl` and `RUN/trajectories/train.jsonl`."""
    return path.parent.parent if path.parent.name == "trajectories" else path.parent


def open_file(path: Path, *, root: Path | None = None, largest: int | None = None) -> BufferedReader:
    """Open a regular file below `root` for reading. Never blocks, and has no side effects on pipes and devices.

    Args:
        path: the file. Links are followed as long as they stay below `root`.
        root: folder that must contain it; by default its run folder (`folder_of`). `ANYWHERE` allows every folder.
        largest: maximum size in bytes, or None for no limit.

    Raises:
        UnsafeFileError: it is not a regular file, is outside `root`, or is too large.
        OSError: it is missing or unreadable.
    """
    folder = os.path.realpath(folder_of(path) if root is None else root)
    if sys.platform != "linux":  # without O_PATH, a file that is replaced in between is opened unchecked
        target = os.path.realpath(path, strict=True)
        _check_file(path, target, folder, os.lstat(target), largest)
        flags_more = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return open(target, "rb", opener=lambda name, flags: os.open(name, flags | flags_more))
    # O_PATH does not open the file yet (no pipe blocks, no tape rewinds) but pins it for the later open
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        pinned = f"/proc/self/fd/{descriptor}"
        _check_file(path, os.readlink(pinned), folder, os.fstat(descriptor), largest)
        return open(path, "rb", opener=lambda _, flags: os.open(pinned, flags | os.O_NONBLOCK | os.O_CLOEXEC))
    finally:
        os.close(descriptor)


def _check_file(path: Path, target: str, folder: str, info: os.stat_result, largest: int | None) -> None:
    """Raise `UnsafeFileError` unless `target`, which `path` leads to, may be read."""
    if not target.startswith(os.path.join(folder, "")):
        raise UnsafeFileError(f"{path} is a link to {target}, outside of {folder}", fix="replace it with a copy")
    if not stat.S_ISREG(info.st_mode):
        kind = _KINDS.get(stat.S_IFMT(info.st_mode), "a special file")
        raise UnsafeFileError(f"{path} is {kind}, not a file", fix="remove it")
    if largest is not None and info.st_size > largest:
        raise UnsafeFileError(f"{path} has {info.st_size:,} bytes; at most {largest:,} are read", fix="shorten it")


def read_bytes(path: Path, *, largest: int = LARGEST_DOCUMENT, root: Path | None = None) -> bytes:
    """Read a file. Raises the errors of `open_file`."""
    with open_file(path, root=root, largest=largest) as file:
        return file.read(largest)  # the file may have grown


def read_text(path: Path, *, largest: int = LARGEST_DOCUMENT, root: Path | None = None) -> str:
    """Read a file as text, with invalid UTF-8 replaced. Raises the errors of `open_file`."""
    return read_bytes(path, largest=largest, root=root).decode("utf-8", "replace")


def is_bounded(value: object, largest: float = LARGEST_NUMBER) -> bool:
    """Whether a value is no number, or a finite one of at most `largest`; with others, arithmetic could fail."""
    return not isinstance(value, int | float) or abs(value) <= largest


def read_json(path: Path, *, largest: int = LARGEST_DOCUMENT, root: Path | None = None) -> Any:
    """Read a JSON document. Raises the errors of `open_file` and `parse_json`."""
    return parse_json(read_text(path, largest=largest, root=root))


def parse_json(text: str) -> Any:
    """Parse a JSON document. `ValueError`: it isn't JSON, is nested too deeply, or has a number beyond the largest."""
    try:
        return json.loads(text, parse_int=partial(_number, int), parse_float=partial(_number, float))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _number(kind: Callable[[str], T], text: str) -> T:
    if len(text) <= LONGEST_NUMBER and abs(float(text)) <= LARGEST_NUMBER:
        return kind(text)
    raise ValueError(f"the number {text[:20]}{'...' * (len(text) > 20)} is too large: {LARGEST_NUMBER:g} is the most")


def whole_lines(file: BinaryIO, longest: int = LONGEST_LINE) -> Iterator[Line]:
    """Yield the lines of a file from its current position; an incomplete last line is omitted."""
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
    """Reason why a file is refused; "" if it is readable or missing. The arguments are those of `open_file`."""
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
    """Whether a path, with links resolved, is `root` or below it."""
    return os.path.join(os.path.realpath(path), "").startswith(os.path.join(os.path.realpath(root), ""))


def regular_files(folder: Path, root: Path) -> list[os.DirEntry[str]]:
    """List the regular files in a folder, including links that stay below `root`.

    The list is empty if the folder itself is not below `root`.
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
    """Check that a folder contains, at any depth, only regular files below `root`."""
    for path in sorted(folder.rglob("*")):
        if not path.is_dir() and (why := unsafe(path, root=root)):
            raise UnsafeFileError(why, fix="remove it")


# ---
# The files of a run or an evaluation

LARGEST: Mapping[str, int | None] = {
    "config.yaml": LARGEST_RECIPE,
    "summary.json": LARGEST_DOCUMENT,
    "contract.jsonl": LARGEST_DOCUMENT,
    "metrics.jsonl": LARGEST_TABLE,
    "trained.jsonl": LARGEST_TABLE,
    "timeline.json": None,
    "run.log": None,
}
"""Maximum bytes of the files of a run or an evaluation that are read; None: unlimited."""


def unreadable(root: Path) -> Iterator[str]:
    """Yield why files of a run or an evaluation can't be read; missing files are fine."""
    for name, largest in LARGEST.items():
        if why := unsafe(root / name, largest=largest):
            yield why
    folder = root / "trajectories"
    if not os.path.isdir(folder):
        return
    if not is_below(folder, root):
        yield f"{folder} is a link to {os.path.realpath(folder)}, outside of {root}"
        return
    try:
        with os.scandir(folder) as entries:
            special = sorted(
                entry.path
                for entry in entries
                if entry.name.endswith(".jsonl") and not entry.is_file(follow_symlinks=False)
            )
    except OSError as error:
        yield f"{folder} can't be read: {error.strerror}"
        return
    yield from filter(None, map(unsafe, map(Path, special)))


def check_readable(root: Path) -> None:
    """Refuse a folder with a file that can't be read. `UsageError`: names the first such file."""
    if why := next(unreadable(root), ""):
        raise UsageError(why, fix="remove it, or put a copy of the file in its place")
