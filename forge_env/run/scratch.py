"""A run's temporary files: one folder that goes with the run, or with the next command after a run was killed.

Whoever lives holds a lock in its folder. The kernel drops the lock with the process, however it ends, so a folder
whose lock can be taken belongs to nobody; process ids, which are reused and differ between containers, play no part.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "forge-env-run-"
LOCK = "lock"
LONGEST = 46
"""Of the path of TMPDIR, in bytes: a folder in it takes 24, a socket there 37 (vLLM's), and 107 are all it may have."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder for this process and its children (TMPDIR) while the block runs.

    It lies in TMPDIR, or in /tmp where that path is too long for the sockets in it.
    """
    parent = parent_of_sockets()
    hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))
    lock = os.open(hidden / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = hidden.rename(parent / hidden.name.removeprefix("."))  # visible to reapers only once it is locked
    earlier = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    # Monarch's own log lies outside TMPDIR; with this suffix it can be told whose it is.
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


def reap_scratch() -> int:
    """Remove folders of runs that have ended without doing so, and end what still runs of them; returns how many."""
    removed = 0
    for folder in parent_of_sockets().glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or another reaper was first
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _end_processes(folder)
                _remove(folder)
                removed += 1
            finally:
                os.close(lock)
    return removed


def _end_processes(folder: Path) -> None:
    """End processes whose temporary folder it is. The kernel ends a run's processes with it: there are hardly any."""
    import psutil

    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # another user's, or it has ended meanwhile
            if process.environ().get("TMPDIR") == str(folder) and process.pid != os.getpid():
                process.kill()


def parent_of_sockets() -> Path:
    """Where a folder is made at whose sockets processes meet: TMPDIR, or /tmp where that path is too long for them."""
    chosen = Path(tempfile.gettempdir())
    return chosen if len(os.fsencode(chosen)) <= LONGEST else Path("/tmp")


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for log in Path("/tmp").glob(f"*/monarch_log_{folder.name}.log"):  # under the user's name, as Monarch knows it
        log.unlink(missing_ok=True)
