"""Environment with a shell tool and a reward for the final state of the files."""

from __future__ import annotations

import hashlib
import json
from random import Random

from pydantic import Field, field_validator

import forge_env as fe
from environments.terminal.families import FAMILIES, Work
from environments.terminal.state import look, problems
from forge_env.errors import UsageError
from forge_env.types import Action, Task

ATTEMPTS = 200


class TerminalConfig(fe.SandboxEnvironmentConfig):
    """Task selection and limits."""

    max_turns: int = Field(10, ge=1)
    """Maximum number of assistant messages before the episode is truncated."""
    families: list[str] = Field(default_factory=list)
    """Kinds of tasks to draw; empty: all kinds."""

    @field_validator("families")
    @classmethod
    def _known(cls, families: list[str]) -> list[str]:
        if wrong := [name for name in families if name not in FAMILIES]:
            raise ValueError(f"{wrong[0]!r} is not a valid kind; use some of {', '.join(FAMILIES)}")
        return families


async def done(env: Terminal) -> float:
    """1 if the files are in the expected state; otherwise 0."""
    return float(not await env.what_is_wrong())


def commands(env: Terminal) -> float:
    """Number of commands run."""
    return float(env.tool_calls)


class Terminal(fe.SandboxEnvironment):
    """Small jobs at a Linux shell: searching, counting, moving and editing files; the final state is scored."""

    api_version = 1
    config_class = TerminalConfig
    system_prompt = (
        "You work at a Linux shell through the tool bash. When the job is done, answer with a short message."
    )
    config: TerminalConfig
    rubric = fe.Rubric([done], metrics=[commands])
    bash = fe.tools.bash()

    def task(self, split: str, index: int) -> Task:
        """The `index`-th job of `split`; one job in five belongs to `eval`, independent of the seed."""
        rng = Random(f"terminal/{self.config.seed}/{split}/{index}")
        names = self.config.families or list(FAMILIES)
        for _ in range(ATTEMPTS):
            name = rng.choice(names)
            work = FAMILIES[name](rng)
            if is_held_out(work) == (split == "eval"):
                hidden, known = work.divided()
                return Task(
                    id=f"{split}-{self.config.seed}-{index}",
                    prompt=work.prompt,
                    data={"public_files": work.files, "public_state": known, "state": hidden},
                    gold=work.gold,
                    difficulty=work.difficulty,
                    tags=[name],
                    split=split,
                )
        raise UsageError(f"the chosen families have no task in split {split!r}", fix="choose more families")

    def gold_actions(self, task: Task) -> list[Action] | None:
        """The gold command, then a message that ends the episode."""
        return None if task.gold is None else [fe.call_tool("bash", command=task.gold), "Done."]

    def files(self, task: Task) -> dict[str, str | bytes]:
        """The initial files of the job."""
        return dict(task.data["public_files"])

    async def what_is_wrong(self) -> list[str]:
        """Differences from the expected state, each in a few words; empty if the job is done."""
        data = self.current_task.data
        return problems({**data["public_state"], **data["state"]}, await look(self.sandbox))


def is_held_out(work: Work) -> bool:
    """Whether a job belongs to the split `eval`; depends on its files and text alone."""
    text = json.dumps([work.prompt, sorted(work.files.items())])
    return hashlib.sha256(text.encode()).digest()[0] < 51  # 51 of 256: one in five
