"""`forge-env grade`: how good an environment's tasks are."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_env.cli.command import Parser, add_environment, environment_options, number
from forge_env.errors import UsageError
from forge_env.figures import duration
from forge_env.files import plain_name
from forge_env.machine import user_path
from forge_env.validation.checks import UNPLAYABLE
from forge_env.visible import one_line, visible

if TYPE_CHECKING:
    from forge_env.grading.recorded import Recorded
    from forge_env.grading.results import Grade, TaskGrade, Tried

MARKS = {"open": "??", "failed": "!!"}
SHOWN = 12
"""Maximum accepted mutants listed; `grade.json` and the page have all."""


def add_arguments(parser: Parser) -> None:
    """Add the command's arguments."""
    from forge_env.grading.grade import MUTANTS
    from forge_env.validation.checks import NUM_TASKS

    add_environment(parser)
    parser.add_argument("-n", "--num-tasks", type=int, default=NUM_TASKS, metavar="N", help="tasks of each split")
    parser.add_argument("--mutants", type=int, default=MUTANTS, metavar="N", help="wrong versions of each task")
    parser.add_argument(
        "--fail-under",
        type=number,
        metavar="PERCENT",
        help="exit with 1 if the judge rejects fewer of the wrong versions, a check fails, or a task has a problem",
    )
    parser.add_argument(
        "--run", dest="recorded", metavar="RUN", help="recorded run or evaluation: difficulty, signal, unearned rewards"
    )
    parser.add_argument("--judge", metavar="MODULE:FUNCTION", help="second judge of its episodes, as in hacks")
    parser.add_argument("--out", metavar="DIR", help="folder of grade.json and grade.html (default: runs/grade-NAME)")
    parser.add_argument("--json", action="store_true", help="print grade.json instead of a summary")


def run(args: argparse.Namespace) -> int:
    """Print a summary, write the card, and return 1 if the grade is too low."""
    from forge_env.cli.hacks import load_judge, recorded_folder
    from forge_env.files import unused, write_whole
    from forge_env.grading.recorded import recorded
    from forge_env.interrupts import run_until_interrupted
    from forge_env.registry import make
    from forge_env.view.card import card

    if args.fail_under is not None and not 0 <= args.fail_under <= 100:
        raise UsageError(f"--fail-under {args.fail_under:g} is not a percentage", fix="use 0 to 100")
    if args.judge is not None and args.recorded is None:
        raise UsageError("--judge needs recorded episodes", fix="add --run RUN")
    name, options = environment_options(args)
    folder = None if args.recorded is None else recorded_folder(args.recorded)
    judge = None if args.judge is None else load_judge(args.judge)
    out = unused(Path("runs") / f"grade-{plain_name(name)}") if args.out is None else user_path(args.out)
    played = None
    if folder is not None:
        played = recorded(folder, make(name, **options).max_reward or 1.0, judge=judge)
    with new_folder(out):
        grade = run_until_interrupted(_grade(name, options, args))
    grade.recorded = played
    text = json.dumps(grade.as_json(), indent=1)
    write_whole(out / "grade.json", f"{text}\n")
    write_whole(out / "grade.html", card(grade))
    if args.json:
        print(text)
    else:
        print("\n".join(lines(grade)))
        print(f"{out / 'grade.html'}")
    if why := too_low(grade, args.fail_under):
        print(f"forge-env: the grade is too low: {why}", file=sys.stderr)
    return 1 if why else 0


@contextmanager
def new_folder(path: Path) -> Iterator[None]:
    """Create a folder before the work that needs it, and remove it if the work fails."""
    new = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:  # an interrupt too
        if new:
            with suppress(OSError):
                path.rmdir()
        raise


def too_low(grade: Grade, fail_under: float | None) -> str:
    """Why a grade is too low for `--fail-under`, or ""."""
    if fail_under is None:
        return ""
    if failed := [check.name for check in grade.checks if check.status == "failed"]:
        return f"a check failed: {failed[0]}"
    if bad := [f"{visible(task.id)}: {visible(task.problem)}" for task in grade.tasks if task.problem]:
        return bad[0] + (f", and {len(bad) - 1} more tasks have problems" if bad[1:] else "")
    total = grade.rejected()
    if total is None:
        return "there are no wrong versions"
    return f"{100 * total.value:.1f} % is under {fail_under:g} %" if 100 * total.value < fail_under else ""


async def _grade(name: str, options: dict[str, Any], args: argparse.Namespace) -> Grade:
    from forge_env.grading.grade import grade_environment
    from forge_env.interrupts import say
    from forge_env.loop_guard import LoopGuard
    from forge_env.registry import make
    from forge_env.sandbox.engines import LazyEngine

    def show(task: TaskGrade) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K   {one_line(task.id, 60)}", end="\r", file=sys.stderr, flush=True)

    async with LazyEngine(args.sandbox, docker_host=args.docker_host) as engine:
        with LoopGuard(20.0, 0.0, say, at_once=True):
            return await grade_environment(
                lambda: make(name, sandboxes=engine, **options),
                name,
                options,
                num_tasks=args.num_tasks,
                mutants=args.mutants,
                on_note=lambda text: print(f"forge-env: {visible(text)}", file=sys.stderr, flush=True),
                on_task=show,
            )


def lines(grade: Grade) -> Iterator[str]:
    """Format a grade for the terminal."""
    from forge_env.view.card import interval, left_out

    tasks = f"{len(grade.tasks)} task{'s' * (len(grade.tasks) != 1)}"
    yield f"{grade.environment}: {tasks}, {len(grade.tried)} wrong versions, {duration(grade.seconds)}"
    for check in grade.checks:
        if check.status in MARKS or check.name.endswith(UNPLAYABLE):
            yield f"{MARKS.get(check.status, '--')} {check.name}: {visible(one_line(check.detail, 500))}"
    for policy, estimate in grade.scores().items():
        yield f"   {policy:<22} {interval(estimate):<25} mean reward"
    yield f"   {'rejected':<22} {interval(grade.rejected()):<25} of the wrong versions"
    for kind in grade.kinds:
        yield f"     {kind:<20} {interval(grade.rejected(kind))}"
    yield from (f"   {number} {name}" for name, number in left_out(grade) if number)
    if grade.recorded is not None:
        yield from _recorded(grade.recorded)
    yield from (f"-- {visible(text)}" for text in grade.notes())
    yield from (f"!! {visible(text)}" for text in grade.problems())
    for tried in grade.survivors[:SHOWN]:
        yield from _survivor(tried)
    if (more := len(grade.survivors) - SHOWN) > 0:
        yield f"   {more} more are in grade.json"


def _recorded(run: Recorded) -> Iterator[str]:
    from forge_env.view.card import interval

    yield f"   {one_line(run.folder, 60)}: {run.episodes:,} episodes of {run.tasks:,} tasks"
    for k, estimate in run.pass_at.items():
        yield f"     {f'pass@{k}':<20} {interval(estimate)}"
    yield f"     {'groups with signal':<20} {interval(run.signal)}"
    yield f"     {visible(run.findings.words)}"


def _survivor(tried: Tried) -> Iterator[str]:
    verdict = "" if tried.verdict == "accepted" else f" ({tried.verdict}: {tried.note})"
    where = visible(f"{tried.task}: {tried.piece}, line {tried.line}")
    yield f"!! {where}: {one_line(tried.change, 100)}{visible(verdict)}"
    for line in tried.test.splitlines():
        yield f"      {visible(line)}"
    if tried.got:
        yield f"      # the wrong version: {one_line(tried.got, 80)}"
