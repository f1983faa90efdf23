"""Environments whose agent works in a sandbox: each episode leases a clean one and returns it at the end.

    class Cleanup(fe.SandboxEnvironment):
        rubric = fe.Rubric(done)

        def files(self, task):
            return {"log.txt": task.data["public_log"]}

        bash = fe.tools.bash()

Never put tests or answers into the agent's sandbox: read the agent's files with `self.sandbox.read_file` and compare
them outside, or run its code in a fresh sandbox (`self.sandboxes.session()`).
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, ClassVar, Literal

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
from forge_env.sandbox import (
    ExecResult,
    How,
    Interpreter,
    Interpreters,
    Judging,
    Limits,
    Sandbox,
    SandboxSpec,
    TestsResult,
)
from forge_env.trajectory import NOT_CHEAT_PROOF
from forge_env.types import Task

TESTS_RESULTS: ContextVar[list[TestsResult] | None] = ContextVar("tests_results", default=None)
"""List to which `run_hidden_tests` adds its results, for `validate`; None: they are not collected."""


class SandboxEnvironmentConfig(ToolEnvironmentConfig):
    """Limits of commands and programs in the sandbox.

    Examples:
        >>> import forge_env as fe
        >>> fe.SandboxEnvironmentConfig(wall_s=30).memory_mb
        256
    """

    wall_s: float = Field(10.0, gt=0)
    """Maximum wall-clock seconds of one command or program."""
    cpu_s: float = Field(5.0, gt=0)
    """Maximum CPU seconds of one command or program; those in a session have no CPU limit, only `wall_s`."""
    memory_mb: int = Field(256, ge=32)
    """Maximum memory of one command or program, MiB."""
    require_cheat_proof: bool = False
    """Reject scores that the scored code could have forged: tests that must run in its process are an error, and a
    result with doubts counts as failed."""


class SandboxEnvironment(ToolEnvironment):
    """A tool environment with a sandbox for each episode.

    A subclass defines `task` (or `tasks`) and `rubric`; if needed also `files`, the initial files of the work folder.

    Args:
        config: options, an object of `config_class`; None: the defaults.
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
    """Image, network, disk and memory of the sandbox; override `spec_of` if they differ between tasks."""

    def __init__(self, config: EnvironmentConfig | None = None, **context: Any) -> None:
        super().__init__(config, **context)
        if not isinstance(self.sandbox_spec, SandboxSpec):
            given = f"{type(self).__name__}.sandbox_spec is a {type(self.sandbox_spec).__name__}"
            raise UsageError(given, fix="write fe.SandboxSpec(...)")
        if self.sandboxes is not None:
            self.sandboxes.check(self.sandbox_spec)
        self._box: Sandbox | None = None
        self._spec = self.sandbox_spec
        """Specification of this episode's sandbox."""
        self._origin = ""
        """`SandboxSpec.origin` of every episode's sandbox."""
        self._given: Mapping[str, str | bytes] = {}
        """Initial files of this episode's work folder."""
        self._left: dict[str, bytes] | None = None
        """The agent's files at the time its sandbox was returned; None: it has not been returned."""
        self._not_moved = False
        """Whether the agent's files were too large to be moved to another sandbox."""
        self._doubtful = False
        """Whether hidden tests passed that a cheat could also have passed."""
        self._holding = AsyncExitStack()
        self._sessions: dict[str, Interpreter] = {}
        self._session_turn = asyncio.Lock()

    def files(self, task: Task) -> Mapping[str, str | bytes]:
        """Initial files of the sandbox's work folder: path -> content. Don't include hidden tests or answers.

        Args:
            task: the task of this episode.
        """
        return {}

    def spec_of(self, task: Task) -> SandboxSpec:
        """Specification of the sandboxes in which a task's episode runs and is scored; `sandbox_spec` by default.

        Images are built, and packages are installed, when the first episode needs them.

        Args:
            task: any task.
        """
        return self.sandbox_spec

    @property
    def sandbox(self) -> Sandbox:
        """The episode's sandbox, available from `setup` to `cleanup`, in tools and in reward functions."""
        if self._box is None and self._left is not None:
            fix = "use read_text, run_hidden_tests, or `async with self.fresh_sandbox()`"
            raise UsageError("the sandbox was released for a fresh one", fix=fix)
        if self._box is None:
            raise UsageError("there is no running episode", fix="call reset() first")
        return self._box

    @property
    def limits(self) -> Limits:
        """The config's limits, for calls of `sandbox`."""
        return Limits(wall_s=self.config.wall_s, cpu_s=self.config.cpu_s, memory_mb=self.config.memory_mb)

    async def run_bash(self, command: str, *, stateful: bool = False, limits: Limits | None = None) -> str:
        """Run a shell command in the work folder; return its output and exit status as text for the agent.

        Args:
            command: any shell source.
            stateful: run it in the episode's shell, in which variables, the current folder and background processes
                persist; otherwise only files do.
            limits: limits of this command; None: `self.limits`.

        Raises:
            ToolError: the command has a NUL character.
        """
        source = _without_nul(command, "a command")
        if stateful:
            return await self._run_in_session("shell", source, limits or self.limits)
        folder, variables = self._shell_start()
        result = await self.sandbox.exec(
            ["bash", "-s"], stdin=f"{source}\n", env=variables, cwd=folder, limits=limits or self.limits
        )
        return as_text(result)

    async def run_python(
        self, code: str, *, stdin: str = "", stateful: bool = False, limits: Limits | None = None
    ) -> str:
        """Run a Python program in the work folder; return its output and exit status as text for the agent.

        Args:
            code: the program.
            stdin: its standard input; a stateful program has none.
            stateful: run it in the episode's Python process, in which names persist, and show the value of a last
                expression.
            limits: limits of this program; None: `self.limits`.

        Raises:
            ToolError: a stateful program has a NUL character.
        """
        if stateful:
            return await self._run_in_session("python", _without_nul(code, "code"), limits or self.limits)
        return as_text(await self.sandbox.run_python(code, stdin=stdin, limits=limits or self.limits))

    def _shell_start(self) -> tuple[str | None, Mapping[str, str]]:
        """Initial folder of shell commands (None: the work folder), and variables in addition to the sandbox's."""
        return None, {}

    async def read_text(self, path: str) -> str | None:
        """Read one of the agent's files in the work folder; None if it doesn't exist or can't be read.

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
        """Run hidden tests on the agent's files, for reward functions.

        The files are copied into a `fresh_sandbox` (see `Sandbox.run_tests`).

        Args:
            tests: test files and the files that they import, by path; they replace the agent's files of the same path.
            how: apart or counted; None: as the tests need it.
            limits: limits of each process; None: `self.limits`.
        """
        async with self.fresh_sandbox() as fresh:
            result = await Judging.of(fresh).run_tests(
                files=self._left, tests=tests, how=how, limits=limits or self.limits
            )
        if (results := TESTS_RESULTS.get()) is not None:
            results.append(result)
        if result.passed and result.doubts:
            result = self._doubted(result)
        if not result.passed:
            explain(_why_failed(result), result.failures)
        return result

    def _doubted(self, result: TestsResult) -> TestsResult:
        """Flag a passed result that is not cheat-proof, or reject it if `require_cheat_proof` is set."""
        if not self.config.require_cheat_proof:
            self._doubtful = True
            return result
        if result.how == "counted":
            fix = "write tests that can run apart (docs/sandboxes/judging.md), or set require_cheat_proof: false"
            raise UsageError(f"hidden tests of {type(self).__name__} are not cheat-proof: {result.doubts[0]}", fix=fix)
        return replace(result, passed=False, failed=result.total, failures=result.doubts)

    @asynccontextmanager
    async def fresh_sandbox(self, spec: SandboxSpec | None = None) -> AsyncIterator[Sandbox]:
        """Lease a fresh sandbox, in which no program of the agent has run, for reward functions.

        The agent's sandbox is returned first, so that episodes that are being scored never wait for each other's
        sandboxes; `sandbox` then raises. `read_text` and `run_hidden_tests` still use its files. If these are too large
        to be moved (128 MiB), they are all discarded, and the metric `not_moved` is 1.

        Args:
            spec: the kind of sandbox; None: the agent's.
        """
        await self._give_back()
        assert self.sandboxes is not None
        async with self.sandboxes.session(spec or self._spec) as fresh:
            yield fresh

    def _counted(self) -> dict[str, float]:
        flags = {"not_moved": self._not_moved, NOT_CHEAT_PROOF: self._doubtful}
        return {**super()._counted(), **{name: 1.0 for name, is_set in flags.items() if is_set}}

    async def _give_back(self) -> None:
        """Read the agent's files and return its sandbox to the engine."""
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
        """Run source in the episode's session, or in a new one if that has ended; a note in the text reports this."""
        async with self._session_turn:  # calls of one message run in order, and share the session that the first began
            session, note = self._sessions.get(kind), ""
            if session is None or not session.alive:
                note = "" if session is None else f"[a new {kind} session: only files of the last one remain]\n"
                interpreters = Interpreters.of(self.sandbox)
                if kind == "shell":
                    folder, variables = self._shell_start()
                    session = await interpreters.shell(env=variables, cwd=folder, limits=limits)
                else:
                    session = await interpreters.python(limits=limits)
                self._sessions[kind] = session
            result = await session.run(source, limits=limits)
            ended = "" if session.alive else f"\n[the {kind} session has ended; the next call begins a new one]"
            return f"{note}{as_text(result)}{ended}"

    async def _begin(self, task: Task) -> None:
        if self.sandboxes is None:
            name = type(self).__name__
            raise UsageError(f"{name} runs code and needs sandboxes", fix="fe.make(NAME, sandboxes=engine)")
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
        raise ToolError(f"{what} can't contain a NUL character")
    return source


def as_text(result: ExecResult) -> str:
    """Output of a program, with its exit status if it failed."""
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
    """Name the kind of a failure in hidden tests."""
    if result.execution.timed_out:
        return "timed out in hidden tests"
    if result.execution.out_of_memory:
        return "ran out of memory in hidden tests"
    return "failed hidden tests" if result.total else "no hidden test ran"
