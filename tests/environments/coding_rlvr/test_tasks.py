"""Tasks: families, gold solutions, determinism, splits."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from ast import literal_eval
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.coding_rlvr.checks import same
from environments.coding_rlvr.families import LEVELS, TOPICS, all_families
from environments.coding_rlvr.judging import arguments_of, trusted_call, trusted_function, wrong_codes
from environments.coding_rlvr.operations import OPERATIONS
from environments.coding_rlvr.tasks import SPLITS, make_task, program_of, split_of
from forge_env.errors import UsageError
from forge_env.types import Task

ALL = list(LEVELS)


def passes(code: str, tests: list) -> bool:
    function = trusted_function(code)
    return all(
        outcome.error is None and same(literal_eval(test["expected"]), outcome.value)
        for test in tests
        for outcome in [trusted_call(function, arguments_of(test))]
    )


def gold_code(task: Task) -> str:
    return task.gold.removeprefix("```python\n").removesuffix("\n```")


@cache
def task(seed: int, split: str, index: int, levels: tuple[int, ...]) -> Task:
    return make_task(seed, split, index, levels, [])


def tasks(split: str, count: int, levels: Sequence[int] = ALL, seed: int = 0) -> list[Task]:
    return [task(seed, split, index, tuple(levels)) for index in range(count)]


def test_there_are_families_of_every_topic_and_level() -> None:
    families = all_families().values()
    assert len(families) >= 30
    assert {family.topic for family in families} == set(TOPICS)
    assert {family.level for family in families} == set(LEVELS)
    default = [family for family in families if family.level in (1, 2)]
    assert len(default) >= 30
    assert {family.topic for family in default} == set(TOPICS)


def test_every_operation_has_wordings_and_slips() -> None:
    for operation in OPERATIONS.values():
        assert len(set(operation.phrases)) >= 2, operation.name
        assert operation.slips, operation.name
        assert operation.expression not in operation.slips, operation.name


@given(st.sampled_from(SPLITS), st.integers(0, 2**40), st.sampled_from(LEVELS), st.integers(0, 1000))
def test_gold_passes_all_tests_and_belongs_to_its_split(split: str, index: int, level: int, seed: int) -> None:
    if split == "unseen" and level == 1:
        return  # a family of one operation is never held out: its operation would be unknown
    task = make_task(seed, split, index, [level], [])
    assert task.split == split
    assert task.difficulty == level
    assert passes(gold_code(task), task.data["public"])
    assert passes(gold_code(task), task.data["hidden"])
    assert len(task.data["hidden"]) >= 6
    assert not {test["call"] for test in task.data["public"]} & {test["call"] for test in task.data["hidden"]}
    assert split_of(all_families()[task.tags[1]], program_of(task)) == split


@pytest.mark.slow
def test_a_wrong_program_fails_the_hidden_tests() -> None:
    caught = total = 0
    for task in tasks("train", 300):
        for code in wrong_codes(program_of(task)):
            total += 1
            caught += not passes(code, task.data["hidden"])
    assert caught / total > 0.9  # the rest compute the same, such as sorting before a sum


@pytest.mark.parametrize(
    ("index", "right", "wrong"),
    [(38, "x > 6", "x > 7"), (31, "'c'", "'b'"), (10, "sorted(", "list("), (63, "> 3", ">= 3"), (80, "n + 1", "n")],
)
def test_hidden_tests_are_at_the_boundaries_too(index: int, right: str, wrong: str) -> None:
    task = make_task(0, "train", index, [1, 2], [])
    code = gold_code(task)
    assert right in code
    assert not passes(code.replace(right, wrong), task.data["hidden"])


def test_a_constant_answer_never_passes() -> None:
    for task in tasks("train", 300):
        tests = [*task.data["public"], *task.data["hidden"]]
        for answer in {test["expected"] for test in tests}:
            assert not passes(f"def f(*arguments):\n    return {answer}", tests)


@pytest.mark.slow
@pytest.mark.parametrize("levels", [[1, 2], ALL])
def test_splits_share_no_program(levels: list[int]) -> None:
    identities = {
        split: {task.data["identity"] for seed in (0, 1) for task in tasks(split, 300, levels, seed)}
        for split in SPLITS
    }
    assert not identities["train"] & identities["eval"]
    assert not identities["train"] & identities["unseen"]
    assert not identities["eval"] & identities["unseen"]
    assert len(identities["eval"]) >= 128


def test_unseen_families_appear_nowhere_else_but_their_operations_do() -> None:
    unseen = {family.name for family in all_families().values() if family.unseen}
    known = {task.tags[1] for split in ("train", "eval") for task in tasks(split, 300)}
    assert not unseen & known
    elsewhere = {
        operation.name
        for family in all_families().values()
        if not family.unseen
        for slot in family.slots
        for operation in slot
    }
    assert elsewhere == set(OPERATIONS)


def test_identity_ignores_wording_and_tests() -> None:
    by_identity: dict[str, set[str]] = {}
    for task in tasks("train", 200, [1]):
        by_identity.setdefault(task.data["identity"], set()).add(task.prompt)
    assert max(len(prompts) for prompts in by_identity.values()) > 1


@pytest.mark.slow
def test_a_task_is_the_same_in_another_process() -> None:
    def fingerprint(indices: list[int]) -> str:
        texts = [make_task(7, split, index, ALL, []).model_dump_json() for split in SPLITS for index in indices]
        return hashlib.sha256("".join(texts).encode()).hexdigest()

    script = (
        "import hashlib\n"
        "from environments.coding_rlvr.tasks import SPLITS, make_task\n"
        "texts = [make_task(7, s, i, [1, 2, 3, 4], []).model_dump_json() for s in SPLITS for i in (3, 0, 10**9)]\n"
        "print(hashlib.sha256(''.join(texts).encode()).hexdigest())"
    )
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == fingerprint([3, 0, 10**9])


def test_seeds_and_indices_give_different_tasks() -> None:
    assert len({task.prompt for task in tasks("train", 200)}) > 190
    assert tasks("train", 5)[3].prompt != tasks("train", 5, seed=1)[3].prompt


def test_a_task_survives_json() -> None:
    for task in tasks("train", 50):
        assert Task.model_validate(json.loads(task.model_dump_json())) == task


def test_choosing_families() -> None:
    chosen = [make_task(0, "train", index, [2], ["strings/reverse"]) for index in range(20)]
    assert all(task.tags[1].startswith("strings/reverse") for task in chosen)
    with pytest.raises(UsageError, match="no family"):
        make_task(0, "train", 0, [1], ["nothing/"])
    with pytest.raises(UsageError, match="no split"):
        make_task(0, "test", 0, [1], [])
    with pytest.raises(UsageError, match="no task in split"):
        make_task(0, "eval", 0, [1], ["lists/total"])


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (1, 1, True),
        (1, True, False),
        (1, 1.0, False),
        ([1, 2], [1, 2], True),
        ([1], (1,), False),
        ([True], [1], False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"a": True}, False),
        ({"a": 1}, {"b": 1}, False),
        ("a", "a", True),
        (None, None, True),
    ],
)
def test_same(left: object, right: object, equal: bool) -> None:
    assert same(left, right) is equal
