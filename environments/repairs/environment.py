"""The environment: a small package with a bug, tools of a programmer, and hidden tests in a fresh sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import ClassVar, Literal

from pydantic import Field

import forge_env as fe
from environments.repairs.packages import chosen
from forge_env.environment.base import EnvironmentConfig
from forge_env.types import Action, Task

Level = Literal[1, 2, 3]


class RepairsConfig(fe.SandboxEnvironmentConfig):
    """Which repairs."""

    max_turns: int = Field(30, ge=1)
    """Assistant messages in one episode before it is truncated."""
    levels: list[Level] = Field([1, 2, 3], min_length=1)
    """1: one function; 2: a class; 3: several files, of which the report names another than the broken one."""


class Repairs(fe.SandboxEnvironment):
    """Small packages with a planted bug, to be found and repaired; tests that the agent never sees decide."""

    api_version = 1
    config_class: ClassVar[type[EnvironmentConfig]] = RepairsConfig
    system_prompt: ClassVar[str | None] = (
        "Repair the Python package in the current folder. `python3 -m unittest discover tests` runs its "
        "tests, which don't show the bug. Look around with bash, change files with edit, then call submit."
    )
    config: RepairsConfig
    bash = fe.tools.bash()
    edit = fe.tools.files(name="edit")
    submit = fe.tools.submit(with_answer=False)

    def __init__(self, config: RepairsConfig | None = None, **context: object) -> None:
        self.rubric = fe.Rubric([hidden_tests])
        super().__init__(config, **context)

    def num_tasks(self, split: str) -> int:
        """Every bug of the packages of `split` with the chosen levels."""
        return len(chosen(split, self.config.levels))

    def task(self, split: str, index: int) -> Task:
        """The `index`-th bug, in an order that the seed decides. Packages of `eval` are never in `train`."""
        bugs = chosen(split, self.config.levels)
        package, bug = Random(f"repairs/{self.config.seed}/{split}").sample(bugs, len(bugs))[index]
        return Task(
            id=f"{split}-{package.name}-{bug.name}",
            prompt=bug.report,
            data={
                "public_files": {**package.with_bug(bug), "tests/test_visible.py": package.visible},
                "repaired": package.files[bug.path],
                "public_path": bug.path,
                "hidden": package.hidden,
            },
            difficulty=package.level,
            tags=[package.name],
            split=split,
        )

    def files(self, task: Task) -> Mapping[str, str | bytes]:
        """The package with its bug, and tests that pass all the same."""
        return dict(task.data["public_files"])

    def gold_files(self, task: Task) -> Mapping[str, str]:
        """The broken file without its bug."""
        return {task.data["public_path"]: task.data["repaired"]}

    def hand_in(self, task: Task, files: Mapping[str, str]) -> list[Action]:
        """Write the files, then submit."""
        writing = [fe.call_tool("edit", command="create", path=path, file_text=text) for path, text in files.items()]
        return [*writing, fe.call_tool("submit")]


async def hidden_tests(env: Repairs, task: Task) -> float:
    """Whether all hidden tests pass on what the agent left."""
    result = await env.run_hidden_tests({"tests/test_hidden.py": task.data["hidden"]})
    return float(result.passed)
