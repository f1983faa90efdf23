"""Environment with a small buggy package, a shell and an editor, and hidden tests in a fresh sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Literal

from pydantic import Field

import forge_env as fe
from environments.repairs.packages import chosen
from forge_env.types import Action, Task

Level = Literal[1, 2, 3]


class RepairsConfig(fe.SandboxEnvironmentConfig):
    """Bug selection and turn limit."""

    max_turns: int = Field(30, ge=1)
    """Maximum number of assistant messages before the episode is truncated."""
    levels: list[Level] = Field([1, 2, 3], min_length=1)
    """1: one function; 2: a class; 3: several files; the report describes a symptom in another file than the bug's."""


async def hidden_tests(env: Repairs, task: Task) -> float:
    """1 if all hidden tests pass on the agent's files; otherwise 0."""
    result = await env.run_hidden_tests({"tests/test_hidden.py": task.data["hidden"]})
    return float(result.passed)


class Repairs(fe.SandboxEnvironment):
    """Small packages with a planted bug to find and repair; scored by hidden tests."""

    api_version = 1
    config_class = RepairsConfig
    system_prompt = (
        "Repair the Python package in the current folder. `python3 -m unittest discover tests` runs its "
        "tests, which don't show the bug. Look around with bash, change files with edit, then call submit."
    )
    config: RepairsConfig
    rubric = fe.Rubric([hidden_tests])
    bash = fe.tools.bash()
    edit = fe.tools.files(name="edit")
    submit = fe.tools.submit(with_answer=False)

    def num_tasks(self, split: str) -> int:
        """Number of bugs in the packages of `split` with the configured levels."""
        return len(chosen(split, self.config.levels))

    def task(self, split: str, index: int) -> Task:
        """Return the `index`-th bug, in an order drawn by seed. `train` and `eval` have different packages."""
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
        """The package with its bug, and visible tests that pass despite the bug."""
        return dict(task.data["public_files"])

    def gold_files(self, task: Task) -> Mapping[str, str]:
        """The broken file without its bug."""
        return {task.data["public_path"]: task.data["repaired"]}

    def hand_in(self, task: Task, files: Mapping[str, str]) -> list[Action]:
        """Write the files, then submit."""
        writing = [fe.call_tool("edit", command="create", path=path, file_text=text) for path, text in files.items()]
        return [*writing, fe.call_tool("submit")]
