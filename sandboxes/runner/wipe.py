"""Emptying a folder that a hostile program filled: any depth, no link followed, two descriptors."""

from __future__ import annotations

import errno
import itertools
import os

_MAX_ROUNDS = 100_000
_names = itertools.count()


def wipe(top: int) -> None:
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
