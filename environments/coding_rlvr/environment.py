"""Environment in which the agent writes a Python function, tries it with a tool and submits it to hidden tests."""

from __future__ import annotations

from random import Random
from typing import Any

from pydantic import Field, field_validator

import forge_env as fe
from environments.coding_rlvr import demonstrator
from environments.coding_rlvr.checks import Check, run_checks
from environments.coding_rlvr.conversation import SYSTEM_PROMPT, code_of, failures, report
from environments.coding_rlvr.families import LEVELS
from environments.coding_rlvr.rows import ROW_SYSTEM_PROMPT, checks_of, load_rows
from environments.coding_rlvr.tasks import SPLITS, make_task, select_families
from forge_env.environment.tool_environment import ToolEnvironmentConfig
from forge_env.errors import UsageError
from forge_env.rewards.reasons import explain
from forge_env.sandbox import CallsResult, Limits
from forge_env.tasks.datasets import DatasetConfig
from forge_env.types import Message, Observation, Task


class CodingRLVRConfig(ToolEnvironmentConfig):
    """Task selection, limits, rewards, and behavior of the demonstrator."""

    dataset: DatasetConfig | None = None
    """Dataset in the style of MBPP, HumanEval or LiveCodeBench instead of generated tasks; `levels` is then ignored."""
    max_turns: int = Field(4, ge=1)
    """Maximum number of assistant messages before the episode is truncated."""
    max_tool_calls: int = Field(3, ge=0)
    """Maximum number of tool calls before the episode is truncated."""
    levels: list[int] = Field(default_factory=lambda: [1, 2], min_length=1)
    """Difficulty levels, 1 to 4, drawn uniformly."""
    families: list[str] = Field(default_factory=list)
    """Prefixes of the families to use, such as "lists/" or "strings/reverse"; empty: all families."""
    tool_share: float = Field(0.0, ge=0.0, le=0.5)
    """Share of the reward for calling the tool and submitting code; the rest is for solving the task."""
    wall_s: float = Field(5.0, gt=0)
    """Wall-clock limit of one run of the code, in seconds."""
    cpu_s: float = Field(2.0, gt=0)
    """CPU time limit of one run of the code, in seconds."""
    memory_mb: int = Field(256, ge=32)
    """Memory limit of one run of the code, in MiB."""
    demo_slip: float = Field(0.5, ge=0.0, le=1.0)
    """Probability that an attempt in a demonstration has one wrong step."""
    demo_repair: float = Field(0.3, ge=0.0, le=1.0)
    """Probability that a failed attempt in a demonstration is repaired after the tool's report."""
    demo_give_up: float = Field(0.5, ge=0.0, le=1.0)
    """Probability that a failed attempt in a demonstration is submitted anyway."""
    demo_tool: float = Field(0.85, ge=0.0, le=1.0)
    """Probability that a demonstration uses the tool."""

    @field_validator("levels")
    @classmethod
    def _known_levels(cls, levels: list[int]) -> list[int]:
        if wrong := [level for level in levels if level not in LEVELS]:
            raise ValueError(f"no level {wrong[0]}; levels are {', '.join(map(str, LEVELS))}")
        return sorted(set(levels))


class CodingRLVR(fe.ToolEnvironment):
    """Short Python tasks in plain English, with a tool to try code and hidden tests that determine the reward.

    Splits: `train`; `eval`, with programs that never occur in `train`; `unseen`, with families that occur in neither.
    """

    api_version = 1
    config_class = CodingRLVRConfig
    splits = SPLITS
    system_prompt = SYSTEM_PROMPT
    config: CodingRLVRConfig

    def __init__(self, config: CodingRLVRConfig | None = None, **context: Any) -> None:
        share = (config or CodingRLVRConfig()).tool_share
        self.rubric = fe.Rubric({"solved": _solved, "used_tool": _tool_then_answer}, weights=[1.0 - share, share])
        super().__init__(config, **context)
        self._limits = Limits(wall_s=self.config.wall_s, cpu_s=self.config.cpu_s, memory_mb=self.config.memory_mb)
        self._tried: str | None = None
        self._tried_well = False
        """Whether the code tried last passed the public tests."""
        select_families(tuple(self.config.levels), tuple(self.config.families))  # raises if no family is selected

    def task(self, split: str, index: int) -> Task:
        """Return task `index` of `split`, determined by the seed, levels and families alone."""
        if self.config.dataset is not None:
            return load_rows(self.config.dataset, split)[index]
        return make_task(self.config.seed, split, index, self.config.levels, self.config.families)

    def num_tasks(self, split: str) -> int | None:
        """Number of dataset rows; None if tasks are generated, which never run out."""
        if self.config.dataset is None:
            return None
        return len(load_rows(self.config.dataset, split)) if split in ("train", "eval") else 0

    def prompt(self, task: Task) -> Observation:
        """The system prompt and the task."""
        system = SYSTEM_PROMPT if self.config.dataset is None else ROW_SYSTEM_PROMPT
        return [Message(role="system", content=system), Message(role="user", content=task.prompt)]

    def demonstrate(self, task: Task, rng: Random) -> list[Message]:
        """Generate a conversation of an imperfect demonstrator for a supervised warm-up.

        Raises:
            UsageError: the task is held out.
        """
        if task.split != "train":
            raise UsageError(f"task {task.id} is held out", fix="demonstrate tasks of split 'train' only")
        return demonstrator.demonstrate(task, rng, self.prompt(task), self.config)

    async def setup(self, task: Task) -> None:
        """Clear the code tried in the last episode."""
        self._tried, self._tried_well = None, False

    @property
    def submission(self) -> str | None:
        """The submitted code: the answer's last code block, or the code tried last if the answer has none."""
        return code_of(self.answer) or self._tried

    @fe.tool
    async def python(self, code: str) -> str:
        """Run code on the tests."""
        self._tried = code
        tests: list[Check] = self.current_task.data["public"]
        result = await self._run(code, tests)
        failed = failures(tests, result.outcomes, _why_ended(result))
        self._tried_well = not failed
        return report(len(tests), failed, printed=result.execution.stdout)

    async def hidden_tests_pass(self, code: str) -> bool:
        """Whether `code` passes every hidden test, in a fresh sandbox that has run no other code."""
        checks = checks_of(self.current_task)
        result = await self._run(code, checks)
        if failed := failures(checks, result.outcomes, _why_ended(result)):
            explain(self._why_failed(code), failed)
        return not failed

    def _why_failed(self, code: str) -> str:
        if code != self._tried:
            return "failed hidden tests"
        if self._tried_well:
            return "passed the visible tests, failed hidden ones"
        return "handed in with failing visible tests"

    async def _run(self, code: str, tests: list[Check]) -> CallsResult:
        if self.sandboxes is None:
            raise UsageError("coding_rlvr runs code and needs sandboxes", fix="pass an engine: open_engine()")
        async with self.sandboxes.session() as sandbox:
            return await run_checks(sandbox, code, tests, self._limits, self.current_task.data.get("public_setup"))


async def _solved(env: CodingRLVR) -> float:
    code = env.submission
    if code is None:
        explain("no code was handed in")
    return float(code is not None and await env.hidden_tests_pass(code))


def _tool_then_answer(env: CodingRLVR) -> float:
    return float(env.tool_calls > 0 and env.submission is not None)


def _why_ended(result: CallsResult) -> str:
    execution = result.execution
    if execution.timed_out:
        return "timed out"
    if execution.out_of_memory:
        return "ran out of memory"
    errors = execution.stderr.strip().splitlines()
    return f"failed: {errors[-1][:80]}" if errors else "ended the program"
