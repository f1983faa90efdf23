"""Environments whose agent works in a sandbox: one an episode, clean at its start, given back at its end.

    class Cleanup(fe.SandboxEnvironment):
        rubric = fe.Rubric(done)

        def files(self, task):
            return {"log.txt": task.data["public_log"]}

        @fe.tool
        async def bash(self, command: str) -> str:
            \"\"\"Run a shell command.\"\"\"
            return await self.run_bash(command)

What judges the agent's work never goes into its sandbox: read what it made with `self.sandbox.read_file`, and compare
outside, or run its code in a fresh sandbox of `self.sandboxes.session()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, ClassVar

from pydantic import Field

from forge_env.environment.base import EnvironmentConfig
from forge_env.environment.tool_environment import ToolEnvironment, ToolEnvironmentConfig
from forge_env.errors import ToolError, UsageError, environment_code
from forge_env.sandbox import ExecResult, Limits, Sandbox, SandboxSpec
from forge_env.types import Task


class SandboxEnvironmentConfig(ToolEnvironmentConfig):
    """Limits of what runs in the sandbox."""

    wall_s: float = Field(10.0, gt=0)
    """Wall seconds of one command or program."""
    cpu_s: float = Field(5.0, gt=0)
    """CPU seconds of one command or program."""
    memory_mb: int = Field(256, ge=32)
    """Memory of one command or program, MiB."""


class SandboxEnvironment(ToolEnvironment):
    """A tool environment with a sandbox for each episode."""

    config_class: ClassVar[type[EnvironmentConfig]] = SandboxEnvironmentConfig
    sandbox_spec: ClassVar[SandboxSpec] = SandboxSpec()
    """Image, network, disk and memory of the sandbox."""

    def __init__(self, config: EnvironmentConfig | None = None, **context: Any) -> None:
        super().__init__(config, **context)
        self._box: Sandbox | None = None
        self._holding = AsyncExitStack()

    def files(self, task: Task) -> Mapping[str, str | bytes]:
        """What is in the sandbox's work folder when the episode starts: path -> content. Never what judges it."""
        return {}

    @property
    def sandbox(self) -> Sandbox:
        """The episode's sandbox, from `setup` to `cleanup`, in tools and in reward functions."""
        if self._box is None:
            raise UsageError("there is no running episode", fix="call reset() first")
        return self._box

    @property
    def limits(self) -> Limits:
        """The limits of the config, for calls of `sandbox`."""
        return Limits(wall_s=self.config.wall_s, cpu_s=self.config.cpu_s, memory_mb=self.config.memory_mb)

    async def run_bash(self, command: str) -> str:
        """Run a shell command in the work folder; its output and how it ended, as an agent reads it.

        Files stay from one command to the next, variables and background processes don't.
        """
        if "\0" in command:
            raise ToolError("a command can't hold a NUL character")
        return as_text(await self.sandbox.exec(["bash", "-s"], stdin=f"{command}\n", limits=self.limits))

    async def run_python(self, code: str, *, stdin: str = "") -> str:
        """Run a Python program in the work folder; its output and how it ended, as an agent reads it."""
        return as_text(await self.sandbox.run_python(code, stdin=stdin, limits=self.limits))

    async def read_text(self, path: str) -> str | None:
        """A file that the agent left in the work folder; None when there is none, or none that can be read."""
        try:
            return await self.sandbox.read_text(path)
        except OSError:
            return None

    async def _begin(self, task: Task) -> None:
        if self.sandboxes is None:
            name = type(self).__name__
            raise UsageError(f"{name} runs code and was given no sandboxes", fix="fe.make(NAME, sandboxes=engine)")
        self._box = await self._holding.enter_async_context(self.sandboxes.session(self.sandbox_spec))
        with environment_code(f"{type(self).__name__}.files", task.id):
            files = self.files(task)
        await self._box.write_files(files)
        await super()._begin(task)

    async def _end(self) -> None:
        try:
            await super()._end()
        finally:
            self._box = None
            await self._holding.aclose()


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
