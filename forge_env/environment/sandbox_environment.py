"""Environments whose agent works in a sandbox: one an episode, clean at its start, given back at its end.

    class Cleanup(fe.SandboxEnvironment):
        rubric = fe.Rubric(done)

        def files(self, task):
            return {"log.txt": task.data["public_log"]}

        bash = fe.tools.bash()

What judges the agent's work never goes into its sandbox: read what it made with `self.sandbox.read_file`, and compare
outside, or run its code in a fresh sandbox of `self.sandboxes.session()`.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypedDict

from pydantic import Field

from forge_env.environment.base import EnvironmentConfig
from forge_env.environment.tool_environment import ToolEnvironment, ToolEnvironmentConfig
from forge_env.errors import (
    EnvironmentBugError,
    SandboxFileError,
    SandboxPathError,
    ToolError,
    UsageError,
    environment_code,
)
from forge_env.rewards.reasons import explain
from forge_env.sandbox import ExecResult, How, Limits, Sandbox, SandboxSpec, Session, TestsResult
from forge_env.trajectory import NOT_CHEAT_PROOF
from forge_env.types import Task


class _Where(TypedDict, total=False):
    env: Mapping[str, str]
    cwd: str | None


TESTS_RESULTS: ContextVar[list[TestsResult] | None] = ContextVar("tests_results", default=None)
"""Collects the results of hidden tests for `validate`."""


class SandboxEnvironmentConfig(ToolEnvironmentConfig):
    """Limits of what runs in the sandbox.

    Examples:
        >>> import forge_env as fe
        >>> fe.SandboxEnvironmentConfig(wall_s=30).memory_mb
        256
    """

    wall_s: float = Field(10.0, gt=0)
    """Wall seconds of one command or program."""
    cpu_s: float = Field(5.0, gt=0)
    """CPU seconds of one command or program; those in a session have wall seconds only."""
    memory_mb: int = Field(256, ge=32)
    """Memory of one command or program, MiB."""
    require_cheat_proof: bool = False
    """Reject scores that the judged code could have forged: tests that must share its process are an error, and a
    verdict with doubts counts as failed."""


class SandboxEnvironment(ToolEnvironment):
    """A tool environment with a sandbox for each episode.

    A subclass gives `task` (or `tasks`) and `rubric`; where needed also `files`, what the work folder begins with.

    Args:
        config: its options, an object of `config_class`; None: the defaults.
        context: `sandboxes`, the started engine.

    Examples:
        >>> import forge_env as fe
        >>> async def hidden_tests(env, task):
        ...     result = await env.run_hidden_tests({"test_double.py": task.data["tests"]})
        ...     return float(result.passed)
        >>> class Double(fe.SandboxEnvironment):
        ...     rubric = fe.Rubric(hidden_tests)
        ...     bash = fe.tools.bash()
        ...     editor = fe.tools.files()
        ...
        ...     def task(self, split, index):
        ...         tests = "from double import double\\ndef test_double(): assert double(21) == 42"
        ...         return fe.Task(id=f"{split}-{index}", prompt="Write double.py.", data={"tests": tests}, split=split)
        >>> sorted(tool.name for tool in Double().tools)
        ['bash', 'str_replace_based_edit_tool']
    """

    config_class: ClassVar[type[EnvironmentConfig]] = SandboxEnvironmentConfig
    sandbox_spec: ClassVar[SandboxSpec] = SandboxSpec()
    """Image, network, disk and memory of the sandbox; `spec_of`, where tasks differ in them."""

    def __init__(self, config: EnvironmentConfig | None = None, **context: Any) -> None:
        super().__init__(config, **context)
        if not isinstance(self.sandbox_spec, SandboxSpec):
            given = f"{type(self).__name__}.sandbox_spec is a {type(self.sandbox_spec).__name__}"
            raise UsageError(given, fix="write fe.SandboxSpec(...)")
        if self.sandboxes is not None:
            self.sandboxes.check(self.sandbox_spec)
        self._box: Sandbox | None = None
        self._spec = self.sandbox_spec
        """Of this episode."""
        self._origin = ""
        """`SandboxSpec.origin` of every episode's sandbox."""
        self._given: Mapping[str, str | bytes] = {}
        """What the work folder of this episode began with."""
        self._left: dict[str, bytes] | None = None
        """What the agent left in its sandbox, once that was given back."""
        self._not_moved = False
        """What it left is more than can be moved to another sandbox."""
        self._doubtful = False
        """Whether hidden tests passed that a cheat could have passed too."""
        self._holding = AsyncExitStack()
        self._sessions: dict[str, Session] = {}
        self._session_turn = asyncio.Lock()

    def files(self, task: Task) -> Mapping[str, str | bytes]:
        """What is in the sandbox's work folder when the episode starts: path -> content. Never what judges it.

        Args:
            task: of this episode.
        """
        return {}

    def spec_of(self, task: Task) -> SandboxSpec:
        """The sandbox that a task is played in, and judged in: `sandbox_spec`, unless tasks differ in it.

        An image is built, and packages are installed, when the first episode needs them.

        Args:
            task: any.
        """
        return self.sandbox_spec

    @property
    def sandbox(self) -> Sandbox:
        """The episode's sandbox, from `setup` to `cleanup`, in tools and in reward functions."""
        if self._box is None and self._left is not None:
            fix = "use read_text, run_hidden_tests, or `async with self.fresh_sandbox()`"
            raise UsageError("the sandbox was given back for a fresh one", fix=fix)
        if self._box is None:
            raise UsageError("there is no running episode", fix="call reset() first")
        return self._box

    @property
    def limits(self) -> Limits:
        """The limits of the config, for calls of `sandbox`."""
        return Limits(wall_s=self.config.wall_s, cpu_s=self.config.cpu_s, memory_mb=self.config.memory_mb)

    @property
    def command_folder(self) -> str | None:
        """Where shell commands begin: below the work folder, or a writable one. None: the work folder itself."""
        return None

    @property
    def command_variables(self) -> Mapping[str, str]:
        """Variables of shell commands, besides the sandbox's own."""
        return {}

    async def run_bash(self, command: str, *, limits: Limits | None = None) -> str:
        """Run a shell command in the work folder; its output and how it ended, as an agent reads it.

        Files stay from one command to the next, variables and background processes don't.

        Args:
            command: any shell source.
            limits: of this command; `self.limits` when not given.
        """
        source = f"{_without_nul(command, 'a command')}\n"
        where: _Where = {"env": self.command_variables, "cwd": self.command_folder}
        return as_text(await self.sandbox.exec(["bash", "-s"], stdin=source, limits=limits or self.limits, **where))

    async def run_python(self, code: str, *, stdin: str = "", limits: Limits | None = None) -> str:
        """Run a Python program in the work folder; its output and how it ended, as an agent reads it.

        Args:
            code: the program.
            stdin: what it reads.
            limits: of this program; `self.limits` when not given.
        """
        return as_text(await self.sandbox.run_python(code, stdin=stdin, limits=limits or self.limits))

    async def run_bash_session(self, command: str, *, limits: Limits | None = None) -> str:
        """`run_bash` in the episode's shell: variables, the folder and background processes live on.

        Args:
            command: any shell source.
            limits: of this command; `self.limits` when not given.
        """
        return await self._run_in_session("shell", _without_nul(command, "a command"), limits or self.limits)

    async def run_python_session(self, code: str, *, limits: Limits | None = None) -> str:
        """Run a cell in the episode's Python: names live on, and the value of a last expression is shown.

        Args:
            code: the cell.
            limits: of this cell; `self.limits` when not given.
        """
        return await self._run_in_session("python", _without_nul(code, "code"), limits or self.limits)

    async def read_text(self, path: str) -> str | None:
        """A file that the agent left in the work folder; None when there is none, or none that can be read.

        Args:
            path: relative to the work folder.
        """
        if self._left is not None:
            data = self._left.get(posixpath.normpath(path))
            return None if data is None else data.decode("utf-8", "replace")
        try:
            return await self.sandbox.read_text(path)
        except OSError:
            return None

    async def run_hidden_tests(
        self, tests: Mapping[str, str | bytes], *, how: How | None = None, limits: Limits | None = None
    ) -> TestsResult:
        """Judge the files that the agent has left by tests it never saw, for reward functions.

        They are copied into a `fresh_sandbox` (see `Sandbox.run_tests`).

        Args:
            tests: test files by path, with what they import; they replace files of the agent's.
            how: apart or counted; by default as the tests need it.
            limits: of each process; `self.limits` when not given.
        """
        async with self.fresh_sandbox() as fresh:
            result = await fresh.run_tests(files=self._left, tests=tests, how=how, limits=limits or self.limits)
        if (results := TESTS_RESULTS.get()) is not None:
            results.append(result)
        if result.passed and result.doubts:
            result = self._doubted(result)
        if not result.passed:
            explain(_why_failed(result), result.failures)
        return result

    def _doubted(self, result: TestsResult) -> TestsResult:
        """Count a passed result that is not cheat-proof, or reject it if the option requires that."""
        if not self.config.require_cheat_proof:
            self._doubtful = True
            return result
        if result.how == "counted":
            fix = "write tests that can run apart (docs/sandboxes.md), or set require_cheat_proof: false"
            raise UsageError(f"hidden tests of {type(self).__name__} are not cheat-proof: {result.doubts[0]}", fix=fix)
        return replace(result, passed=False, failed=result.total, failures=result.doubts)

    @asynccontextmanager
    async def fresh_sandbox(self) -> AsyncIterator[Sandbox]:
        """A sandbox that no program of the agent's has touched, for reward functions.

        The agent's own is given back before, so that episodes that are judged never wait for each other's sandboxes:
        afterwards `sandbox` is gone. `read_text` and `run_hidden_tests` still know its files. Where these are more than
        can be moved (128 MiB), nothing is left of them, and the metric `not_moved` is 1.
        """
        await self._give_back()
        assert self.sandboxes is not None
        async with self.sandboxes.session(self._spec) as fresh:
            yield fresh

    def _counted(self) -> dict[str, float]:
        flags = {"not_moved": self._not_moved, NOT_CHEAT_PROOF: self._doubtful}
        return {**super()._counted(), **{name: 1.0 for name, is_set in flags.items() if is_set}}

    async def _give_back(self) -> None:
        """Keep what the agent left, and have the engine take its sandbox."""
        if self._left is not None:
            return
        try:
            self._left = await self.sandbox.read_files()
        except SandboxFileError:
            self._left, self._not_moved = {}, True
        self._box = None
        self._sessions.clear()
        await self._holding.aclose()

    async def _run_in_session(self, kind: Literal["shell", "python"], source: str, limits: Limits) -> str:
        """Run it in the episode's session, or in a new one where that has ended, which the agent is told."""
        async with self._session_turn:  # calls of one message run in order, and share what the first began
            session, note = self._sessions.get(kind), ""
            if session is None or not session.alive:
                note = "" if session is None else f"[a new {kind} session: nothing of the last one is left but files]\n"
                begin = self.sandbox.shell if kind == "shell" else self.sandbox.python
                where: _Where = {"env": self.command_variables, "cwd": self.command_folder} if kind == "shell" else {}
                session = self._sessions[kind] = await begin(limits=limits, **where)
            result = await session.run(source, limits=limits)
            ended = "" if session.alive else f"\n[the {kind} session has ended; the next call begins a new one]"
            return f"{note}{as_text(result)}{ended}"

    async def _begin(self, task: Task) -> None:
        if self.sandboxes is None:
            name = type(self).__name__
            raise UsageError(f"{name} runs code and was given no sandboxes", fix="fe.make(NAME, sandboxes=engine)")
        self._left, self._not_moved, self._doubtful = None, False, False
        what = f"{type(self).__name__}.spec_of"
        with environment_code(what, task.id):
            spec = self.spec_of(task)
        if not isinstance(spec, SandboxSpec):
            raise EnvironmentBugError(f"{what} returned a {type(spec).__name__}", fix="return fe.SandboxSpec(...)")
        self._spec = replace(spec, origin=self._origin) if self._origin else spec
        self._box = await self._holding.enter_async_context(self.sandboxes.session(self._spec))
        what = f"{type(self).__name__}.files"
        with environment_code(what, task.id):
            files = self.files(task)
        if not isinstance(files, Mapping):
            raise EnvironmentBugError(f"{what} returned a {type(files).__name__}", fix="return {path: text or bytes}")
        self._given = files
        try:
            await self._box.write_files(files)
        except (SandboxPathError, UsageError) as error:
            raise EnvironmentBugError(f"{what}: {error.message}", fix=error.fix) from error
        await super()._begin(task)

    async def _end(self) -> None:
        try:
            await super()._end()
        finally:
            self._box = self._left = None
            self._sessions.clear()  # they end with the sandbox
            await self._holding.aclose()


def _without_nul(source: str, what: str) -> str:
    if "\0" in source:
        raise ToolError(f"{what} can't hold a NUL character")
    return source


def as_text(result: ExecResult) -> str:
    """Output of a program and how it ended, where that is worth a word."""
    output = result.stdout + result.stderr
    if result.timed_out:
        ended = "stopped: it took too long"
    elif result.out_of_memory:
        ended = "stopped: it took too much memory"
    elif result.signal is not None:
        ended = f"signal {result.signal}"
    elif result.exit_code:
        ended = f"exit code {result.exit_code}"
    else:
        return output or "[no output]"
    return f"{output}\n[{ended}]".lstrip("\n")


def _why_failed(result: TestsResult) -> str:
    """The kind of failure of hidden tests."""
    if result.execution.timed_out:
        return "timed out in hidden tests"
    if result.execution.out_of_memory:
        return "ran out of memory in hidden tests"
    return "failed hidden tests" if result.total else "no hidden test ran"
