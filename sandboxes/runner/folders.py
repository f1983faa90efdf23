"""One writable folder of a sandbox: whether it was touched, and making it as it was, whatever a program put there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
from typing import Any

from . import archives

_COUNTING = ("tmpfs", "mqueue")
"""File systems where the size of a folder tells how many entries it has."""
_TIMES = (0, 0)
"""Of access and change: the same in every sandbox, so that they tell nothing."""
_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602
"""Of an inode, as `lsattr` shows them."""
_NO_FLAGS = bytes(8)
_MAX_ROUNDS = 100_000
_names = itertools.count()


class Folder:
    """A folder that is looked at and emptied through one descriptor. Made by somebody who may read it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._counting = _file_system(path) in _COUNTING
        with contextlib.suppress(OSError):  # a folder of the image's that is not ours
            os.utime(self.fd, ns=_TIMES)
        info = os.fstat(self.fd)
        self._mode = info.st_mode & 0o7777
        self._flags = _flags(self.fd)
        self._clean = self._look()
        self._changed = info.st_ctime_ns
        self._was_empty = not os.listdir(self.fd)

    def untouched(self) -> bool:
        """Whether nobody can have done anything here since it was last seen clean: three system calls at most.

        The time of the last change can't be set by anybody, but is no finer than a tick of the clock; number of
        entries, attributes and free space of the file system, which is this folder's alone, make up for that.
        """
        return self._counting and os.fstat(self.fd).st_ctime_ns == self._changed and self._look() == self._clean

    def fill(self) -> None:
        """Put back what was in it; nothing."""

    def empty(self) -> None:
        """Remove what the calling user may remove, and undo what it did to the folder itself."""
        self._restore_itself()  # first, for it may have been locked
        _wipe(self.fd)
        self._restore_itself()

    def restore(self) -> list[str]:
        """After emptying: what is still not as it was."""
        self._restore_itself()
        left = [os.path.join(self.path, name) for name in os.listdir(self.fd)] if self._was_empty else []
        now, clean = self._look(), self._clean
        self._changed = os.fstat(self.fd).st_ctime_ns
        left += [f"{self.path}: attributes" for _ in _attributes(self.fd)[:1]]
        if _flags(self.fd) != self._flags:
            left.append(f"{self.path}: flags")
        return left or [f"{self.path}: {what}" for what in now if now[what] != clean[what]]

    def _restore_itself(self) -> None:
        """Mode, access lists, other attributes and times of the folder itself."""
        with contextlib.suppress(OSError):  # not its owner, whose turn comes or was
            if os.fstat(self.fd).st_mode & 0o7777 != self._mode:
                os.chmod(self.fd, self._mode)
            for name in _attributes(self.fd):
                os.removexattr(self.fd, name)
            if _flags(self.fd) != self._flags:
                fcntl.ioctl(self.fd, _SET_FLAGS, self._flags)
            os.utime(self.fd, ns=_TIMES)

    def _look(self) -> dict[str, Any]:
        info, space = os.fstat(self.fd), os.fstatvfs(self.fd)
        return {
            "mode": info.st_mode,
            "owner": (info.st_uid, info.st_gid),
            "entries": (info.st_nlink, info.st_size) if self._counting else (),
            "space": (space.f_bfree, space.f_ffree) if self._counting else (),
        }


class Seeded(Folder):
    """A folder that begins with what is in an archive. Made by the user whose files these are to be.

    Whether files deep inside were changed can't be told without reading all of them, so that it is always filled anew.
    """

    def __init__(self, path: str, archive: str) -> None:
        self._archive = archive
        archives.unpack(archive)
        self._left: list[str] = []
        super().__init__(path)

    def untouched(self) -> bool:  # noqa: D102
        return False

    def fill(self) -> None:
        """Unpack it again."""
        self._left = os.listdir(self.fd)
        try:
            archives.unpack(self._archive)
        except OSError as error:
            self._left.append(str(error))

    def restore(self) -> list[str]:  # noqa: D102
        return [f"{self.path}: {name}" for name in self._left] or super().restore()


def _attributes(fd: int) -> list[str]:
    try:
        return os.listxattr(fd)
    except OSError:  # a file system without any
        return []


def _flags(fd: int) -> bytes:
    try:
        return fcntl.ioctl(fd, _GET_FLAGS, _NO_FLAGS)
    except OSError:  # a file system without any
        return _NO_FLAGS


def _file_system(path: str) -> str:
    """The type of the file system mounted at exactly `path`, empty when `path` is only a folder of another."""
    kind = ""
    written = os.fsencode(path)
    for character in b"\\ \t\n":  # escaped as in the kernel's list
        written = written.replace(bytes([character]), b"\\%03o" % character)
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            fields, _, rest = line.partition(b" - ")
            if fields.split(b" ")[4] == written:
                kind = rest.split(b" ")[0].decode()  # the last mount hides earlier ones
    return kind


# --- emptying: any depth, no link followed, two descriptors


def clear(path: str) -> None:
    """Remove everything inside a folder that this user may remove."""
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _wipe(top)
    finally:
        os.close(top)


def _wipe(top: int) -> None:
    """Remove everything inside the folder `top` (a descriptor) that this user may remove; the folder itself stays.

    A folder that is not empty has its own folders moved up to the top first, so depth costs neither stack nor
    descriptors, and paths longer than PATH_MAX are no hiding place.
    """
    for _ in range(_MAX_ROUNDS):
        if not _one_round(top):
            return


def _one_round(top: int) -> bool:
    """Remove or lift every entry of `top` once; True when something was lifted and another round is due."""
    lifted = False
    with os.scandir(top) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        if not _remove(name, top):
            lifted |= _lift(name, top)
    return lifted


def _remove(name: str, folder: int) -> bool:
    """Remove a file or an empty folder; True when it is gone or can't be dealt with."""
    try:
        os.unlink(name, dir_fd=folder)
        return True
    except (IsADirectoryError, PermissionError):
        pass
    except OSError:
        return True
    try:
        os.rmdir(name, dir_fd=folder)
        return True
    except OSError as error:
        return error.errno not in (errno.ENOTEMPTY, errno.EEXIST)


def _lift(name: str, top: int) -> bool:
    """Empty the folder `name` of `top` by one level, moving its folders to `top`."""
    try:
        os.chmod(name, 0o700, dir_fd=top)
        folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
    except OSError:
        return False
    lifted = False
    try:
        with os.scandir(folder) as entries:
            inside = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for child, is_folder in inside:
            try:
                if is_folder:
                    os.chmod(child, 0o700, dir_fd=folder)  # moving a folder rewrites its '..': it must be writable
                    os.rename(child, f".wipe-{next(_names)}", src_dir_fd=folder, dst_dir_fd=top)
                    lifted = True
                else:
                    os.unlink(child, dir_fd=folder)
            except OSError:
                continue
    finally:
        os.close(folder)
    _remove(name, top)
    return lifted
