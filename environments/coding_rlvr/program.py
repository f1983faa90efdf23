"""The tasks of `coding_rlvr`, solved by a separate agent program (`agent.py`, based on the `openai` package)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

import forge_env as fe
from environments.coding_rlvr.checks import Check, passes, run_checks
from environments.coding_rlvr.tasks import SPLITS, make_task, select_families
from forge_env.environment.program_environment import ProgramEnvironmentConfig
from forge_env.sandbox import Limits

PRELOAD = (
    *("openai", "openai.resources.chat.chat", "openai.resources.chat.completions.completions"),
    *("httpcore2", "anyio.streams.tls", "encodings.idna"),
)
"""Modules that the agent imports, including those that openai imports lazily on its first request."""
FRAMEWORKS = {
    "pydantic_ai": ("pydantic-ai-slim[openai]", ("pydantic_ai", "pydantic_ai.models.openai")),
    "openai_agents": ("openai-agents", ("agents", "openai.resources.responses.responses")),
}
"""Third-party agent frameworks: the package, and the modules to preload for `agent_NAME.py`."""
JUDGING = Limits(wall_s=5.0, cpu_s=2.0, memory_mb=256)


class CodingProgramConfig(ProgramEnvironmentConfig):
    """Task selection and the agent program."""

    levels: list[int] = Field(default_factory=lambda: [1, 2], min_length=1)
    """Difficulty levels, 1 to 4, drawn uniformly."""
    families: list[str] = Field(default_factory=list)
    """Prefixes of the families to use; empty: all families."""
    program: Literal["openai", "pydantic_ai", "openai_agents"] = "openai"
    """Framework of the agent program: a plain loop around an openai client, pydantic-ai, or the OpenAI Agents SDK."""


async def solved(env: CodingProgram, task: fe.Task) -> float:
    """1 if `solution.py` passes every hidden test, in a sandbox that the program had no access to; otherwise 0."""
    code, tests = await env.read_text("solution.py"), task.data["hidden"]
    if code is None:
        return 0.0
    async with env.fresh_sandbox() as fresh:
        outcomes = (await run_checks(fresh, code, tests, JUDGING)).outcomes
    return float(len(outcomes) == len(tests) and all(map(passes, tests, outcomes)))


class CodingProgram(fe.ProgramEnvironment):
    """Short Python tasks, solved by an agent that is a program; the splits are those of `coding_rlvr`."""

    api_version = 1
    config_class = CodingProgramConfig
    splits = SPLITS
    command = ("python", "agent.py", "{instruction}")
    rubric = fe.Rubric(solved)
    sandbox_spec = fe.SandboxSpec(packages=("openai",), preload=PRELOAD)
    config: CodingProgramConfig

    def __init__(self, config: CodingProgramConfig | None = None, **context: object) -> None:
        super().__init__(config, **context)
        if (program := self.config.program) in FRAMEWORKS:
            package, modules = FRAMEWORKS[program]
            self.command = ("python", f"agent_{program}.py", "{instruction}")  # type: ignore[misc]
            self.sandbox_spec = fe.SandboxSpec(packages=(package,), preload=(*PRELOAD, *modules))  # type: ignore[misc]
        select_families(tuple(self.config.levels), tuple(self.config.families))  # raises if no family is selected

    def task(self, split: str, index: int) -> fe.Task:
        """Return task `index` of `split`, as in `coding_rlvr`."""
        return make_task(self.config.seed, split, index, self.config.levels, self.config.families)

    def files(self, task: fe.Task) -> Mapping[str, str | bytes]:
        """The agent program and the public tests."""
        public: list[Check] = task.data["public"]
        programs = {"agent.py": _text("agent.py")}
        if (program := self.config.program) in FRAMEWORKS:
            programs[f"agent_{program}.py"] = _text(f"agent_{program}.py.txt")
        return {**programs, "tests.json": json.dumps(public)}


@cache
def _text(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
