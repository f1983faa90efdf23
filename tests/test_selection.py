"""Selection and scheduling of tests: `-m` skips modules without a selected test; two workers run the heavy tests."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.conftest import HEAVY_FILE, pytest_ignore_collect, pytest_xdist_make_scheduler

LIGHT = "not slow and not docker and not stack"
CORE, REST = "core or not slow", "not (core or not slow)"


@pytest.mark.parametrize(
    ("pytestmark", "expression", "ignored"),
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
        ("[pytest.mark.slow, pytest.mark.stack]", CORE, True),
        ("pytest.mark.slow\n\n@pytest.mark.core\ndef test(): ...", CORE, False),
        ("[pytest.mark.slow, pytest.mark.core]", REST, True),
        ("pytest.mark.stack", REST, False),
    ],
)
def test_modules_without_selected_tests(tmp_path: Path, pytestmark: str, expression: str, ignored: bool) -> None:
    module = tmp_path / "test_it.py"
    module.write_text(f"import pytest\n\npytestmark = {pytestmark}\n")
    config = cast(Any, SimpleNamespace(getoption={"markexpr": expression}.__getitem__))
    assert pytest_ignore_collect(module, config) is (True if ignored else None)


class Worker:
    """A worker that runs each test as soon as it is assigned."""

    def __init__(self, heavy_file: Path) -> None:
        self.workerinput = {HEAVY_FILE: str(heavy_file)}
        self.gateway = SimpleNamespace(id="")
        self.shutting_down = False
        self.assigned: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.assigned += indices

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.mark.parametrize("light", [0, 1, 12])
def test_two_workers_run_the_heavy_tests_longest_first(tmp_path: Path, light: int) -> None:
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
    while ahead := [worker for worker in workers if done[worker] < len(worker.assigned)]:
        for worker in ahead:
            done[worker] += 1
            scheduler.mark_test_complete(worker, worker.assigned[done[worker] - 1])
    assert sorted(index for worker in workers for index in worker.assigned) == list(range(len(tests)))
    assert tests[workers[0].assigned[0]] == "test_heavy_6.py::test_it"
    assert not any(tests[index] in heavy for worker in workers[2:] for index in worker.assigned)
    assert all(worker.shutting_down for worker in workers)
