"""A recorded run in Python and notebooks: five lines as text, a table and a curve as HTML."""

from __future__ import annotations

import os
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_env.display.curves import reward_curves, unit_bounds
from forge_env.display.svg import SERIES, legend, line_chart
from forge_env.errors import UsageError
from forge_env.machine import user_path
from forge_env.reading import check_readable
from forge_env.view.runs import is_run
from forge_env.visible import one_line, visible

if TYPE_CHECKING:
    from forge_env.view.digest import Digest

STYLE = (
    ".forge-env-run svg { max-width: 720px; } .forge-env-run :is(th, td) { text-align: left; vertical-align: top; }"
    ".forge-env-run .grid { stroke: #8884; } .forge-env-run text { fill: currentColor; font-size: 11px; }"
    ".forge-env-run .line { fill: none; stroke-width: 2; }"
    ".forge-env-run .key { margin-right: 14px; } .forge-env-run .key i "
    "{ display: inline-block; width: 12px; height: 3px; margin-right: 6px; vertical-align: 3px; }"
) + "".join(
    f".forge-env-run .c{number} {{ stroke: {colour}; }} .forge-env-run .dot.c{number} {{ fill: {colour}; }}"
    f".forge-env-run i.c{number} {{ background: {colour}; }}"
    for number, colour in enumerate(SERIES)
)


@dataclass(slots=True)
class RecordedRun:
    """A training run or an evaluation on disk, as it was when it was opened.

    Examples:
        >>> import tempfile
        >>> import forge_env as fe
        >>> result = fe.evaluate("calculator", "gold", num_tasks=2, out=tempfile.mkdtemp())
        >>> run = fe.open_run(result.folder)
        >>> run.state, run.summary["model"]
        ('finished', 'gold')
    """

    folder: Path
    """Its folder."""
    state: str
    """running, finished, failed, interrupted, stopped; an evaluation may also be incomplete or lossy."""
    summary: dict[str, Any]
    """Its summary.json; empty if there is none yet."""
    metrics: list[dict[str, Any]]
    """Its metrics, one row per step."""
    digest: Digest
    """The answers of its report: did it learn, how it fails, what limited the speed."""

    def to_frame(self) -> Any:
        """Convert the metrics to a pandas data frame with one row per step."""
        try:
            import pandas  # type: ignore[import-untyped]
        except ImportError as error:
            raise UsageError("pandas is not installed", fix="pip install pandas") from error
        return pandas.DataFrame(self.metrics)

    def __repr__(self) -> str:
        from forge_env.view.report import answers, in_a_row

        found = [f"{question} {in_a_row(sentences)}" for question, sentences in answers(self.digest)]
        chosen = [found[0], found[1], found[-1]]
        lines = [f"{self.folder.name}: {self.digest.headline}", *chosen, str(self.folder)]
        return "\n".join(one_line(line, 160) for line in lines)

    def _repr_html_(self) -> str:
        from forge_env.view.report import answers, in_a_row

        rows = "".join(
            f"<tr><th>{question}</th><td>{escape(visible(in_a_row(sentences)))}</td></tr>"
            for question, sentences in answers(self.digest)
        )
        head = f"<p><b>{escape(visible(self.folder.name))}</b> {escape(visible(self.digest.headline))}</p>"
        curves, chart = reward_curves(self.metrics, self.digest.run.scored_by), ""
        if curves:
            bounds = unit_bounds(curves)
            chart = line_chart(curves, width=720, height=260, bounds=bounds, label="Reward over steps")
            chart = legend([line.label for line in curves]) + chart
        return f'<div class="forge-env-run"><style>{STYLE}</style>{head}<table>{rows}</table>{chart}</div>'


def open_run(folder: str | os.PathLike[str]) -> RecordedRun:
    """Read a training run or an evaluation, finished or not.

    Args:
        folder: its folder, or its name in `runs/`.

    Raises:
        UsageError: it is neither a run nor an evaluation, or has a file that can't be read.

    Examples:
        >>> import tempfile
        >>> import forge_env as fe
        >>> result = fe.evaluate("calculator", "gold", num_tasks=2, out=tempfile.mkdtemp())
        >>> fe.open_run(result.folder).state
        'finished'
    """
    from forge_env.view.digest import digest

    found = digest(folder_of_run(os.fspath(folder)))
    run = found.run
    return RecordedRun(run.root, run.state, {**run.summary}, [{**row} for row in run.metrics], found)


def folder_of_run(text: str) -> Path:
    """Find the folder of a run or an evaluation: the given path, or `runs/NAME`.

    Raises:
        UsageError: it contains neither a run nor an evaluation, or an unreadable file.
    """
    for path in (user_path(text), Path("runs") / text):
        if path.is_dir() and is_run(path):
            check_readable(path.absolute())
            return path.absolute()
    raise UsageError(
        f"{one_line(text)} is neither a run nor an evaluation", fix="give a folder written by forge-env train or eval"
    )
