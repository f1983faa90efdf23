"""The folder of an evaluation. A sample that has finished is never lost, whatever happens next.

config.yaml               the evaluation as it was asked for
trajectories/eval.jsonl   one sample a line, transcripts included, only ever appended to; of two lines with one id
                          (a sample lost to infrastructure and played again) the later counts
summary.json, report.md   what came of it
rescored.json             of which folder these are the transcripts, scored again, and which could not be
run.log                   warnings and errors
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from forge_env.errors import ForgeError, UsageError
from forge_env.evaluation.plan import NoSuchMetricError, SampleResult, check_record, result_of
from forge_env.trajectory import Trajectory, end_of_last_record, read_trajectories

if TYPE_CHECKING:
    from forge_env.evaluation.summary import Summary

BALLAST_BYTES = 4 * 2**20
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No room on the disk, in the quota, or under the limit of a file's size."""


class DiskFullError(ForgeError):
    """The results can't be written: samples that have finished are held in memory until there is room."""


class ResultsFolder:
    """Paths of one evaluation, held by one process at a time while it is open."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).absolute()
        self.config = self.root / "config.yaml"
        self.samples = self.root / "trajectories" / "eval.jsonl"
        self.summary = self.root / "summary.json"
        self.report = self.root / "report.md"
        self.log = self.root / "run.log"
        self.rescored = self.root / "rescored.json"
        self.damage: list[str] = []
        """What could not be read of the samples."""
        self._lock: int | None = None

    def exists(self) -> bool:
        """Whether an evaluation has been written here, if only one sample of it."""
        return self.samples.exists() and self.samples.stat().st_size > 0

    def trajectories(self) -> Iterator[Trajectory]:
        """Every record in order, superseded ones included. A damaged line is noted in `damage` and left out."""
        self.damage.clear()
        if not self.samples.exists():
            return iter(())
        return read_trajectories(self.samples, on_damage=self.damage.append, check=check_record)

    def results(self, score: str) -> Iterator[tuple[Trajectory, SampleResult]]:
        """Every record with its figures, in order. A metric's damaged name costs its own sample only.

        Raises:
            NoSuchMetricError: no valid sample of an environment has the metric `score`.
        """
        nameless: list[tuple[Trajectory, NoSuchMetricError]] = []
        named: set[str] = set()
        for trajectory in self.trajectories():
            try:
                result = result_of(trajectory, score)
            except NoSuchMetricError as error:
                nameless.append((trajectory, error))
                continue
            if trajectory.valid:
                named.add(trajectory.environment)
            yield trajectory, result
        for trajectory, missing in nameless:
            if trajectory.environment not in named:
                raise missing
            self.damage.append(f"{self.samples}, sample {trajectory.id}: {missing}")

    def remove_if_empty(self) -> None:
        """Remove a folder in which nothing has happened: no sample, no warning, no log of a server."""
        kept = [path for path in self.root.rglob("*") if path.is_file() and path.stat().st_size]
        if not self.exists() and set(kept) <= {self.config, self.summary, self.report}:
            shutil.rmtree(self.root, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.samples.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ForgeError(f"can't create {self.root}: {error.strerror}", fix="choose another --out") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._release()
            raise UsageError(
                f"another process is writing to {self.root}", fix="wait for it, or choose another --out"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def open_folder(path: Path | str) -> ResultsFolder:
    """A folder that holds an evaluation; `UsageError` when it doesn't."""
    folder = ResultsFolder(path)
    if not folder.config.exists():
        raise UsageError(f"{path} holds no evaluation", fix="give the folder that forge-env eval wrote")
    return folder


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it has its old text or the new one, whatever happens meanwhile."""
    staging = path.with_name(path.name + ".partial")
    try:
        staging.write_text(text, encoding="utf-8")
        staging.replace(path)
    except OSError:
        with suppress(OSError):
            staging.unlink()
        raise


class SampleWriter:
    """Appends whole records. Each is with the operating system when `write` returns, so a kill loses none.

    A few megabytes are set aside when it opens: when the disk is full they are given up, so that what is under way
    can still be written.
    """

    def __init__(self, path: Path, *, write: Callable[[int, bytes], int] = os.write) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._write = write
        self._ballast = path.with_name(path.name + ".reserve")
        self._held: list[bytes] = []
        self.full = False
        """Whether the disk has run full; nothing new should be started then."""
        end = end_of_last_record(self._file)
        os.ftruncate(self._file, end)
        os.lseek(self._file, end, os.SEEK_SET)
        self._reserve()

    @property
    def held(self) -> int:
        """Records that wait for room."""
        return len(self._held)

    def write(self, trajectory: Trajectory) -> None:
        """Append a record, or hold it when the disk is full."""
        record = json.dumps(trajectory.to_dict(), separators=(",", ":")).encode() + b"\n"
        self._held.append(record)
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
                if self._ballast.exists():
                    self._ballast.unlink()
                    continue
                return False
            self._held.pop(0)
        return True

    def close(self) -> None:
        """Close the file and give the reserve back.

        Raises:
            DiskFullError: records are still held; they are lost.
        """
        if self._file < 0:
            return
        written = self.flush()
        with suppress(FileNotFoundError):
            self._ballast.unlink()
        written = written or self.flush()
        os.close(self._file)
        self._file = -1
        if not written:
            raise DiskFullError(
                f"the disk is full: {self.held} finished samples could not be written",
                fix="free some space; --resume plays them again",
            )

    def _append(self, record: bytes) -> None:
        start = os.lseek(self._file, 0, os.SEEK_CUR)
        done = 0
        try:
            while done < len(record):
                done += self._write(self._file, record[done:])
        except OSError:
            os.ftruncate(self._file, start)
            os.lseek(self._file, start, os.SEEK_SET)
            raise

    def _reserve(self) -> None:
        """Set the ballast aside; without room for it, go on without."""
        try:
            descriptor = os.open(self._ballast, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(descriptor, 0, BALLAST_BYTES)
            finally:
                os.close(descriptor)
        except OSError:
            with suppress(OSError):
                self._ballast.unlink()


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Warnings and errors of the platform go to a file while the block runs."""
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logger = logging.getLogger("forge_env")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()


@dataclass(slots=True)
class EvaluationResult:
    """What an evaluation came to."""

    folder: Path
    summary: Summary
    samples: list[SampleResult]
    """One for each sample that was played, in a fixed order."""
    error: ForgeError | None = None
    """Why the run ended early, where it did; `resume=True` continues it."""

    def trajectories(self) -> Iterator[Trajectory]:
        """The transcripts of `samples`, read from the folder."""
        wanted = {sample.id for sample in self.samples}
        latest = {trajectory.id: number for number, trajectory in enumerate(open_folder(self.folder).trajectories())}
        for number, trajectory in enumerate(open_folder(self.folder).trajectories()):
            if trajectory.id in wanted and latest[trajectory.id] == number:
                yield trajectory

    def to_frame(self) -> Any:
        """A pandas frame, one row a sample; metrics are columns `metrics.NAME`."""
        try:
            import pandas  # type: ignore[import-untyped]
        except ImportError as error:
            raise UsageError("pandas is not installed", fix="pip install pandas") from error
        return pandas.json_normalize([asdict(sample) for sample in self.samples])
