"""Temporary files of a run: one folder, removed with the run, or by the next command if the run was killed.

A running process holds a lock in its folder. The kernel releases the lock when the process ends in any way, so a folder
whose lock can be taken is abandoned. Process ids are not used: they are reused and differ between containers.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forge_env.files import monarch_logs, parent_of_sockets

PREFIX = "forge-env-run-"
LOCK = "lock"
STARTS, START_S = 5, 0.02  # looks at a process that is being started, and seconds between two


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Create a temporary folder and make it TMPDIR for this process and its children while the block runs.

    The folder is created in TMPDIR, or in /tmp if that path is too long for the sockets in it.
    """
    folder, lock = locked_folder()
    earlier = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    # Monarch's own log is outside TMPDIR; this suffix identifies the run that it belongs to.
    os.environ["MONARCH_LOG_SUFFIX"] = folder.name
    try:
        yield folder
    finally:
        tempfile.tempdir = earlier[1]
        os.environ.pop("MONARCH_LOG_SUFFIX")
        if earlier[0] is None:
            os.environ.pop("TMPDIR")
        else:
            os.environ["TMPDIR"] = earlier[0]
        _remove(folder)
        os.close(lock)


def locked_folder() -> tuple[Path, int]:
    """Create a temporary folder that `reap_scratch` leaves alone until the returned descriptor is closed."""
    parent = parent_of_sockets()
    hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))
    lock = os.open(hidden / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return hidden.rename(parent / hidden.name.removeprefix(".")), lock  # visible to reapers only once it is locked


def reap_scratch() -> int:
    """Remove the folders of runs that ended without doing so, kill their remaining processes, and count the folders."""
    removed = 0
    for folder in parent_of_sockets().glob(f"{PREFIX}*"):
        with suppress(OSError):  # another reaper was faster
            if folder.lstat().st_uid != os.geteuid():
                continue
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _end_processes(folder)
                _remove(folder)
                removed += 1
            finally:
                os.close(lock)
    return removed


def _end_processes(folder: Path) -> None:
    """Kill the processes whose temporary folder it is; usually the kernel has ended all of them with the run."""
    import psutil

    processes = list(psutil.process_iter())
    for _ in range(STARTS):
        starting = []
        for process in processes:
            with suppress(psutil.Error, OSError):  # another user's, or it has ended meanwhile
                environment = process.environ()
                if environment.get("TMPDIR") == str(folder) and process.pid != os.getpid():
                    process.kill()
                elif not environment and process.exe():  # its program is being loaded: Linux shows no environment yet
                    starting.append(process)
        if not starting:
            break
        processes = starting
        time.sleep(START_S)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    logs = monarch_logs()
    if logs is not None:
        with suppress(OSError):  # there is none, or the folder isn't this user's
            (logs / f"monarch_log_{folder.name}.log").unlink()
