"""The card of an environment: `grade.html`, one self-contained page of what `forge-env grade` measured."""

from __future__ import annotations

from collections.abc import Iterator

from forge_env.evaluation.estimates import Estimate
from forge_env.figures import duration
from forge_env.grading.results import Grade, TaskGrade
from forge_env.view.rendering import body, saved_page

MOST = 200
"""Maximum accepted mutants on the page; `grade.json` has all."""
MARKS = {"ok": "", "note": "", "open": "not checked: ", "failed": "failed: "}
"""Words before the result of a check, by its status."""


def card(grade: Grade) -> str:
    """Render the page of a grade."""
    total, run = grade.rejected(), grade.recorded
    share = "no wrong versions" if total is None else f"{_percent(total.value)} rejected"
    title = f"{grade.environment}: {share}"
    parts = [
        f"{len(grade.tasks)} task{'s' * (len(grade.tasks) != 1)}",
        f"{len(grade.tried)} wrong versions",
        duration(grade.seconds),
    ]
    recorded_title, recorded = "", list[tuple[str, str]]()
    if run is not None:
        recorded_title = f"{run.folder}: {run.episodes:,} episodes of {run.tasks:,} tasks"
        recorded = [(f"pass@{k}", interval(estimate)) for k, estimate in run.pass_at.items()]
        recorded += [("groups with signal", interval(run.signal)), ("reward hacking", run.findings.words)]
    main = body(
        "grade",
        saved=True,
        title=title,
        sub=" \u00b7 ".join(parts),
        state="weak" if grade.survivors or grade.problems() else "ok",
        shares=[*_shares(grade)],
        recorded_title=recorded_title,
        recorded=recorded,
        problems=[*grade.problems(), *grade.notes()],
        weak=grade.survivors[:MOST],
        more=max(0, len(grade.survivors) - MOST),
        checks=[(check.name, MARKS[check.status] + check.detail) for check in grade.checks],
        tasks=[(task.id, _task(task)) for task in grade.tasks],
    )
    return saved_page(main, title)


def interval(estimate: Estimate | None) -> str:
    """Format a share with its interval: 98.8 % (95.9 to 99.7)."""
    if estimate is None:
        return "\u2013"
    return f"{_percent(estimate.value)} ({100 * estimate.low:.1f} to {100 * estimate.high:.1f})"


def left_out(grade: Grade) -> Iterator[tuple[str, int]]:
    """Yield why wrong versions are left out or doubtful, with their number."""
    yield "left out: no difference from the gold solution was seen", grade.counted("equivalent")
    yield "left out: the infrastructure or the environment failed on them", grade.counted("lost")
    yield "undecided, counted as accepted", grade.counted("undecided")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _shares(grade: Grade) -> Iterator[tuple[str, str]]:
    for name, estimate in grade.scores().items():
        yield f"mean reward of the policy {name}", interval(estimate)
    yield "wrong versions that the judge rejects", interval(grade.rejected())
    for kind in grade.kinds:
        yield f"\u00b7 {kind}", interval(grade.rejected(kind))
    yield from ((name, str(number)) for name, number in left_out(grade) if number)


def _task(task: TaskGrade) -> str:
    rejected, all_of = task.counts.get("rejected", 0), sum(task.counts.values())
    counts = f"{rejected} of {all_of} rejected" if all_of else task.problem or task.note
    return f"{counts}; {duration(task.judging_s, fine=True)} an episode; about {task.tokens:,} tokens"
