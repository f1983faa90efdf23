"""The card of an environment: `grade.html`, one self-contained page of what `forge-env grade` measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from forge_env.evaluation.estimates import Estimate
from forge_env.figures import duration
from forge_env.grading.results import Grade, TaskGrade, Tried
from forge_env.view.report import escaped, page, section

MOST = 200
"""Maximum accepted mutants on the page; `grade.json` has all."""


def card(grade: Grade) -> str:
    """Render the page of a grade."""
    total = grade.rejected()
    state = "weak" if grade.survivors or grade.problems() else "ok"
    parts = [
        f"{len(grade.tasks)} task{'s' * (len(grade.tasks) != 1)}",
        f"{len(grade.tried)} wrong versions",
        duration(grade.seconds),
    ]
    share = "no wrong versions" if total is None else f"{_percent(total.value)} rejected"
    return page(f"{grade.environment}: {share}", state, " · ".join(parts), _body(grade))


def interval(estimate: Estimate | None) -> str:
    """Format a share with its interval: 98.8 % (95.9 to 99.7)."""
    if estimate is None:
        return "\u2013"
    return f"{_percent(estimate.value)} ({100 * estimate.low:.1f} to {100 * estimate.high:.1f})"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _body(grade: Grade) -> Iterator[str]:
    rows = [(f"mean reward of the policy {name}", interval(estimate)) for name, estimate in grade.scores().items()]
    rows.append(("wrong versions that the judge rejects", interval(grade.rejected())))
    rows += [(f"\u00b7 {kind}", interval(grade.rejected(kind))) for kind in grade.kinds]
    rows += [(name, str(number)) for name, number in left_out(grade) if number]
    yield section("Shares, with 95 % intervals", rows)
    if (run := grade.recorded) is not None:
        rows = [(f"pass@{k}", interval(estimate)) for k, estimate in run.pass_at.items()]
        rows += [("groups with signal", interval(run.signal)), ("reward hacking", run.findings.words)]
        yield section(f"{run.folder}: {run.episodes:,} episodes of {run.tasks:,} tasks", rows)
    if problems := [*grade.problems(), *grade.notes()]:
        yield _list("Tasks with problems, and without wrong versions", problems)
    if grade.survivors:
        yield f"<section><h2>Wrong versions with the full reward</h2>{''.join(_weak(grade.survivors[:MOST]))}</section>"
    if (more := len(grade.survivors) - MOST) > 0:
        yield f'<section class="soft">{more} more are in grade.json</section>'
    marks = {"ok": "", "note": "", "open": "not checked: ", "failed": "failed: "}
    yield section(
        "Checks of forge-env validate", [(check.name, marks[check.status] + check.detail) for check in grade.checks]
    )
    tasks = [(task.id, _task(task)) for task in grade.tasks]
    yield section(f"All {len(tasks)} tasks", tasks, folded=True)


def left_out(grade: Grade) -> Iterator[tuple[str, int]]:
    """Yield why wrong versions are left out or doubtful, with their number."""
    yield "left out: no difference from the gold solution was seen", grade.counted("equivalent")
    yield "left out: the infrastructure or the environment failed on them", grade.counted("lost")
    yield "undecided, counted as accepted", grade.counted("undecided")


def _task(task: TaskGrade) -> str:
    rejected, all_of = task.counts.get("rejected", 0), sum(task.counts.values())
    counts = f"{rejected} of {all_of} rejected" if all_of else task.problem or task.note
    return f"{counts}; {duration(task.judging_s, fine=True)} an episode; about {task.tokens:,} tokens"


def _list(title: str, texts: Iterable[str]) -> str:
    return f"<section><h2>{escaped(title)}</h2>{''.join(f'<p>{escaped(text)}</p>' for text in texts)}</section>"


def _weak(survivors: Iterable[Tried]) -> Iterator[str]:
    """The accepted mutants of each task, with the missing tests."""
    for task, tried in groupby(sorted(survivors, key=lambda one: one.task), key=lambda one: one.task):
        yield f"<details open><summary>{escaped(task)}</summary>"
        for one in tried:
            doubt = "" if one.verdict == "accepted" else f" ({one.verdict}: {one.note})"
            where = f"{one.piece}, line {one.line}, {one.kind}"
            yield f'<div class="message"><b>{escaped(where)}</b> <code>{escaped(one.change)}</code>{escaped(doubt)}'
            if one.test:
                yield f"<pre>{escaped(one.test)}\n# the wrong version: {escaped(one.got)}</pre>"
            yield "</div>"
        yield "</details>"
