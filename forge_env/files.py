"""Files: written whole or not at all, line by line, on a disk that may run full, one process to a folder; read on."""

from __future__ import annotations

import errno
import fcntl
import glob
import itertools
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar, Self

from forge_env.errors import ForgeError, UsageError
from forge_env.reading import LONGEST_ROW, UnsafeFileError, open_file, whole_lines
from forge_env.redaction import redact, redact_json

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No room on the disk, in the quota, or under the limit of a file's size."""


class DiskFullError(ForgeError):
    """What should be kept can't be written."""


class FolderGoneError(ForgeError):
    """The folder that a process writes to was removed, renamed or replaced by another."""

    @classmethod
    def of(cls, gone: Path, rescued: Path) -> Self:
        """The error that names both folders."""
        fix = f"all that could be saved is in {rescued}"
        return cls(f"{gone} was removed, renamed or replaced while it was written to", fix=fix)


@contextmanager
def written_whole(path: Path, as_good: Callable[[Path], object] = lambda path: False) -> Iterator[Path]:
    """A place to write a file or make a folder at, which becomes `path` when the block ends: whole or not at all.

    Several processes may do so at once. What killed processes left half-written beside it is removed.

    Args:
        path: of the file or folder.
        as_good: asked of a folder that is there by the end of the block. If so it stays: somebody may read it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f"{glob.escape(path.name)}.*.partial"):
        owner = left.name.removesuffix(".partial").rsplit(".", 1)[-1]
        if not owner.isdigit() or not Path("/proc", owner).exists():
            remove(left)
    staging = path.with_name(f"{path.name}.{os.getpid()}.partial")
    remove(staging)
    try:
        yield staging
        if not staging.is_dir():
            staging.replace(path)
            return
        if path.is_dir() and as_good(path):
            return
        shutil.rmtree(path, ignore_errors=True)
        try:
            staging.rename(path)
        except OSError:  # another process was quicker, by a moment: its folder is as good
            if not path.is_dir():
                raise
    finally:
        remove(staging)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that it has its old content or the new one, whatever happens meanwhile.

    A text is written without secrets (`forge_env.redaction`).
    """
    if isinstance(content, str):
        is_json = path.suffix == ".json"
        content = redact_json(content.encode(), indent=2) if is_json else redact(content).encode()
    with written_whole(path) as staging:
        staging.write_bytes(content)


