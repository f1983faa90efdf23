"""Trajectory files of a run: one for each kind, written by a thread, on a disk that may fill up."""

from __future__ import annotations

import asyncio
import glob
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

from forge_env.concurrency import to_its_end
from forge_env.files import NO_SPACE, DiskFullError
from forge_env.trajectory import Trajectory, TrajectoryWriter, read_trajectories
from forge_env.trajectory_index import index_path, is_index

MOST_HELD = 64 * 2**20
"""Maximum bytes of each kind of trajectory that wait in memory while the disk is full; more are dropped and counted."""
MOST_WAITING = 256
"""Number of trajectories waiting for the thread above which `drain` waits."""
MOST_OPEN = 4
"""Maximum files open at once: those of the kinds written to last. A file with data waiting for space stays open."""
SENT = 8
"""Episodes of an evaluation that loggers get."""
DISK_FULL = (
    "the disk is full: metrics and trajectories stay in memory until there is room. Free some space (df -h, df -i)"
)


def is_kept(keep: str, kind: str) -> bool:
    """Whether the recipe's `logging.trajectories` keeps this kind."""
    return keep == "all" or (keep == "eval" and kind != "train")


def recorded(folder: Path, kind: str) -> list[Path]:
    """List the files of a kind in a run's folder of trajectories: those of this host and of other hosts."""
    paths = [path for path in folder.glob(f"{glob.escape(kind)}*.jsonl") if not is_index(path)]
    return [path for path in paths if path.name == f"{kind}.jsonl" or path.name.startswith(f"{kind}-")]


def first_episodes(folder: Path, kind: str) -> list[Trajectory]:
    """Read the first recorded episodes of a kind; damaged records are skipped."""
    files = (read_trajectories(path, on_damage=lambda _: None, root=folder) for path in sorted(recorded(folder, kind)))
    return list(itertools.islice(itertools.chain.from_iterable(files), SENT))


def rename(folder: Path, kind: str, to: str) -> None:
    """Rename the files of `kind` to those of `to`, replacing the latter; writes of `to` then append to them."""
    for path in recorded(folder, to):
        index_path(path).unlink(missing_ok=True)
        path.unlink()
    for path in recorded(folder, kind):
        renamed = path.with_name(to + path.name.removeprefix(kind))
        path.rename(renamed)
        with suppress(FileNotFoundError):
            index_path(path).rename(index_path(renamed))


class TrajectoryFiles:
    """Append trajectories to `KIND.jsonl` in a folder, in the order of the calls.

    Only `drain`, `written` and `close` wait.

    Args:
        warn: called with a description of each trajectory that can't be recorded.
        on_full: called whenever something could not be written for lack of disk space.
        host: name of this host, if several write to the folder: its files are `KIND-HOST.jsonl`, since shared file
            systems can lose data that two machines append to one file.
    """

    def __init__(
        self, folder: Path, warn: Callable[[str], object], on_full: Callable[[], object], host: str = ""
    ) -> None:
        self._folder = folder
        self._suffix = f"-{host}.jsonl" if host else ".jsonl"
        self._warn = warn
        self._on_full = on_full
        self._open: OrderedDict[str, TrajectoryWriter] = OrderedDict()
        self._writing: deque[Future[bool]] = deque()
        self._thread = ThreadPoolExecutor(1, "forge-env-write")

    def write(self, trajectory: Trajectory, kind: str) -> None:
        """Hand over a trajectory, which must not be changed after this call.

        Raises:
            OSError: an earlier one could not be written, for a reason other than disk space.
        """
        self.submit(lambda: self._write(trajectory, kind))

    def submit(self, write: Callable[[], bool]) -> None:
        """Run `write` in the thread, after all that was handed over before.

        Args:
            write: writes something; returns whether data waits for disk space.

        Raises:
            OSError: as `write`.
        """
        while self._writing and self._writing[0].done():
            self._look_after(self._writing.popleft())
        self._writing.append(self._thread.submit(write))

    def move(self, folder: Path) -> None:
        """Continue in another folder, moving along the data of the kinds whose files are open."""

        def work() -> bool:
            self._folder = folder
            for kind, writer in self._open.items():
                writer.move(folder / f"{kind}{self._suffix}")
            return False

        self.submit(work)

    async def drain(self) -> None:
        """Wait while the thread is too far behind; callers that write many trajectories await this between them.

        Raises:
            OSError: as `write`.
        """
        while len(self._writing) > MOST_WAITING:
            first = asyncio.wrap_future(self._writing[0])
            await asyncio.wait([first])  # a cancelled caller cancels no writing
            first.exception()
            while self._writing and self._writing[0].done():
                self._look_after(self._writing.popleft())

    async def written(self) -> None:
        """Wait until all that was handed over is written or waits for disk space, even if the caller is cancelled."""
        if self._writing:
            last = asyncio.wrap_future(self._writing[-1])
            await to_its_end(asyncio.ensure_future(asyncio.wait([last])))
            last.exception()  # mark as retrieved: `write` raises it

    def close(self) -> None:
        """Write all waiting data, and close every file.

        Raises:
            OSError: something could not be written, for a reason other than disk space.
        """
        self._thread.shutdown()
        with ExitStack() as stack:
            while self._open:
                stack.callback(self._close, self._open.popitem()[1])
            while self._writing:
                self._look_after(self._writing.popleft())

    def _write(self, trajectory: Trajectory, kind: str) -> bool:
        """Write in the thread; return whether the trajectory waits for disk space."""
        writer = self._open.get(kind)
        if writer is None:
            if not self._folder.parent.is_dir():  # a removed folder must not reappear with a few files in it
                raise ValueError(f"{self._folder.parent} is gone")
            path = self._folder / f"{kind}{self._suffix}"
            writer = TrajectoryWriter(path, what=f"{kind} trajectories", most_held=MOST_HELD)
            self._open[kind] = writer
        self._open.move_to_end(kind)
        writer.write(trajectory)
        if not writer.held:
            for other in self._open.values():  # there is space again
                other.flush()
        done = [name for name, other in self._open.items() if name != kind and not other.held and not other.dropped]
        for name in done[: max(0, len(self._open) - MOST_OPEN)]:
            self._open.pop(name).close()
        return writer.held > 0

    def _close(self, writer: TrajectoryWriter) -> None:
        try:
            writer.close()
        except DiskFullError as error:
            self._warn(str(error))

    def _look_after(self, writing: Future[bool]) -> None:
        """Warn about a trajectory that can't be recorded; raise errors that end the run."""
        try:
            if writing.result():
                self._on_full()
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            self._on_full()
        except (TypeError, ValueError, RecursionError) as error:  # an environment put in values that are not JSON
            self._warn(f"a trajectory can't be recorded: {error}")
