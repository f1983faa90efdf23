"""What an evaluation returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_env.errors import ForgeError, UsageError
from forge_env.evaluation.samples import SampleResult
from forge_env.evaluation.store import open_folder
from forge_env.trajectory import Trajectory

if TYPE_CHECKING:
    from forge_env.evaluation.summary import Summary


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
