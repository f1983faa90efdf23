"""Tasks in Harbor's format from a folder; each runs in its image, and its tests run in a fresh sandbox."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

import forge_env as fe
from environments.harbor.artifacts import only
from environments.harbor.tasks import HOME, LOGS, PUBLISHED, SOLUTION, TESTS, HarborTask, Separate, read_folder
from forge_env.environment.sandbox_environment import as_text
from forge_env.errors import ImageError, InfrastructureError, SandboxFileError, UsageError
from forge_env.rewards.reasons import LONGEST_FAILURE, explain
from forge_env.sandbox import Archives, ExecResult, Images, Limits, Sandbox, SandboxSpec
from forge_env.sandbox.spec import is_below
from forge_env.types import Action, StepResult, Task
from forge_env.working_time import limited_elsewhere

VERDICT = f"{LOGS}/verifier"
"""Folder to which tests write their verdict."""
SCRATCH_MB = 64
"""Memory of a sandbox, in MiB, that is reserved for in-memory folders and the system and unavailable to a process."""


class HarborConfig(fe.SandboxEnvironmentConfig):
    """Task selection, images, and limits of the agents."""

    folder: str
    """Folder of a task, or folder of tasks."""
    base_image: str = ""
    """Image that replaces the FROM images of the tasks' Dockerfiles, such as the bundled `python`; empty: the \
Dockerfiles are built unchanged, which needs a registry."""
    tasks: list[str] = Field(default_factory=list)
    """Names of the tasks to use; empty: all tasks."""
    writable: list[str] = Field(default_factory=list)
    """Writable folders in addition to /logs, /root, /solution, /tests and the working folder."""
    network: bool = False
    """Grant each task the network access it requests: unrestricted (docker only), or to the hosts that it lists."""
    max_turns: int = Field(100, ge=1)
    """Maximum number of assistant messages before the episode is truncated."""
    max_tool_calls: int = Field(400, ge=0)
    """Maximum number of tool calls per episode; further calls are not run and the episode is truncated."""
    tool_timeout_s: float = Field(3600.0, gt=0)
    """Wall-clock limit of one tool call, in seconds, for tools without a separate `timeout_s`."""
    wall_s: float = Field(600.0, gt=0)
    """Wall-clock limit of one command, in seconds; less if the agent's time for the task ends earlier."""
    cpu_s: float = Field(3600.0, gt=0)
    """CPU time limit of one process of the tests, in seconds."""
    memory_mb: int = Field(2048, ge=256)
    """Memory of a sandbox including the content of its writable folders, in MiB; less if the task specifies less."""
    disk_mb: int = Field(256, ge=1)
    """Size of each writable folder, in MiB."""
    max_agent_s: float | None = Field(None, gt=0)
    """Upper bound of the agent's time per task, in seconds; None: the task's limit alone applies."""


async def verified(env: Harbor) -> float:
    """Reward of the task's tests for the agent's files."""
    return await env.verify()


def no_verdict(env: Harbor) -> float:
    """1 if the tests ended without a verdict, which gives reward 0; otherwise 0."""
    return float(env.verdict is None and not env.left_unmoved)


def not_moved(env: Harbor) -> float:
    """1 if the agent's files were too large or unreadable, so no test ran and the reward is 0; otherwise 0."""
    return float(env.left_unmoved)


