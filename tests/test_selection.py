"""Which tests are taken, and where: `-m` imports no module in vain, and two processes run what is heavy."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.conftest import HEAVY_FILE, pytest_ignore_collect, pytest_xdist_make_scheduler

LIGHT = "not slow and not docker and not stack"


@pytest.mark.parametrize(
    ("pytestmark", "expression", "is_left"),
    [
        ("pytest.mark.stack", LIGHT, True),
        ("[pytest.mark.stack, pytest.mark.timeout(600)]", LIGHT, True),
        ("pytest.mark.asyncio(loop_scope='module')", LIGHT, False),
        ("pytest.mark.stack", "", False),
        ("pytest.mark.stack", "stack", False),
        ("pytest.mark.stack", "stack and slow", False),  # one of its tests may be slow
        ("pytest.mark.stack", "slow and not stack", True),
        ("pytest.mark.stack", "docker or not stack", False),
        ("pytest.mark.slow", "stack", False),
    ],
)
def test_a_module_without_a_chosen_test_is_not_imported(
    tmp_path: Path, pytestmark: str, expression: str, is_left: bool
) -> None:
    module = tmp_path / "test_it.py"
    module.write_text(f"import pytest\n\npytestmark = {pytestmark}\n")
    config = cast(Any, SimpleNamespace(getoption={"markexpr": expression}.__getitem__))
    assert pytest_ignore_collect(module, config) is (True if is_left else None)


class Worker:
    """What the scheduler has of a process, which does at once what it is given."""

    def __init__(self, heavy_file: Path) -> None:
        self.workerinput = {HEAVY_FILE: str(heavy_file)}
        self.gateway = SimpleNamespace(id="")
        self.shutting_down = False
        self.given: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.mark.parametrize("light", [0, 1, 12])
def test_two_processes_run_what_is_heavy_longest_first(tmp_path: Path, light: int) -> None:
    heavy = {f"test_heavy_{number}.py::test_it": 100.0 * number for number in range(1, 7)}
    tests = [*heavy, *(f"test_light_{number}.py::test_it" for number in range(light))]
    (tmp_path / "heavy.json").write_text(json.dumps(heavy))
    config = SimpleNamespace(getvalue=lambda _: ["4*popen"], option=SimpleNamespace(loadscopereorder=False))
    scheduler: Any = pytest_xdist_make_scheduler(cast(Any, config), None)
    workers = [Worker(tmp_path / "heavy.json") for _ in range(4)]
    for worker in workers:
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, tests)
    scheduler.schedule()
    done = dict.fromkeys(workers, 0)
    while ahead := [worker for worker in workers if done[worker] < len(worker.given)]:
        for worker in ahead:
            done[worker] += 1
            scheduler.mark_test_complete(worker, worker.given[done[worker] - 1])
    assert sorted(index for worker in workers for index in worker.given) == list(range(len(tests)))
    assert tests[workers[0].given[0]] == "test_heavy_6.py::test_it"
    assert not any(tests[index] in heavy for worker in workers[2:] for index in worker.given)
    assert all(worker.shutting_down for worker in workers)
