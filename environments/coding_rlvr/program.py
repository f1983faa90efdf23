"""The tasks of `coding_rlvr`, solved by a program of its own (`agent.py`, written against the `openai` package)."""

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
"""What the agent imports, also later: openai imports most of itself when it is first asked."""
FRAMEWORKS = {
    "pydantic_ai": ("pydantic-ai-slim[openai]", ("pydantic_ai", "pydantic_ai.models.openai")),
    "openai_agents": ("openai-agents", ("agents", "openai.resources.responses.responses")),
}
"""Other people's loops: the package, and what `agent_NAME.py` imports of it."""
JUDGING = Limits(wall_s=5.0, cpu_s=2.0, memory_mb=256)


class CodingProgramConfig(ProgramEnvironmentConfig):
    """Which tasks."""

    levels: list[int] = Field(default_factory=lambda: [1, 2], min_length=1)
    """Difficulty levels, 1 to 4, drawn evenly."""
    families: list[str] = Field(default_factory=list)
    """Only families whose name begins with one of these; empty: all."""
    program: Literal["openai", "pydantic_ai", "openai_agents"] = "openai"
    """What the agent is written with: a loop of its own around an openai client, pydantic-ai's, or that of the OpenAI \
Agents SDK."""


async def solved(env: CodingProgram, task: fe.Task) -> float:
    """Whether the function that the program left passes every hidden test, where the program never was."""
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
        select_families(tuple(self.config.levels), tuple(self.config.families))  # an empty choice fails here

    def task(self, split: str, index: int) -> fe.Task:
        """Task `index` of `split`, as in `coding_rlvr`."""
        return make_task(self.config.seed, split, index, self.config.levels, self.config.families)

    def files(self, task: fe.Task) -> Mapping[str, str | bytes]:
        """The agent, and the tests that it is shown."""
        public: list[Check] = task.data["public"]
        programs = {"agent.py": _text("agent.py")}
        if (program := self.config.program) in FRAMEWORKS:
            programs[f"agent_{program}.py"] = _text(f"agent_{program}.py.txt")
        return {**programs, "tests.json": json.dumps(public)}


@cache
def _text(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
