"""Small environments and policies whose results are known beforehand."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import forge_env as fe
from forge_env.endpoint.answers import read_answer
from forge_env.errors import EnvironmentBugError, SandboxError
from forge_env.policy import Policy, PolicySession, Reply

__all__ = ["Sums", "answer_even", "model_answer"]


class Sums(fe.ToolEnvironment):
    """Adding one, with a tool that does it."""

    rubric = fe.Rubric(fe.rewards.exact_match)

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(
            id=f"{split}-{index}",
            prompt=f"{index} + 1 = ?",
            data={"answer": str(index + 1)},
            gold=str(index + 1),
            difficulty=1 + index % 2,
            tags=["all", f"mod{index % 3}"],
            split=split,
        )

    def num_tasks(self, split: str) -> int | None:
        return 12

    @fe.tool
    async def add(self, a: int) -> int:
        """Add one.

        Args:
            a: a number.
        """
        return a + 1


class Broken(Sums):
    """Its prompt fails for one task."""

    def prompt(self, task: fe.Task) -> list[fe.Message]:
        if task.id.endswith("-3"):
            raise KeyError("no such picture")
        return super().prompt(task)


class Twins(Sums):
    """Every third task has the id of the first, and one can't be made."""

    def task(self, split: str, index: int) -> fe.Task:
        if index == 4:
            raise KeyError("no such row")
        task = super().task(split, index)
        return task.model_copy(update={"id": "same"}) if index % 3 == 0 else task


class Unlucky(Sums):
    """Its sandbox is always lost on odd tasks."""

    async def setup(self, task: fe.Task) -> None:
        if int(task.id.rpartition("-")[2]) % 2:
            raise SandboxError("the box was lost")


def model_answer(prompt: str, seed: int | None) -> str:
    """Right for about half of all samples, always the same for the same prompt and seed."""
    number = int(prompt.split()[0])
    digest = hashlib.blake2b(f"{number}/{seed}".encode(), digest_size=1).digest()[0]
    return str(number + 1) if digest < 128 else "no idea"


def answer_even(messages: list[fe.Message], tools: list[fe.ToolSpec]) -> str:
    number = int(messages[-1].content.split()[0])
    return str(number + 1) if number % 2 == 0 else "no"


def crash(messages: list[fe.Message], tools: list[fe.ToolSpec]) -> str:
    raise ValueError("no weights")


def crash_on_odd(messages: list[fe.Message], tools: list[fe.ToolSpec]) -> str:
    answer = answer_even(messages, tools)
    return crash(messages, tools) if answer == "no" else answer


class Counted(Policy):
    """Calls the tool until `turns`, then answers right; every reply has the given usage."""

    def __init__(self, turns: int = 2, *, calls: int = 1, completion: int = 100, prompt: int = 1000) -> None:
        self.turns, self.calls = turns, calls
        self.usage = {"prompt": prompt, "completion": completion}

    def session(self, tools: list[fe.ToolSpec], *, seed: int | None = None) -> Any:
        owner, state = self, {"turn": 0, "number": 0}

        class Session(PolicySession):
            async def reply(self, observation: list[fe.Message]) -> Reply:
                await asyncio.sleep(0)
                state["turn"] += 1
                if state["turn"] == 1:
                    state["number"] = int(observation[-1].content.split()[0])
                message = fe.Message(role="assistant", content=str(state["number"] + 1))
                if state["turn"] < owner.turns:
                    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
                    calls = [{"id": f"c{number}", **call} for number in range(owner.calls)]
                    message = fe.Message(role="assistant", tool_calls=calls)
                return Reply(message=message, metadata={"usage": dict(owner.usage)})

        return Session()


class Dying(Policy, PolicySession):
    """Solves `lives` samples, then every request fails."""

    def __init__(self, lives: int) -> None:
        self.lives = lives
        self.asked = 0

    def session(self, tools: list[fe.ToolSpec], *, seed: int | None = None) -> Any:
        return self

    async def reply(self, observation: list[fe.Message]) -> Reply:
        self.asked += 1
        if self.asked > self.lives:
            read_answer({"error": "it died"})  # forge-env raises what an endpoint reports
        return Reply(message=fe.Message(role="assistant", content=str(int(observation[-1].content.split()[0]) + 1)))


def bug(messages: list[fe.Message], tools: list[fe.ToolSpec]) -> str:
    raise EnvironmentBugError("never seen")
