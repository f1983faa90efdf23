"""Repositories with an issue, from files in SWE-bench's format, scored by test results in a fresh sandbox."""

from __future__ import annotations

import asyncio
import posixpath
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

import forge_env as fe
from environments.swe_bench.instances import Instance, files_at, parts_of, read_instances
from forge_env.errors import UsageError
from forge_env.machine import user_path
from forge_env.sandbox import Judging, Limits, Outcome, SandboxSpec, TestsResult
from forge_env.types import Action, Task
from forge_env.visible import one_line

_SETTINGS = ("pytest.ini", "tox.ini", "setup.cfg")
_CONFTEST = "conftest.py"
_FOR_TESTS = {"test", "tests", "testing"}
"""Names of folders that only hold tests and their support files."""


class SWEBenchConfig(fe.SandboxEnvironmentConfig):
    """Instances, their repositories, and limits of sandboxes and tests."""

    file: str
    """JSONL, JSON, CSV or Parquet file of instances, with SWE-bench's field names."""
    repositories: str = "repositories"
    """Folder with a Git repository `OWNER__NAME` for each `repo`; a relative path starts at the file's folder."""
    packages: list[str] = Field(default_factory=list)
    """Python packages that code and tests import, such as pytest."""
    image: str = "python"
    """Image of the sandboxes, if `packages` is not enough."""
    max_turns: int = Field(60, ge=1)
    """Maximum number of assistant messages before the episode is truncated."""
    wall_s: float = Field(120.0, gt=0)
    """Wall-clock limit of one command, and of the hidden tests, in seconds."""
    cpu_s: float = Field(120.0, gt=0)
    """CPU time limit of one command, and of the hidden tests, in seconds."""
    memory_mb: int = Field(1024, ge=32)
    """Memory limit of one command, in MiB."""
    disk_mb: int = Field(256, ge=1)
    """Size of the work folder, in MiB."""


async def solved(env: SWEBench, task: Task) -> float:
    """1 if all required tests pass; otherwise 0."""
    return await env.judge(task)


def tests_passed(env: SWEBench) -> float:
    """Fraction of the required tests that pass."""
    return env.share


