"""Grade the bundled environments, and tasks whose hidden tests were weakened on purpose.

    python -m benchmarks.grading [--weakened | --bundled] [--record]

A weakened task of `coding_rlvr` lacks all hidden checks that reject one known mistake, a slip of its generator such as
`x % 2 == 1` for even numbers. One of `repairs` is judged by its visible tests, which pass with the bug. Neither is made
of the mutants that `grade` draws.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import time
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import forge_env as fe
from benchmarks.report import record, table
from environments.coding_rlvr.checks import passes
from environments.coding_rlvr.environment import CodingRLVR
from environments.coding_rlvr.judging import arguments_of, trusted_call, trusted_function, wrong_codes
from environments.coding_rlvr.tasks import program_of
from environments.repairs.environment import Repairs
from forge_env.environment.base import Environment
from forge_env.evaluation.estimates import Estimate, share_of
from forge_env.grading.grade import MUTANTS, Grader, grade_environment
from forge_env.grading.results import Grade
from forge_env.sandbox import SandboxEngine
from forge_env.sandbox.engines import LazyEngine
from forge_env.types import Task

WEAKENED = 50
AIMS = {"found": 0.9, "false alarms": 0.05, "seconds": 600}


def _without_slip(task: Task) -> Task | None:
    """The task without the hidden checks that reject one slip; None if every check rejects every slip."""
    slips = wrong_codes(program_of(task))
    for code in Random(task.id).sample(slips, len(slips)):
        wrong = trusted_function(code)
        left = [check for check in task.data["hidden"] if passes(check, trusted_call(wrong, arguments_of(check)))]
        if left and len(left) < len(task.data["hidden"]):
            return task.model_copy(update={"data": {**task.data, "hidden": left}})
    return None


def _slips() -> list[tuple[Task, Task]]:
    """Tasks of `coding_rlvr`, complete and weakened."""
    env, pairs = CodingRLVR(), list[tuple[Task, Task]]()
    for index in itertools.count():
        task = env.task("eval", index)
        if (weak := _without_slip(task)) is not None:
            pairs.append((task, weak))
        if len(pairs) == WEAKENED - len(_bugs()):
            return pairs
    raise AssertionError


def _bugs() -> list[tuple[Task, Task]]:
    """Tasks of `repairs`, complete and weakened."""
    env = Repairs()
    tasks = [env.task(split, index) for split in ("train", "eval") for index in range(env.num_tasks(split))]
    return [(task, _visible_only(task)) for task in tasks]


def _visible_only(task: Task) -> Task:
    return task.model_copy(update={"data": {**task.data, "hidden": task.data["public_files"]["tests/test_visible.py"]}})


async def _flagged(make: Callable[[], Environment], tasks: Iterable[Task]) -> tuple[list[str], int]:
    """Tasks with a survivor or another problem, and the number of tasks."""
    graded, tried = await Grader(make, mutants=MUTANTS).run(tasks)
    grade = Grade("", {}, 1.0, tasks=graded, tried=tried)
    weak = {one.task for one in grade.survivors} | {task.id for task in graded if task.problem}
    return sorted(weak), len(graded)


async def weakened(engine: SandboxEngine) -> tuple[list[list[Any]], list[str]]:
    """Rows of the table, and the weakened tasks that were not found."""
    hits, alarms, missed = list[tuple[float, int]](), list[tuple[float, int]](), list[str]()
    for make, pairs in ((lambda: Repairs(sandboxes=engine), _bugs()), (lambda: CodingRLVR(sandboxes=engine), _slips())):
        names, number = await _flagged(make, [weak for _, weak in pairs])
        missed += [weak.id for _, weak in pairs if weak.id not in names]
        hits += [(float(index < len(names)), 1) for index in range(number)]
        names, number = await _flagged(make, [task for task, _ in pairs])
        alarms += [(float(index < len(names)), 1) for index in range(number)]
    rows = [
        ["weakened tasks that are found", *_cells(share_of(hits)), f"at least {100 * AIMS['found']:.0f} %"],
        [
            "the same tasks, complete, that are named",
            *_cells(share_of(alarms)),
            f"below {100 * AIMS['false alarms']:.0f} %",
        ],
    ]
    return rows, missed


def _cells(estimate: Estimate | None) -> list[str]:
    if estimate is None:
        return ["-", "-"]
    return [f"{100 * estimate.value:.1f} %", f"{100 * estimate.low:.1f} to {100 * estimate.high:.1f} %"]


async def bundled(engine: SandboxEngine) -> list[list[Any]]:
    """A row for each bundled environment."""
    rows: list[list[Any]] = []
    for name in [e.name for e in fe.list_environments() if e.source.startswith("forge-env ") and not e.needs]:

        def make(name: str = name) -> Environment:
            return fe.make(name, sandboxes=engine)

        start = time.perf_counter()
        grade = await grade_environment(make, name, {}, mutants=MUTANTS)
        verdicts = [grade.counted(verdict) for verdict in ("rejected", "accepted", "undecided", "equivalent")]
        failed = sum(check.status == "failed" for check in grade.checks)
        rows.append([name, len(grade.tasks), *verdicts, *_cells(grade.rejected()), failed, time.perf_counter() - start])
        print(rows[-1], flush=True)
    rows.append(
        ["all", *(sum(row[column] for row in rows) for column in range(1, 6)), "", "", "", sum(row[-1] for row in rows)]
    )
    return rows


async def measure(args: argparse.Namespace) -> list[str]:
    """Lines of the section."""
    lines: list[str] = []
    async with LazyEngine("local") as engine:
        if not args.weakened:
            columns = [
                "environment",
                "tasks",
                "rejected",
                "accepted",
                "undecided",
                "left out",
                "share rejected",
                "95 %",
                "failed checks",
                "seconds",
            ]
            lines += [*table(columns, await bundled(engine)), ""]
        if not args.bundled:
            rows, missed = await weakened(engine)
            lines += [*table([f"of {WEAKENED}", "share", "95 %", "aim"], rows), ""]
            lines += [f"Not found: {', '.join(missed)}.", ""] if missed else []
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    lines.append(
        f"The first 20 tasks of each split with up to {MUTANTS} wrong versions each. Games have none, since other "
        "moves may win. A share counts undecided versions as accepted, and leaves out those without a visible "
        "difference. Weakened: 16 bugs of `repairs` judged by their visible tests, and 34 tasks of `coding_rlvr` "
        "(`eval`) without the hidden checks that reject one slip of their generator. The kinds of wrong versions "
        "were chosen on tasks of `train`. "
        f"Aim of all environments: {AIMS['seconds']} seconds. Load of the machine at the end {load}."
    )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weakened", action="store_true", help="only the weakened tasks")
    parser.add_argument("--bundled", action="store_true", help="only the bundled environments")
    parser.add_argument("--record", action="store_true", help="write the tables to docs/benchmarks.md")
    args = parser.parse_args()
    lines = asyncio.run(measure(args))
    print("\n".join(lines))
    if args.record:
        record("grading", "Grading tasks", "make bench ARGS='grading --record'", lines)


if __name__ == "__main__":
    main()
