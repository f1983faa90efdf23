"""Grade the bundled environments, and tasks whose hidden tests were weakened on purpose.

The first 20 tasks of each split are graded with up to 30 wrong versions each. Games have no wrong versions, since other
moves may win. The weakened tasks are 16 bugs of `repairs` judged by their visible tests, which pass with the bug, and
34 tasks of `coding_rlvr` (`eval`) without the hidden checks that reject one mistake known to the task's generator, such
as `x % 2 == 1` for even numbers. `grade` draws neither as a wrong version. The kinds of wrong versions were chosen on
tasks of `train`. Aim: 600 seconds for all environments.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterable
from functools import partial
from random import Random
from typing import Any

import forge_env as fe
from benchmarks.frame import main, table
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
    """Tasks of `repairs`, complete and judged by their visible tests."""
    env, visible = Repairs(), "tests/test_visible.py"
    tasks = [env.task(split, index) for split in ("train", "eval") for index in range(env.num_tasks(split))]
    return [
        (task, task.model_copy(update={"data": {**task.data, "hidden": task.data["public_files"][visible]}}))
        for task in tasks
    ]


async def _flagged(make: Callable[[], Environment], tasks: Iterable[Task]) -> tuple[list[str], int]:
    """Tasks with a survivor or another problem, and the number of tasks."""
    graded, tried = await Grader(make, mutants=MUTANTS).run(tasks)
    grade = Grade("", {}, 1.0, tasks=graded, tried=tried)
    weak = {one.task for one in grade.survivors} | {task.id for task in graded if task.problem}
    return sorted(weak), len(graded)


async def weakened(engine: SandboxEngine) -> tuple[list[list[Any]], list[str]]:
    """Rows of the table, and the weakened tasks that were not found."""
    hits, alarms, missed = list[tuple[float, int]](), list[tuple[float, int]](), list[str]()
    for environment, pairs in ((Repairs, _bugs()), (CodingRLVR, _slips())):
        make = partial(environment, sandboxes=engine)
        found, number = await _flagged(make, [weak for _, weak in pairs])
        missed += [weak.id for _, weak in pairs if weak.id not in found]
        hits += [(float(index < len(found)), 1) for index in range(number)]
        named, number = await _flagged(make, [task for task, _ in pairs])
        alarms += [(float(index < len(named)), 1) for index in range(number)]
    rows = [
        ["weakened tasks that are found", *_cells(share_of(hits)), "at least 90 %"],
        ["the same tasks, complete, that are named", *_cells(share_of(alarms)), "below 5 %"],
    ]
    return rows, missed


def _cells(estimate: Estimate | None) -> list[str]:
    if estimate is None:
        return ["-", "-"]
    return [f"{100 * estimate.value:.1f} %", f"{100 * estimate.low:.1f} to {100 * estimate.high:.1f} %"]


async def bundled(engine: SandboxEngine, names: list[str]) -> list[list[Any]]:
    """A row for each of these environments, or for all that are bundled."""
    rows: list[list[Any]] = []
    every = [e.name for e in fe.list_environments() if e.source.startswith("forge-env ") and not e.needs]
    for name in list(filter(None, names)) or every:
        start = time.perf_counter()
        grade = await grade_environment(partial(fe.make, name, sandboxes=engine), name, {}, mutants=MUTANTS)
        verdicts = [grade.counted(verdict) for verdict in ("rejected", "accepted", "undecided", "equivalent")]
        failed = sum(check.status == "failed" for check in grade.checks)
        rows.append([name, len(grade.tasks), *verdicts, failed, time.perf_counter() - start])
    sums = [sum(row[column] for row in rows) for column in range(1, 7)]
    return [*rows, ["all", *sums, sum(row[-1] for row in rows)]]


async def measure(args: argparse.Namespace) -> list[str]:
    columns = ["environment", "tasks", "rejected", "accepted", "undecided", "left out"]
    async with LazyEngine("local") as engine:
        rows, (of_weakened, missed) = await bundled(engine, args.names), await weakened(engine)
    return [
        *table([*columns, "failed checks", "seconds"], rows),
        "",
        *table([f"of {WEAKENED}", "share", "95 %", "aim"], of_weakened),
        *(["", f"Not found: {', '.join(missed)}."] if missed else []),
    ]


if __name__ == "__main__":
    main("Grading tasks", measure, names=[""])
