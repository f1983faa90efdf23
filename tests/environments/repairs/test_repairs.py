"""Every bug is hidden from the visible tests, found by the hidden ones, and its repair earns everything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import forge_env as fe
from environments.repairs import Repairs, RepairsConfig
from environments.repairs.environment import PACKAGES, Package
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import GoldPolicy, ReplayPolicy
from forge_env.sandbox import SandboxEngine
from forge_env.validation.checks import Validator
from tests.sandboxes.conftest import WITH_SLOW_DOCKER, engine_fixture

ASYNC = pytest.mark.asyncio(loop_scope="module")


engine = engine_fixture(*WITH_SLOW_DOCKER, warm=2)


PASS = """
import os, sys, unittest
for folder in sys.argv[1:]:
    if not (child := os.fork()):
        os.chdir(folder)
        done = unittest.main(None, argv=["unittest", "discover", "tests"], exit=False)
        os._exit(not done.result.wasSuccessful())
    print(os.waitpid(child, 0)[1] == 0, flush=True)
"""
"""Whether the tests of each folder pass: a process each, but one start of Python for all."""


def pass_in(root: Path, *trees: tuple[dict[str, str], str]) -> list[bool]:
    """Whether the files of each tree pass the tests that stand beside them."""
    for number, (files, tests) in enumerate(trees):
        for path, text in {**files, "tests/test_it.py": tests}.items():
            where = root / str(number) / path
            where.parent.mkdir(parents=True, exist_ok=True)
            where.write_text(text)
    command = [sys.executable, "-S", "-B", "-c", PASS, *(str(root / str(number)) for number in range(len(trees)))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line == "True" for line in done.stdout.splitlines()]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_only_the_hidden_tests_see_the_bugs(package: Package, tmp_path: Path) -> None:
    names = [bug.name for bug in package.bugs]
    assert [package.files[bug.path].count(bug.right) for bug in package.bugs] == [1] * len(names)
    broken = [package.with_bug(bug) for bug in package.bugs]
    visible = pass_in(tmp_path / "visible", *((files, package.visible) for files in broken))
    right, *hidden = pass_in(tmp_path / "hidden", *((files, package.hidden) for files in (package.files, *broken)))
    assert right
    assert dict(zip(names, visible, strict=True)) == dict.fromkeys(names, True)
    assert dict(zip(names, hidden, strict=True)) == dict.fromkeys(names, False)


@ASYNC
async def test_repairs_earn_everything_and_nothing_earns_nothing(engine: SandboxEngine) -> None:
    for level in (1, 3):
        env = Repairs(RepairsConfig(levels=[level]))
        task = env.task("eval", 0)
        make = lambda: fe.make("repairs", sandboxes=engine)  # noqa: E731
        assert (await run_episode(make, GoldPolicy(), task=task)).reward == 1.0
        looking = fe.call_tool("bash", command="python3 -m unittest discover tests; rm -r tests")
        trajectory = await run_episode(make, ReplayPolicy([looking, fe.call_tool("submit")]), task=task)
        assert (trajectory.reward, trajectory.terminated) == (0.0, True)
        assert "Ran 2 tests" in trajectory.turns[1].observation[0].content
        assert "OK" in trajectory.turns[1].observation[0].content


@ASYNC
@pytest.mark.slow
async def test_it_is_sound(engine: SandboxEngine) -> None:
    validator = Validator(lambda: fe.make("repairs", sandboxes=engine), num_tasks=1)
    checks = [check async for check in validator.run()]
    assert "failed" not in [check.status for check in checks], checks


def test_tasks_of_the_splits() -> None:
    env = Repairs()
    assert (env.num_tasks("train"), env.num_tasks("eval")) == (10, 6)
    tasks = {split: [env.task(split, index) for index in range(env.num_tasks(split))] for split in env.splits}
    assert not {task.tags[0] for task in tasks["train"]} & {task.tags[0] for task in tasks["eval"]}
    assert len({task.id for task in tasks["train"]}) == 10
    other = Repairs(RepairsConfig(seed=1))
    assert [other.task("train", index).id for index in range(10)] != [task.id for task in tasks["train"]]
    assert {Repairs(RepairsConfig(levels=[2])).task("train", index).difficulty for index in range(4)} == {2}
