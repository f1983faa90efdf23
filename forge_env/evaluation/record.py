"""The folder of an evaluation. A finished sample is never lost, whatever happens next.

config.yaml               configuration of the evaluation
trajectories/eval.jsonl   one sample per line, with its transcript; append-only. Of two lines with one id (a sample lost
                          to infrastructure and played again) the later counts
summary.json, report.md   results
rescored.json             for transcripts that were scored again: their source folder, and those that could not be
run.log                   warnings and errors
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_env.errors import ForgeError, UsageError
from forge_env.evaluation.plan import NoSuchMetricError, SampleResult, check_record, result_of
from forge_env.files import HeldFolder, Inside
from forge_env.reading import check_readable
from forge_env.trajectory import Trajectory, read_trajectories
from forge_env.visible import one_line

if TYPE_CHECKING:
    from forge_env.evaluation.results import Results
    from forge_env.evaluation.summary import Summary


class ResultsFolder(HeldFolder):
    """Folder of one evaluation; one process at a time can have it open."""

    another = "choose another --out"
    inside = ("trajectories",)

    def __init__(self, root: Path | str) -> None:
        super().__init__(root)
        self.damage: list[str] = []
        """Descriptions of sample records that could not be read."""

    config = Inside("config.yaml")
    samples = Inside("trajectories/eval.jsonl")
    summary = Inside("summary.json")
    report = Inside("report.md")
    log = Inside("run.log")
    rescored = Inside("rescored.json")
    """Source of transcripts that were scored again, in their folder only."""

    def exists(self) -> bool:
        """Whether at least one sample has been written."""
        return self.samples.exists() and self.samples.stat().st_size > 0

    def trajectories(self) -> Iterator[Trajectory]:
        """Read every record in order, including superseded ones. Damaged lines are noted in `damage` and skipped."""
        self.damage.clear()
        if not self.samples.exists():
            return iter(())
        return read_trajectories(self.samples, on_damage=self.damage.append, check=check_record, root=self.root)

    def results(self, score: str) -> Iterator[tuple[Trajectory, SampleResult]]:
        """Read every record with its result, in order. A damaged metric name affects only its own sample."""
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
        """Remove the folder if it holds no results: no sample, no warning, no server log."""
        present = [path for path in self.root.rglob("*") if path.is_file() and path.stat().st_size]
        if not self.exists() and set(present) <= {self.config, self.summary, self.report}:
            shutil.rmtree(self.root, ignore_errors=True)


def open_folder(path: Path | str) -> ResultsFolder:
    """Open the folder of an evaluation. Raises `UsageError` if it holds none."""
    folder = ResultsFolder(path)
    if not folder.config.exists():
        raise UsageError(f"{path} contains no evaluation", fix="give the folder that forge-env eval wrote")
    check_readable(folder.root)
    return folder


@dataclass(slots=True)
class EvaluationResult:
    """Results of an evaluation.

    Examples:
        >>> import tempfile
        >>> import forge_env as fe
        >>> result = fe.evaluate("calculator", "gold", num_tasks=2, out=tempfile.mkdtemp())
        >>> [trajectory.reward for trajectory in result.trajectories()]
        [1.0, 1.0]
    """

    folder: Path
    """Folder with all files of the evaluation."""
    summary: Summary
    """Scores with their errors, by environment, and costs."""
    samples: Results
    """Result of each sample that was played, in a fixed order: a sequence of `SampleResult`."""
    error: ForgeError | None = None
    """Why the run ended early, or None; `resume=True` continues it."""

    def __str__(self) -> str:
        """One line per environment: its score, the number of samples that it covers, and problems."""
        from forge_env.evaluation.tables import headlines

        return "\n".join(headlines(self.summary))

    def __repr__(self) -> str:
        """Five lines: model and status, two of scores, usage, the folder."""
        from forge_env.evaluation.tables import outline

        failed = f" {one_line(str(self.error), 100)}" if self.error else ""
        return "\n".join([*outline(self.summary), f"{self.folder}{failed}"])

    def _repr_html_(self) -> str:
        """Tables of the scores, for notebooks."""
        from forge_env.evaluation.tables import footnotes, html, tables

        return html(tables(self.summary), [*footnotes(self.summary), str(self.folder)])

    def trajectories(self) -> Iterator[Trajectory]:
        """Read the transcripts of `samples` from the folder."""
        wanted = {sample.id for sample in self.samples}
        latest = {trajectory.id: number for number, trajectory in enumerate(open_folder(self.folder).trajectories())}
        for number, trajectory in enumerate(open_folder(self.folder).trajectories()):
            if trajectory.id in wanted and latest[trajectory.id] == number:
                yield trajectory

    def to_frame(self) -> Any:
        """Convert to a pandas data frame with one row per sample; metrics are columns `metrics.NAME`."""
        try:
            import pandas  # type: ignore[import-untyped]
        except ImportError as error:
            raise UsageError("pandas is not installed", fix="pip install pandas") from error
        return pandas.json_normalize([asdict(sample) for sample in self.samples])
