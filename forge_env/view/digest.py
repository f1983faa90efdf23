"""The digest of a run in one object: answers to four questions, typical failures and successes, and facts.

`forge-env show`, the report in its three forms and the pages agree, because all of them use the answers of
`forge_env.view.answers`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_env.errors import UsageError
from forge_env.evaluation.tables import exceptions
from forge_env.figures import duration
from forge_env.hacks.findings import Findings, find
from forge_env.trajectory import Trajectory
from forge_env.view.answers import Learned, Limit, Reasons, learned, limit, reasons, sample_limit
from forge_env.view.evaluations import parts_of
from forge_env.view.failures import Failure, failures, failures_of, unsolved_of
from forge_env.view.filter import UNSOLVED, Filter
from forge_env.view.records import UnreadableError, read
from forge_env.view.runs import RunView

SEARCHED = 2_000
"""Maximum episodes, spread over the run, that a report searches for reward hacks."""
MOST_CLASSES = 6
"""Maximum classes of failures that are shown."""


@dataclass(frozen=True, slots=True)
class Example:
    """One episode to read."""

    kind: str
    """Name of its file, without the extension."""
    why: str
    """The class of failures, or the reward, of which it is an example."""
    episode: Trajectory


@dataclass(slots=True)
class Digest:
    """A run or an evaluation, summarized for people."""

    run: RunView
    """The run; its trajectories may be closed."""
    kind: str
    """Kind of the episodes that `failures` covers, as in `Filter`."""
    looked_at: str
    """The kind in words: samples, held-out episodes or training episodes."""
    episodes: int
    """Number of episodes of this kind."""
    failures: list[Failure] = field(default_factory=list)
    unsolved: int = 0
    """Number of training episodes, or samples, with the maximum reward for an unsolved task."""
    scores: list[str] = field(default_factory=list)
    """For an evaluation: the score of each environment in words."""
    learned: Learned = field(default_factory=Learned)
    reasons: Reasons = field(default_factory=Reasons)
    limit: Limit = field(default_factory=Limit)
    examples: list[Example] = field(default_factory=list)
    hacks: Findings | None = None
    """Signs of reward hacks; None: not searched."""

    @property
    def failure_words(self) -> str:
        """The typical failure in a sentence."""
        what = self.looked_at
        if not self.episodes:
            return "No episodes recorded."
        if not self.failures:
            return f"All {self.episodes:,} {what} got the maximum reward."
        most = max(self.failures, key=lambda failure: failure.count)
        fallen = f"{sum(failure.count for failure in self.failures):,} of {self.episodes:,} {what} failed"
        return f"{fallen}; most common: {most.name} ({most.count:,})."

    @property
    def unsolved_words(self) -> str:
        """The number of episodes with the maximum reward for an unsolved task, in a sentence; empty if none."""
        text = f"{self.unsolved:,} got the maximum reward without solving the task: check for reward hacking."
        return text if self.unsolved else ""

    @property
    def headline(self) -> str:
        """Environment, model, steps, wall time and state in one line."""
        summary, recipe, rows = self.run.summary, self.run.config, self.run.metrics
        environments, wall_s = summary.get("environments"), summary.get("wall_s")
        several = ", ".join(environments) if isinstance(environments, dict) else ""
        model = summary.get("model") or recipe.get("model")
        model = model.get("path") if isinstance(model, dict) else model
        parts = [
            self.run.environment or str(summary.get("environment") or several),
            Path(str(model)).name if model else "",
            f"{rows[-1]['step']} steps" if rows and rows[-1]["step"] else "",
            duration(wall_s) if isinstance(wall_s, int | float) and wall_s else "",
            self.run.state,
        ]
        return " · ".join(part for part in parts if part)


def digest(root: Path, *, examples: int = 0, cache: Path | None = None) -> Digest:
    """Read a run or an evaluation, finished or not.

    Args:
        examples: number of failures, and of successes, to read in full.
        cache: folder for the index of its trajectories; None: a temporary folder.

    Raises:
        OSError: the folder can't be read.
    """
    with opened(root, cache) as run:
        result = digest_of(run)
        if examples:
            add_episodes(result, examples)
    return result


@contextmanager
def opened(root: Path, cache: Path | None = None) -> Iterator[RunView]:
    """Open a run or an evaluation with an index of all its trajectories.

    Args:
        cache: folder of the index; None: a temporary folder.
    """
    with ExitStack() as stack:
        folder = cache or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forge-env-")))
        run = RunView(root, folder)
        run.index.update()
        try:
            yield run
        finally:
            run.index.connection().close()


def digest_of(run: RunView, around: int | None = None) -> Digest:
    """Summarize an opened run.

    Args:
        around: compare the episodes just before and just after this step; None: the first and the last fifth.
    """
    kind, looked_at = failures_of(run)
    result = Digest(
        run=run,
        kind=kind,
        looked_at=looked_at,
        episodes=run.queries.count(kind),
        failures=failures(run, kind),
        unsolved=unsolved_of(run),
    )
    if run.is_evaluation:
        result.scores, result.limit = [*_scores(run)], sample_limit(run.queries)
    else:
        result.learned, result.reasons, result.limit = learned(run), reasons(run, around), limit(run)
    return result


def add_episodes(found: Digest, examples: int) -> None:
    """Add typical failures and successes, at most `examples` of each, and signs of reward hacking."""
    found.examples = [*_examples(found, examples)]
    if found.episodes:
        with suppress(UsageError):  # no episode is readable
            found.hacks = find(found.run.root, most=SEARCHED)


def _scores(run: RunView) -> Iterator[str]:
    """Yield the scores of the summary or, while there is none, the scores of the samples so far."""
    listed = False
    for item in run.scores:
        score = item.get("score")
        if isinstance(score, dict) and all(isinstance(score.get(key), int | float) for key in ("value", "stderr")):
            figure = f"{score['value']:.3f} ± {score['stderr']:.3f}"
            of = f"{item.get('samples')} of {item.get('planned')} samples"
            yield f"{item.get('label')}: {figure} (standard error; {item.get('tasks')} tasks, {of})"
            yield from exceptions(item)
            listed = True
    for part in [] if listed else parts_of(run):
        if part.score is not None:
            figure = f"{part.score.value:.3f} ± {part.score.stderr:.3f}"
            yield f"{part.name}: {figure} (standard error; {part.tasks} tasks, {part.samples} samples so far)"


def _examples(found: Digest, most: int) -> Iterator[Example]:
    """Yield a typical failure of each of the largest classes, then the best newest episodes of median length."""
    wanted: list[tuple[str, Mapping[str, Any]]] = [
        (failure.name, failure.typical) for failure in found.failures if failure.typical is not None
    ][:most]
    where, values = Filter(kind=found.kind).where()
    good = found.run.queries.rows(
        f"select * from t where {where} and outcome = 'ended' and reward > (select min(reward) from t) "
        f"and reward >= (select max(reward) from t where {where} and outcome = 'ended') "
        f"and not coalesce({UNSOLVED}, 0) order by key desc limit 101",
        values,
    )
    by_length = sorted(map(dict, good), key=lambda row: (row["tokens"], row["turns"]))
    middle = len(by_length) // 2
    typical = sorted(range(len(by_length)), key=lambda place: abs(place - middle))
    by_task: dict[str, dict[str, Any]] = {}
    for place in typical:
        by_task.setdefault(by_length[place]["task"], by_length[place])
    wanted += [(f"reward {best['reward']:g} of {best['best']:g}", best) for best in [*by_task.values()][:most]]
    for why, row in wanted:
        try:
            episode, _ = read(found.run.index, row)
        except UnreadableError:
            continue
        yield Example(str(row["kind"]), why, episode)
