"""Environment with a small buggy package, a shell and an editor, and hidden tests in a fresh sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

import yaml
from pydantic import Field

import forge_env as fe
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


# --- the packages of packages.yaml, with bugs to plant, visible tests that miss them, and hidden tests that don't


@dataclass(frozen=True, slots=True)
class Bug:
    """A bug that replaces `right` by `wrong` in the file `path`; `report` describes the symptom to the agent."""

    name: str
    path: str
    right: str
    wrong: str
    report: str


@dataclass(frozen=True, slots=True)
class Package:
    """A package with its correct files by path; `visible` and `hidden` are unittest files that import them."""

    name: str
    level: int
    split: str
    files: dict[str, str]
    visible: str
    hidden: str
    bugs: tuple[Bug, ...]

    def with_bug(self, bug: Bug) -> dict[str, str]:
        """The files with a bug planted."""
        return {**self.files, bug.path: self.files[bug.path].replace(bug.right, bug.wrong)}


def _tests(imports: str, cases: Mapping[str, str]) -> str:
    """Source of a unittest file; a case is a name and one line of code."""
    methods = "".join(f"\n    def test_{name}(self):\n        {line}\n" for name, line in cases.items())
    return f"import unittest\n\n{imports}\n\n\nclass Tests(unittest.TestCase):{methods}"


def _package(name: str, data: dict[str, Any]) -> Package:
    visible, hidden = (_tests(data["imports"], data[kind]) for kind in ("visible", "hidden"))
    bugs = tuple(Bug(bug, **fields) for bug, fields in data["bugs"].items())
    return Package(name, data["level"], data["split"], data["files"], visible, hidden, bugs)


_DATA = yaml.safe_load(Path(__file__).with_name("packages.yaml").read_text(encoding="utf-8"))
PACKAGES = tuple(_package(name, data) for name, data in _DATA.items())


def chosen(split: str, levels: Sequence[int]) -> list[tuple[Package, Bug]]:
    """All bugs, with their packages, of a split and one of these levels."""
    return [(p, bug) for p in PACKAGES if p.split == split and p.level in levels for bug in p.bugs]
