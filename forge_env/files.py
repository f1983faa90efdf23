"""Files: atomic writes, appending lines on a disk that may fill up, following growing files, locked folders."""

from __future__ import annotations

import errno
import fcntl
import glob
import itertools
import math
import os
import pwd
import shutil
import stat
import sys
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
"""Error numbers of a full disk, an exhausted quota, and the file size limit."""


class DiskFullError(ForgeError):
    """Data that could not be written because the disk is full."""


class FolderGoneError(ForgeError):
    """The folder that a process writes to was removed, renamed or replaced."""


def plain_name(text: str) -> str:
    """Replace what may not be part of a folder's name."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in text)


def _is_alive(pid: str) -> bool:
    if sys.platform == "linux":
        return Path("/proc", pid).exists()
    import psutil

    return psutil.pid_exists(int(pid))


@contextmanager
def written_whole(path: Path, as_good: Callable[[Path], object] = lambda path: False) -> Iterator[Path]:
    """Write a file or folder completely or not at all: yields a temporary path, renamed to `path` when the block ends.

    Several processes may do so at once. Partial files left beside it by killed processes are removed.

    Args:
        as_good: called with a folder that exists at `path` by the end of the block. If true, that folder is kept,
            because other processes may be reading it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for partial in path.parent.glob(f"{glob.escape(path.name)}.*.partial"):
        owner = partial.name.removesuffix(".partial").rsplit(".", 1)[-1]
        if not owner.isdigit() or not _is_alive(owner):
            remove(partial)
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
        except OSError:  # another process has just created it: its folder is equivalent
            if not path.is_dir():
                raise
    finally:
        remove(staging)


def remove(path: Path) -> None:
    """Remove a file, or a folder with its content; errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file's content atomically.

    Secrets in text are redacted (`forge_env.redaction`).
    """
    if isinstance(content, str):
        is_json = path.suffix == ".json"
        content = redact_json(content.encode(), indent=2) if is_json else redact(content).encode()
    with written_whole(path) as staging:
        staging.write_bytes(content)


class LineWriter:
    """Appends whole lines of JSON to a file, with secrets redacted (`forge_env.redaction`).

    A line has reached the operating system when `append` returns, so killing the process loses none. Several processes
    may append to one file. An incomplete last line, left by a killed process or a full disk, is truncated by the next
    writer. While the disk is full, lines are held in memory; they are written with later lines once there is space.

    Args:
        what: name of the lines in messages.
        reserve: bytes reserved in a second file. On a full disk that file is deleted, to make space for pending lines.
        most_held: maximum bytes held in memory; further lines are dropped and counted.
        on_full: called whenever a line could not be written.
        write: replacement for `os.write`.
    """

    exact: ClassVar[tuple[str, ...]] = ()
    """Keys of a line's object that are never redacted, because their values are not text."""

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
        """Whether the disk is full; reset by the code that waits for space."""
        self._closed = False
        self.dropped = 0
        """Number of dropped lines."""
        try:
            self._open()
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            self.full = True  # no inode is left: the file is created later
        if reserve:
            self._set_aside(reserve)

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with self._alone():
            pass

    @property
    def is_made(self) -> bool:
        """Whether the file exists; false until an inode is free."""
        return self._file >= 0

    @property
    def held(self) -> int:
        """Number of lines held in memory."""
        return len(self._held)

    def append(self, line: bytes) -> None:
        """Write a line, or hold it while the disk is full. The line feed is added here."""
        line = redact_json(line, self.exact)
        if self._held and not self.flush() and sum(map(len, self._held)) + len(line) > self._most_held:
            self.dropped += 1
            return
        self._held.append(line + b"\n")
        self.flush()

    def flush(self) -> bool:
        """Write the held lines, oldest first; return whether all were written."""
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
        """Close the file and delete the reserve.

        Raises:
            DiskFullError: some lines were dropped or could not be written; they are lost.
        """
        if self._closed:
            return
        self._closed = True
        written = self.flush()
        with suppress(OSError):  # already deleted, or the folder has become read-only
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
        """Continue in a new file that begins with a copy of the old one, even if the old one was deleted."""
        previous, self._path = self._file, path
        self._reserve = path.with_name(path.name + ".reserve")
        self._open()
        if previous >= 0:
            with open(previous, "rb") as written, open(self._file, "wb", closefd=False) as copy:
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
        """Hook for subclasses: the oldest held line was written at this offset."""
        return

    @contextmanager
    def _alone(self) -> Iterator[int]:
        """Lock the file against other writers; yield the offset after its last whole line, where writing continues."""
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
        """Create the reserve file; skip it if there is no space."""
        try:
            descriptor = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)
        except OSError:
            with suppress(OSError):
                self._reserve.unlink()


