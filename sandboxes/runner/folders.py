"""A writable folder of a sandbox: detects whether it was touched, and restores it whatever a program put there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
from typing import Any

from . import archives

_COUNTING = ("tmpfs", "mqueue")
"""File systems where a folder's size reveals its number of entries."""
_TIMES = (0, 0)
"""Access and modification time, the same in every sandbox, so that programs learn nothing from them."""
_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602
"""ioctl numbers for inode flags, as shown by `lsattr`."""
_NO_FLAGS = bytes(8)
_MAX_ROUNDS = 100_000
_names = itertools.count()


class Folder:
    """A folder inspected and emptied through one descriptor. The creating user must be able to read it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._counting = _file_system(path) in _COUNTING
        with contextlib.suppress(OSError):  # a folder of the image that belongs to another user
            os.utime(self.fd, ns=_TIMES)
        info = os.fstat(self.fd)
        self._mode = info.st_mode & 0o7777
        self._flags = _flags(self.fd)
        self._clean = self._look()
        self._changed = info.st_ctime_ns
        self._was_empty = not os.listdir(self.fd)

    def untouched(self) -> bool:
        """Whether the folder is certainly unchanged since it was last clean. Makes at most three system calls.

        The change time can't be set by programs, but has only the resolution of a clock tick. Therefore the number of
        entries, the attributes, and the free space of the file system, which holds only this folder, are compared too.
        """
        return self._counting and os.fstat(self.fd).st_ctime_ns == self._changed and self._look() == self._clean

    def fill(self) -> None:
        """Restore the initial content; this class has none."""

    def empty(self) -> None:
        """Remove everything that the calling user may remove, and undo its changes to the folder itself."""
        self._restore_itself()  # first, since permissions may have been removed
        _wipe(self.fd)
        self._restore_itself()

    def restore(self) -> list[str]:
        """Finish the restoration after `empty` and `fill`. Returns the remaining differences."""
        self._restore_itself()
        remaining = [os.path.join(self.path, name) for name in os.listdir(self.fd)] if self._was_empty else []
        now, clean = self._look(), self._clean
        self._changed = os.fstat(self.fd).st_ctime_ns
        remaining += [f"{self.path}: attributes" for _ in _attributes(self.fd)[:1]]
        if _flags(self.fd) != self._flags:
            remaining.append(f"{self.path}: flags")
        return remaining or [f"{self.path}: {what}" for what in now if now[what] != clean[what]]

    def _restore_itself(self) -> None:
        """Restore the folder's own mode, access lists, attributes, flags and times."""
        with contextlib.suppress(OSError):  # the folder belongs to another slot's user, who restores it
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
    """A folder whose initial content is an archive. Created by the user who is to own its files.

    Changes to files deep inside can't be detected without reading them all, so it is always refilled.
    """

    def __init__(self, path: str, archive: str) -> None:
        self._archive = archive
        archives.unpack(archive)
        self._left: list[str] = []
        super().__init__(path)

    def untouched(self) -> bool:  # noqa: D102
        return False

    def fill(self) -> None:
        """Extract the archive again."""
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
    except OSError:  # a file system without attributes
        return []


def _flags(fd: int) -> bytes:
    try:
        return fcntl.ioctl(fd, _GET_FLAGS, _NO_FLAGS)
    except OSError:  # a file system without flags
        return _NO_FLAGS


def _file_system(path: str) -> str:
    """Type of the file system mounted at exactly `path`, or an empty string if `path` is not a mount point."""
    kind = ""
    written = os.fsencode(path)
    for character in b"\\ \t\n":  # escaped as in the kernel's mount list
        written = written.replace(bytes([character]), b"\\%03o" % character)
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            fields, _, rest = line.partition(b" - ")
            if fields.split(b" ")[4] == written:
                kind = rest.split(b" ")[0].decode()  # the last mount hides earlier ones
    return kind


# --- emptying folders of any depth, without following links, with two descriptors


def clear(path: str) -> None:
    """Remove everything inside a folder that the calling user may remove."""
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _wipe(top)
    finally:
        os.close(top)


def _wipe(top: int) -> None:
    """Remove everything inside a folder that the calling user may remove.

    Subfolders are moved up to the top before a folder is removed. Depth therefore costs neither stack nor descriptors,
    and files can't hide behind paths longer than PATH_MAX.
    """
    for _ in range(_MAX_ROUNDS):
        if not _one_round(top):
            return


def _one_round(top: int) -> bool:
    """Remove or lift every entry of `top` once. Returns whether one was lifted, so that another round is needed."""
    lifted = False
    with os.scandir(top) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        if not _remove(name, top):
            lifted |= _lift(name, top)
    return lifted


def _remove(name: str, folder: int) -> bool:
    """Remove a file or an empty folder. True if it is gone or can't be removed."""
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
    """Empty the folder `name` of `top` by one level, moving its subfolders to `top`."""
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
                    os.chmod(child, 0o700, dir_fd=folder)  # moving a folder rewrites its '..', so it must be writable
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