class LineWriter:
    """Appends whole lines of JSON, without secrets (`forge_env.redaction`). Each is with the operating system when
    `append` returns, so a kill loses none.

    Several processes may append to one file. An incomplete last line, which a killed process or a full disk left, is
    cut off by whoever writes next. On a full disk lines are held in memory, and written with the next ones as soon as
    there is room.

    Args:
        path: of the file; its folder is made.
        what: the lines are called in messages.
        reserve: bytes set aside in a file beside it: when the disk is full they are given up, so that what is under
            way can still be written.
        most_held: bytes held at most; lines beyond are dropped and counted.
        on_full: called whenever something could not be written.
        write: of the operating system.
    """

    exact: ClassVar[tuple[str, ...]] = ()
    """Keys of a line's object whose values are not text, and are never changed."""

    def __init__(
        self,
        path: Path,
        *,
        what: str = "records",
        reserve: int = 0,
        most_held: float = math.inf,
        on_full: Callable[[], object] = lambda: None,
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        self._path = path
        self._file = -1
        self._write = write
        self._what = what
        self._most_held = most_held
        self._on_full = on_full
        self._reserve = path.with_name(path.name + ".reserve")
        self._held: list[bytes] = []
        self.full = False
        """Whether the disk is full; code that waits for room resets it."""
        self._closed = False
        self.dropped = 0
        """Lines that were given up."""
        try:
            self._open()
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            self.full = True  # no inode is left: the file is made when there is one
        if reserve:
            self._set_aside(reserve)

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with self._alone():
            pass

    @property
    def is_made(self) -> bool:
        """Whether the file was made: not yet if no inode was left."""
        return self._file >= 0

    @property
    def held(self) -> int:
        """Lines that wait for room."""
        return len(self._held)

    def append(self, line: bytes) -> None:
        """Write a line (its line feed is added), or hold it while the disk is full."""
        line = redact_json(line, self.exact)
        if self._held and not self.flush() and sum(map(len, self._held)) + len(line) > self._most_held:
            self.dropped += 1
            return
        self._held.append(line + b"\n")
        self.flush()

    def flush(self) -> bool:
        """Write what is held, oldest first; whether all of it could be."""
        while self._held:
            try:
                self._append(self._held[0])
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                self.full = True
                if self._reserve.exists():
                    self._reserve.unlink()
                    continue
                self._on_full()
                return False
            self._held.pop(0)
        return True

    def close(self) -> None:
        """Close the file and give the reserve back.

        Raises:
            DiskFullError: lines are still held, or were dropped; they are lost.
        """
        if self._closed:
            return
        self._closed = True
        written = self.flush()
        with suppress(OSError):  # it is there no more, or the folder has become read-only
            self._reserve.unlink()
        written = written or self.flush()
        if self._file >= 0:
            os.close(self._file)
        if lost := self.held + self.dropped:
            raise DiskFullError(f"the disk is full: {lost} {self._what} could not be written", fix="free some space")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def move(self, path: Path) -> None:
        """Continue in another file, which begins with all that was written; the old one may have been removed."""
        before, self._path = self._file, path
        self._reserve = path.with_name(path.name + ".reserve")
        self._open()
        if before >= 0:
            with open(before, "rb") as written, open(self._file, "wb", closefd=False) as copy:
                written.seek(0)
                shutil.copyfileobj(written, copy)

    def _append(self, line: bytes) -> None:
        if self._file < 0:
            self._open()
        with self._alone() as start:
            done = 0
            try:
                while done < len(line):
                    done += self._write(self._file, line[done:])
            except OSError:
                os.ftruncate(self._file, start)
                raise
        self.written(start, len(line))

    def written(self, offset: int, length: int) -> None:
        """The oldest line that was held is in the file now, at this offset; a subclass may keep account of it."""
        return

    @contextmanager
    def _alone(self) -> Iterator[int]:
        """No other process writes meanwhile; yields the end of the last whole line, where this one goes on."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            end = end_of_last_line(self._file)
            if end < os.fstat(self._file).st_size:
                os.ftruncate(self._file, end)
            os.lseek(self._file, end, os.SEEK_SET)
            yield end
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _set_aside(self, size: int) -> None:
        """Make the reserve; without room for it, go on without."""
        try:
            descriptor = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)
        except OSError:
            with suppress(OSError):
                self._reserve.unlink()


def end_of_last_line(descriptor: int, longest: float = math.inf) -> int:
    """Offset just behind the last line feed, searched from the end; 0 if the last `longest` bytes have none."""
    size = end = os.fstat(descriptor).st_size
    if end and os.pread(descriptor, 1, end - 1) == b"\n":
        return end
    while end > 0 and size - end < longest:
        start = max(0, end - 65_536)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


class NewLines:
    """The whole lines of a file that others append to, each once. One that is not read (`reading`) has none.

    Args:
        path: it may come later, be cut short, go, or be replaced by another.
        longest: bytes of a line; longer ones are left out.
        largest: bytes of the file; None: any number.
    """

    def __init__(self, path: Path, *, longest: int = LONGEST_ROW, largest: int | None = None) -> None:
        self.path = path
        self._longest, self._largest = longest, largest
        self._read = self._inode = 0

    def read(self, begin_again: Callable[[], object] = lambda: None) -> Iterator[bytes]:
        """Lines since the last call.

        Args:
            begin_again: called first when the file was truncated, replaced or removed: earlier lines count no more.
        """
        try:
            with open_file(self.path, largest=self._largest) as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._read:
                    self._read, self._inode = 0, found.st_ino
                    begin_again()
                file.seek(self._read)
                for line in whole_lines(file, self._longest):
                    self._read += line.length
                    if line.text:
                        yield line.text
        except (OSError, UnsafeFileError):
            if self._inode:
                self._read = self._inode = 0
                begin_again()


class HeldFolder:
    """A folder that one process at a time writes to. Nothing is created before it is held."""

    another: ClassVar[str] = "choose another folder"
    """How a person chooses another one."""

    def __init__(self, root: Path | str) -> None:
        self.root = self._named = Path(root).absolute()
        self._lock: int | None = None

    @property
    def inside(self) -> tuple[Path, ...]:
        """Folders in it that are made with it."""
        return ()

    def hold(self) -> None:
        """Make the folder with those inside, and hold it until `release`.

        Raises:
            ForgeError: it can't be made.
            UsageError: another process holds it.
        """
        try:
            for path in (self.root, *self.inside):
                path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ForgeError(f"can't create the folder {self.root}: {error.strerror}", fix=self.another) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise UsageError(
                f"another process is writing to {self.root}", fix=f"wait for it, or {self.another}"
            ) from error

    def is_there(self, *files: Path) -> bool:
        """Whether the path still leads to the folder that is held, and it still has these files."""
        if self._lock is None:
            return True
        try:
            same = os.path.samestat(os.stat(self.root), os.fstat(self._lock))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return same and all(path.exists() for path in files)

    def rescue(self) -> FolderGoneError:
        """Hold a new folder beside the one that is gone, `NAME.rescued-1`: all paths are in it from here on.

        Where none can be made there, it is in the folder for temporary files.

        Returns:
            The error to end with.
        """
        gone = self.root
        self.release()
        try:
            for number in itertools.count(1):
                self.root = self._named.with_name(f"{self._named.name}.rescued-{number}")
                with suppress(FileExistsError):
                    self.root.mkdir(parents=True)
                    break
        except OSError:
            self.root = Path(tempfile.mkdtemp(prefix=f"{self._named.name}.rescued-"))
        self.hold()
        return FolderGoneError.of(gone, self.root)

    def release(self) -> None:
        """Let other processes have the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        self.hold()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def claim(path: Path) -> Path:
    """Make the folder `path`, or where another process has just done so, one with a number after its name."""
    for number in itertools.count(1):
        found = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            found.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:  # whoever writes to it says why
            break
        return found
    return path


def unused(stem: Path) -> Path:
    """A path that doesn't exist yet: `stem`, and the time."""
    wanted = f"{stem.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (wanted if number == 1 else f"{wanted}-{number}" for number in range(1, 1000))
    return next(path for name in names if not (path := stem.with_name(name)).exists())