def end_of_last_line(descriptor: int) -> int:
    """Offset just after the last line feed; 0 if there is none."""
    end = os.fstat(descriptor).st_size
    if end and os.pread(descriptor, 1, end - 1) == b"\n":
        return end
    while end > 0:
        start = max(0, end - 65_536)
        position = os.pread(descriptor, end - start, start).rfind(b"\n")
        if position >= 0:
            return start + position + 1
        end = start
    return 0


class NewLines:
    """Follows a file that other processes append to, and yields each whole line once.

    A file that `forge_env.reading` refuses has no lines.

    Args:
        path: the file; it may be created later, truncated, deleted or replaced.
        longest: maximum bytes of a line; longer lines are skipped.
        largest: maximum bytes of the file, or None for no limit.
    """

    def __init__(self, path: Path, *, longest: int = LONGEST_ROW, largest: int | None = None) -> None:
        self.path = path
        self._longest, self._largest = longest, largest
        self._read = self._inode = 0

    def forget(self) -> None:
        """Read the file from its beginning the next time."""
        self._read = self._inode = 0

    def read(self, begin_again: Callable[[], object] = lambda: None) -> Iterator[bytes]:
        """Yield the lines added since the last call.

        Args:
            begin_again: called first if the file was truncated, replaced or removed, so earlier lines are obsolete.
        """
        try:
            with open_file(self.path, largest=self._largest) as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._read:
                    self._read, self._inode = 0, status.st_ino
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


class Inside:
    """A path inside a folder, as an attribute of its class; it follows a folder that moves."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: HeldFolder, owner: type) -> Path:
        return folder.root / self._name


class HeldFolder:
    """A folder locked for writing by one process. Nothing is created before it is locked."""

    another: ClassVar[str] = "choose another folder"
    """Advice on choosing another folder, for error messages."""
    inside: ClassVar[tuple[str, ...]] = ()
    """Subfolders that are created with it."""

    def __init__(self, root: Path | str) -> None:
        self.root = self._named = Path(root).absolute()
        self._lock: int | None = None

    def hold(self) -> Self:
        """Create the folder and its subfolders, and lock it until `release`. The result is also a context manager.

        Raises:
            ForgeError: it can't be created.
            UsageError: another process has locked it.
        """
        try:
            self.root.parent.mkdir(parents=True, exist_ok=True)
            self.root.mkdir(mode=stat.S_IRWXU, exist_ok=True)  # other users could read it, and lock its files
            for name in self.inside:
                (self.root / name).mkdir(parents=True, exist_ok=True)
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
        return self

    __enter__ = hold

    def is_there(self, *files: Path) -> bool:
        """Whether the path still refers to the locked folder, and the folder still contains these files."""
        if self._lock is None:
            return True
        try:
            same = os.path.samestat(os.stat(self.root), os.fstat(self._lock))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return same and all(path.exists() for path in files)

    def rescue(self) -> FolderGoneError:
        """Replace a folder that has disappeared by a new one beside it, `NAME.rescued-1`, and lock that.

        If it can't be created there, it is created in the folder for temporary files.

        Returns:
            The error with which the process should end.
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
        return FolderGoneError(
            f"{gone} was removed, renamed or replaced while it was written to",
            fix=f"all that could be saved is in {self.root}",
        )

    def release(self, *_: object) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    __exit__ = release


def claim(path: Path) -> Path:
    """Create the folder `path`; if it already exists, one with a number appended to its name."""
    for number in itertools.count(1):
        folder = path if number == 1 else path.with_name(f"{path.name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:  # the first write reports the reason
            break
        return folder
    return path


def unused(stem: Path) -> Path:
    """Return a path that doesn't exist yet: `stem` with the current time appended."""
    wanted = f"{stem.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (wanted if number == 1 else f"{wanted}-{number}" for number in range(1, 1000))
    return next(path for name in names if not (path := stem.with_name(name)).exists())


LOGS = Path("/tmp")


def monarch_logs() -> Path | None:
    """Return the folder, named after the user, in which Monarch writes its logs; None for a user id without a name."""
    with suppress(KeyError):
        return LOGS / pwd.getpwuid(os.geteuid()).pw_name
    return None


LONGEST_TMPDIR = 46
"""Maximum bytes of TMPDIR's path: a folder in it takes 24, a socket there 37 (vLLM's), of 107 that are allowed."""


def parent_of_sockets() -> Path:
    """Return the parent for folders with Unix sockets: TMPDIR, or /tmp if that path is too long for them."""
    chosen = Path(tempfile.gettempdir())
    return chosen if len(os.fsencode(chosen)) <= LONGEST_TMPDIR else Path("/tmp")