class SWEBench(fe.SandboxEnvironment):
    """Issues of repositories, in SWE-bench's format; scored by hidden tests."""

    api_version = 1
    config_class = SWEBenchConfig
    splits = ("train",)
    system_prompt = (
        "The current folder holds a repository with a problem. Find and repair it: look around with bash, change files "
        "with edit. Tests that you don't see decide. Call submit when you are done."
    )
    config: SWEBenchConfig
    rubric = fe.Rubric([solved], metrics=[tests_passed])
    bash = fe.tools.bash()
    edit = fe.tools.files(name="edit")
    submit = fe.tools.submit(with_answer=False)

    def __init__(self, config: SWEBenchConfig | None = None, **context: Any) -> None:
        super().__init__(config, **context)
        self._instances = {instance.instance_id: instance for instance in read_instances(self.config.file)}
        self.sandbox_spec = SandboxSpec(  # type: ignore[misc]
            self.config.image, packages=tuple(self.config.packages), disk_mb=self.config.disk_mb, memory_mb=2048
        )
        self.share = 0.0
        """Fraction of the required tests that pass."""

    def num_tasks(self, split: str) -> int:
        """Number of instances in the file."""
        return len(self._instances)

    def task(self, split: str, index: int) -> Task:
        """Return the `index`-th instance, in the order of the file."""
        instance = list(self._instances.values())[index]
        return Task(
            id=instance.instance_id,
            prompt=instance.problem_statement,
            data={"patch": instance.patch, "tests": instance.test_patch},
            tags=[instance.repo],
            split=split,
        )

    def files(self, task: Task) -> Mapping[str, str | bytes]:
        """The repository at its base commit, without its history, which may contain the solution.

        Raises:
            UsageError: the instance can't be scored, since the data set truncated ids of its tests.
        """
        if problem := _cut(self._instances[task.id]):
            raise UsageError(f"instance {task.id}: {problem}", fix=f"correct or remove it in {self.config.file}")
        return dict(self._at(task))

    def gold_files(self, task: Task) -> Mapping[str, str]:
        """The files that the instance's patch changes or adds."""
        before, after = self._at(task), self._at(task, self._instances[task.id].patch)
        return {path: data.decode() for path, data in after.items() if before.get(path) != data}

    def hand_in(self, task: Task, files: Mapping[str, str]) -> list[Action]:
        """Write the files, remove the files that the patch removes, then submit."""
        gone = sorted(set(self._at(task)) - set(self._at(task, self._instances[task.id].patch)))
        removing = [fe.call_tool("bash", command=shlex.join(["rm", "-f", "--", *gone]))] if gone else []
        writing = [fe.call_tool("edit", command="create", path=path, file_text=text) for path, text in files.items()]
        return [*writing, *removing, fe.call_tool("submit")]

    async def unplayable(self, tasks: Sequence[Task]) -> Mapping[str, str]:
        """Run the tests before and after each instance's patch; return the instances with unexpected results."""
        problems = {}
        for task in tasks:
            try:
                problem = await self._what_is_wrong(task)
            except UsageError as error:
                problem = error.message
            if problem:
                problems[task.id] = problem
        return problems

    async def _what_is_wrong(self, task: Task) -> str | None:
        instance = self._instances[task.id]
        if problem := _cut(instance):
            return problem
        before = passing(await self._judged(task, self._at(task)), instance.tests)
        result = await self._judged(task, self._at(task, instance.patch))
        after = passing(result, instance.tests)
        if result.outcomes and (missing := [name for name in instance.tests if not _reported(result, name)]):
            return f"the test {missing[0]} does not exist: correct the instance's lists of tests"
        if too_early := [name for name in instance.fail_to_pass if name in before]:
            return f"{too_early[0]} passes before the patch already"
        if broken := [name for name in instance.pass_to_pass if name not in before]:
            return f"{broken[0]} doesn't pass before the patch"
        if broken := [name for name in instance.tests if name not in after]:
            why = "" if result.outcomes or not result.failures else f": {one_line(result.failures[0], 300)}"
            return f"{broken[0]} doesn't pass after the patch{why}"
        return None

    async def _judged(self, task: Task, files: Mapping[str, bytes]) -> TestsResult:
        if self.sandboxes is None:
            raise UsageError("checking instances needs sandboxes", fix="fe.make(NAME, sandboxes=engine)")
        async with self.sandboxes.session(self.sandbox_spec) as fresh:
            judge = Judging.of(fresh)
            return await judge.run_tests(files=files, tests=self.hidden_tests(task), how="counted", limits=self.limits)

    def hidden_tests(self, task: Task) -> dict[str, bytes]:
        """Files for scoring: required tests, pytest settings, conftest files, and support files in their test folders.

        All other files, including other tests and files that the instance's patch changes, are the agent's.
        """
        instance = self._instances[task.id]
        there = self._at(task, instance.test_patch)
        if missing := [name for name in instance.tests if parts_of(name)[0] not in there]:
            raise UsageError(f"instance {task.id}: no file contains {missing[0]}", fix="correct its lists of tests")
        folders = {posixpath.dirname(path) for path in instance.test_paths}
        folders = {folder for folder in folders if _FOR_TESTS.intersection(folder.split("/"))}
        return {
            path: data
            for path, data in there.items()
            if path in instance.test_paths
            or path in _SETTINGS
            or posixpath.basename(path) == _CONFTEST
            or (
                not _is_test(path)
                and path not in instance.patched_paths
                and any(path.startswith(f"{folder}/") for folder in folders)
            )
        }

    def _at(self, task: Task, *patches: str) -> dict[str, bytes]:
        instance = self._instances[task.id]
        folder = user_path(self.config.file).parent / user_path(self.config.repositories)
        return files_at(str(folder / instance.repo.replace("/", "__")), instance.base_commit, *patches)

    @property
    def limits(self) -> Limits:
        """The configured limits."""
        return Limits(
            wall_s=self.config.wall_s, cpu_s=self.config.cpu_s, memory_mb=self.config.memory_mb, file_size_mb=64
        )

    async def judge(self, task: Task) -> float:
        """1 if every required test passes on the agent's files; otherwise 0. Sets `share`."""
        tests = await asyncio.to_thread(self.hidden_tests, task)
        names = self._instances[task.id].tests
        passed = passing(await self.run_hidden_tests(tests, how="counted"), names)
        self.share = len(passed) / len(names)
        return float(len(passed) == len(names))


def passing(result: TestsResult, names: Sequence[str]) -> set[str]:
    """The tests that were reported as passed."""
    return {name for name in names if (reported := _reported(result, name)) and set(reported) == {"passed"}}


def _reported(result: TestsResult, name: str) -> list[Outcome]:
    """The outcomes of a test; an id without parameters covers all parameter sets."""
    if name in result.outcomes:
        return [result.outcomes[name]]
    return [] if "[" in name else [outcome for test, outcome in result.outcomes.items() if test.startswith(f"{name}[")]


def _cut(instance: Instance) -> str:
    """Describe mistakes in the test ids of an instance; empty if there are none."""
    if not (cut := instance.cut_ids):
        return ""
    return f"{len(cut)} of {len(instance.tests)} test ids are truncated, so it can't be judged: {cut[0]}"


def _is_test(path: str) -> bool:
    name = posixpath.basename(path)
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py") or name == "tests.py")