class Harbor(fe.SandboxEnvironment):
    """Tasks in the format of Harbor and Terminal-Bench, from a folder."""

    api_version = 1
    config_class = HarborConfig
    splits = ("train",)
    system_prompt = (
        "You work at a Linux shell, through the tool bash, without network. Do what you are asked, look whether it is "
        "right, then call submit."
    )
    config: HarborConfig
    rubric = fe.Rubric([verified], metrics=[no_verdict, not_moved])
    bash = fe.tools.bash(
        stateful=True,
        description="Run a shell command and return its output. Variables and the current folder live on from one "
        "command to the next.",
    )
    submit = fe.tools.submit(with_answer=False)

    def __init__(self, config: HarborConfig | None = None, **context: Any) -> None:
        super().__init__(config, **context)
        for folder in self.config.writable:  # raise early for folders that can never be writable
            SandboxSpec(writable=(folder,))
        tasks, self._refused = read_folder(self.config.folder)
        if unknown := set(self.config.tasks) - {task.name for task in tasks} - set(self._refused):
            names = ", ".join(task.name for task in tasks)
            raise UsageError(f"no task {sorted(unknown)[0]!r} in {self.config.folder}", fix=f"available: {names}")
        self._tasks = [task for task in tasks if not self.config.tasks or task.name in self.config.tasks]
        self.verdict: dict[str, float] | None = None
        """Scores written by the tests; None if names are none (yet)."""
        self.left_unmoved = False
        """Whether the agent's files could not be copied to the tests' sandbox, so the tests did not run."""
        self._until = math.inf

    def num_tasks(self, split: str) -> int:
        """Number of playable tasks in the folder."""
        return len(self._tasks)

    def task(self, split: str, index: int) -> Task:
        """Return the task with this index, in order of names. `UsageError`: no task of the folder can be played."""
        if not self._tasks and self._refused:
            name, why = next(iter(self._refused.items()))
            raise UsageError(f"{name} can't be played: {why}", fix=f"none of {self.config.folder} can")
        source = self._tasks[index]
        texts = {path.name: path.read_text(errors="replace") for path in {source.script, *source.tests.glob("*.py")}}
        return Task(
            id=source.name,
            prompt=source.instruction,
            data={"index": index, "tests": texts},
            tags=list(source.tags),
            split=split,
        )

    async def unplayable(self, tasks: Sequence[Task]) -> Mapping[str, str]:
        """Tasks that need unsupported features or whose image can't be built, with the reason."""
        missing, engine = dict(self._refused), self.sandboxes
        if engine is None:
            return missing
        for task in tasks:
            try:
                await Images.of(engine).build(self.spec_of(task))
                await Images.of(engine).build(self.tests_spec_of(task))
            except (ImageError, UsageError) as error:
                missing[task.id] = str(error)
        return missing

    def gold_actions(self, task: Task) -> list[Action] | None:
        """Write the solution's files, run it, and submit."""
        source = self._tasks[task.data["index"]]
        if source.solution is None:
            return None
        beside = source.solution.parent.rglob("*") if source.solution.name == "solve.sh" else [source.solution]
        files = {path.relative_to(source.solution.parent): path for path in beside if path.is_file()}
        lines = []
        for name, path in sorted(files.items()):
            target = shlex.quote(f"{SOLUTION}/{name}")
            text = base64.encodebytes(path.read_bytes()).decode()
            lines += [f"mkdir -p $(dirname {target})", f"base64 -d > {target} << 'END_OF_FILE'\n{text}END_OF_FILE"]
        variables = " ".join(shlex.quote(f"{name}={value}") for name, value in source.solution_variables.items())
        program = shlex.quote(f"{SOLUTION}/{source.solution.name}")
        lines += [f"chmod +x {program}", f"env {variables} bash {program}"]
        return [fe.call_tool("bash", command="\n".join(lines)), fe.call_tool("submit")]

    # --- the episode

    @property
    def playing(self) -> HarborTask:
        """The task of this episode, as read from the folder."""
        task: HarborTask = self._tasks[self.current_task.data["index"]]
        return task

    def _shell_start(self) -> tuple[str | None, Mapping[str, str]]:
        return self.playing.workdir, {"HOME": HOME, **self.playing.variables}

    @property
    def limits(self) -> Limits:
        """Limits of a command: the configured ones, and the remaining time of the agent."""
        return replace(self._limits, wall_s=max(0.1, min(self.config.wall_s, self._until - time.monotonic())))

    @property
    def _limits(self) -> Limits:
        memory_mb = self.spec_of(self.current_task).memory_mb - SCRATCH_MB
        given = {"processes": 256, "open_files": 1024, "file_size_mb": self.config.disk_mb}
        return Limits(wall_s=self.playing.tests_s, cpu_s=self.config.cpu_s, memory_mb=memory_mb, **given)

    def spec_of(self, task: Task) -> SandboxSpec:
        """Sandbox specification with the task's image, folders, network access and memory."""
        source = self._tasks[task.data["index"]]
        return self._spec_in(source, source, {SOLUTION})

    def tests_spec_of(self, task: Task) -> SandboxSpec:
        """Sandbox specification of the tests: the agent's, unless they have an environment of their own."""
        source = self._tasks[task.data["index"]]
        return self.spec_of(task) if source.separate is None else self._spec_in(source, source.separate, set())

    def _spec_in(self, source: HarborTask, machine: HarborTask | Separate, folders: set[str]) -> SandboxSpec:
        shared = source.separate.folders if source.separate else set()
        wanted = {machine.workdir, TESTS, LOGS, HOME, *folders, *shared, *self.config.writable} - {"/"}
        outermost = {path for path in wanted if not any(path != other and is_below(path, other) for other in wanted)}
        hosts = machine.hosts if self.config.network else ()
        return SandboxSpec(
            machine.image,
            base=self.config.base_image if machine.image.startswith("/") else "",
            writable=tuple(sorted(outermost)),
            network=hosts is None,
            allow=hosts or (),
            disk_mb=self.config.disk_mb,
            memory_mb=min(self.config.memory_mb, machine.memory_mb or self.config.memory_mb),
        )

    async def _begin(self, task: Task) -> None:
        self.verdict, self.left_unmoved = None, False
        self._until = math.inf
        try:
            self.spec_of(task)
            self.tests_spec_of(task)
        except UsageError as error:  # such as a folder that is never writable
            raise InfrastructureError(f"task {task.id!r} can't be played here: {error.message}") from error
        try:
            with limited_elsewhere():  # an image may have to be built
                await super()._begin(task)
                if self.playing.separate is not None:
                    assert self.sandboxes is not None
                    await Images.of(self.sandboxes).build(self.tests_spec_of(task))
                    await self.sandbox.exec(["mkdir", "-p", PUBLISHED])
        except ImageError as error:  # affects this task alone; others can still run
            raise InfrastructureError(f"task {task.id!r} can't be played here: {error.message}") from error
        self._until = time.monotonic() + min(self.playing.agent_s, self.config.max_agent_s or math.inf)

    async def step(self, action: Action) -> StepResult:
        """Step as in any tool environment; truncate the episode once the agent's time for the task is used up."""
        observation, reward, terminated, truncated, info = await super().step(action)
        if terminated or truncated or time.monotonic() < self._until:
            return observation, reward, terminated, truncated, info
        reward, metrics = await self.truncate("agent_time")
        return observation, reward, False, True, {"metrics": metrics, "truncation": "agent_time"}

    async def verify(self) -> float:
        """Run the tests on a copy of the agent's files in a fresh sandbox and return their reward."""
        task, separate = self.playing, self.playing.separate
        folders = [folder for folder in self._spec.writable if folder not in (TESTS, SOLUTION)]
        await self._collect(separate)
        try:
            left = await Archives.of(self.sandbox).pack(folders, leave_out=[VERDICT])
        except SandboxFileError:  # too much to copy
            self.left_unmoved = True
            explain("left too many files to copy to the tests")
            return 0.0
        if separate is not None:
            left, folders = await asyncio.to_thread(only, left, separate.artifacts), []
        with limited_elsewhere():
            async with self.fresh_sandbox(self.tests_spec_of(self.current_task)) as fresh:
                await Archives.of(fresh).unpack(left, instead_of=folders)
                ended = await self._run_tests(fresh, task)
                self.verdict = await _verdict(fresh, ended, task)
        reward = 0.0 if self.verdict is None else _reward(self.verdict)
        if reward < 1.0:
            scores = [f"{name}: {value:g}" for name, value in (self.verdict or {}).items()]
            explain(self._why_failed(ended), [as_text(ended)[-LONGEST_FAILURE:], *scores])
        return reward

    async def _collect(self, separate: Separate | None) -> None:
        """Run the task's commands that write files for the tests; as in Harbor, they may fail."""
        for command, seconds in () if separate is None else separate.collect:
            folder, variables = self._shell_start()
            limits = replace(self._limits, wall_s=seconds)
            await self.sandbox.exec(["bash", "-c", command], env=variables, cwd=folder, limits=limits)

    def _why_failed(self, ended: ExecResult) -> str:
        script = self.playing.script.name
        if ended.timed_out:
            return f"timed out in {script}"
        return f"failed {script}" if self.verdict is not None else f"{script} wrote no reward"

    async def _run_tests(self, fresh: Sandbox, task: HarborTask) -> ExecResult:
        script, machine = f"{TESTS}/{task.script.name}", task.separate or task
        if not (task.separate and task.separate.has_tests):
            if task.tests.is_dir():
                await fresh.copy_in(task.tests, TESTS)
            await fresh.write_file(script, await asyncio.to_thread(task.script.read_bytes))
        command = f"mkdir -p {VERDICT} {LOGS}/agent; chmod +x {script}; exec {script}"
        given = {"HOME": HOME, **machine.variables, **task.test_variables}
        memory_mb = self.tests_spec_of(self.current_task).memory_mb
        limits = replace(self._limits, memory_mb=max(memory_mb - SCRATCH_MB, memory_mb // 2))
        return await fresh.exec(["bash", "-c", command], env=given, cwd=machine.workdir, limits=limits)


async def _verdict(fresh: Sandbox, ended: ExecResult, task: HarborTask) -> dict[str, float] | None:
    """Scores of the tests by name; None if there are none or they can't be parsed."""
    if task.by_exit_code:
        return {"reward": float(ended.ok)}
    for name in ("reward.json", "reward.txt"):
        try:
            text = await fresh.read_text(f"{VERDICT}/{name}")
        except OSError:
            continue
        try:
            result = json.loads(text) if name == "reward.json" else {"reward": float(text)}
            values = {
                str(key): float(value) for key, value in (result if isinstance(result, dict) else {"": result}).items()
            }
        except (ValueError, TypeError, OverflowError, RecursionError):
            return None
        return values if values and all(map(math.isfinite, values.values())) else None
    return None


def _reward(said: Mapping[str, float]) -> float:
    """The score named `reward`, or the mean of all scores, each clipped to [0, 1]."""
    within = {name: min(max(value, 0.0), 1.0) for name, value in said.items()}
    return within["reward"] if "reward" in within else sum(within.values()) / len(within)
