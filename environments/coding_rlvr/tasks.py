"""Tasks by index: `make_task` returns the same task in every process, without generating earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from random import Random

from environments.coding_rlvr.checks import Check
from environments.coding_rlvr.conversation import as_answer
from environments.coding_rlvr.families import LEVELS, Family, all_families, digest
from environments.coding_rlvr.judging import make_tests
from environments.coding_rlvr.operations import OPERATIONS
from environments.coding_rlvr.programs import Program, Step
from forge_env.errors import UsageError
from forge_env.types import Task

SPLITS = ("train", "eval", "unseen")
HELD_OUT = 5
"""One program in this many is held out for `eval`."""
MIN_FAMILY = 4
"""Families with fewer programs than this are not split: holding out a program would hold out the family."""
ATTEMPTS = 200
"""Maximum number of programs tried per topic, and of topics tried."""
Topic = dict[bool, list[Family]]
"""Families of one topic at one level. False: shared by `train` and `eval`; True: held out as a whole (`unseen`)."""


@cache
def select_families(levels: tuple[int, ...], patterns: tuple[str, ...]) -> dict[int, dict[str, Topic]]:
    """Topics by level, with the families whose name begins with one of `patterns` (empty: all families).

    Raises:
        UsageError: no family matches.
    """
    chosen: dict[int, dict[str, Topic]] = {}
    for family in all_families(max(levels, default=1)).values():
        if family.level in levels and (not patterns or family.name.startswith(patterns)):
            topic = chosen.setdefault(family.level, {}).setdefault(family.topic, {False: [], True: []})
            topic[family.unseen].append(family)
    if not chosen:
        raise UsageError(
            f"no family of levels {list(levels)} begins with {' or '.join(patterns)}",
            fix=f"levels are {list(LEVELS)}; names look like {next(iter(all_families()))!r}",
        )
    return chosen


def split_of(family: Family, program: Program) -> str:
    """Split of a program, determined by its family and identity alone and independent of any seed."""
    if family.unseen:
        return "unseen"
    held_out = family.size >= MIN_FAMILY and digest(program.identity) % HELD_OUT == 0
    return "eval" if held_out else "train"


def make_task(seed: int, split: str, index: int, levels: Sequence[int], patterns: Sequence[str]) -> Task:
    """Generate the `index`-th task of `split`.

    Raises:
        UsageError: the split is unknown, or the chosen families have no task in it.
    """
    if split not in SPLITS:
        raise UsageError(f"coding_rlvr has no split {split!r}", fix=f"use one of {', '.join(SPLITS)}")
    by_level = select_families(tuple(levels), tuple(patterns))
    rng = Random(f"{seed}/{split}/{index}")
    for _ in range(ATTEMPTS):
        topics = list(by_level[rng.choice(list(by_level))].values())
        topic = rng.choice(topics)
        if (drawn := _find(topic, split, rng)) is not None:
            return _as_task(f"{split}-{seed}-{index}", split, *drawn, rng)
    raise UsageError(f"the chosen families have no task in split {split!r}", fix="choose more levels or families")


def _find(topic: Topic, split: str, rng: Random) -> tuple[Family, Program, tuple[list[Check], list[Check]]] | None:
    """Draw a program of `split` from the topic, with its tests; None after `ATTEMPTS` failures."""
    families = topic[split == "unseen"]
    for _ in range(ATTEMPTS if families else 0):
        family = rng.choices(families, [family.weight for family in families])[0]
        program = family.draw(rng)
        if split_of(family, program) == split and (tests := make_tests(program, rng)) is not None:
            return family, program, tests
    return None


def _as_task(
    name: str, split: str, family: Family, program: Program, tests: tuple[list[Check], list[Check]], rng: Random
) -> Task:
    public, hidden = tests
    shown = "\n".join(f"{test['call']} == {test['expected']}" for test in public)
    return Task(
        id=name,
        prompt=f"{program.describe(rng)}\n{shown}",
        data={
            "identity": program.identity,
            "program": [program.kind, program.takes, [[step.operation.name, step.params] for step in program.steps]],
            "public": public,
            "hidden": hidden,
        },
        gold=as_answer(program.code()),
        difficulty=family.level,
        tags=[family.topic, family.name],
        split=split,
    )


def program_of(task: Task) -> Program:
    """Reconstruct the program of a generated task, for demonstrations."""
    kind, takes, steps = task.data["program"]
    return Program(kind, takes, tuple(Step(OPERATIONS[name], params) for name, params in steps))
