"""What an environment demonstrates without a word of its author: its gold actions, and what its tools really say."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest

import forge_env as fe
from forge_env.environment.optional import demonstrate
from forge_env.errors import EnvironmentBugError
from tests.sandboxes.conftest import require


class Locked(fe.ToolEnvironment):
    """A box to be opened with a key."""

    rubric = fe.Rubric(fe.rewards.exact_match)
    system_prompt = "Open it."
    broken = False

    def task(self, split: str, index: int) -> fe.Task:
        gold = None if split == "eval" else str(index)
        return fe.Task(id=f"{split}-{index}", split=split, prompt="What is in it?", gold=gold)

    def gold_actions(self, task: fe.Task) -> list[str | fe.Message] | None:
        return None if task.gold is None else [fe.call_tool("unlock", key=7), fe.call_tool("look"), task.gold, "more"]

    async def setup(self, task: fe.Task) -> None:
        self.open = False

    @fe.tool
    async def unlock(self, key: int) -> str:
        """Turn a key."""
        self.open = key == 7
        return "click"

    @fe.tool
    async def look(self) -> str:
        """Look into it."""
        if self.broken:
            raise KeyError("nothing to look at")
        return f"a {self.current_task.gold}" if self.open else "it is locked"


def test_gold_actions_with_the_tools_own_answers() -> None:
    env = Locked()
    said = [(m.role, m.content) for m in demonstrate(env, env.task("train", 3), random.Random(0)) or []]
    assert said == [
        ("system", "Open it."), ("user", "What is in it?"), ("assistant", ""), ("tool", "click"),
        ("assistant", ""), ("tool", "a 3"), ("assistant", "3"),
    ]  # fmt: skip
    assert env.messages == []  # another object played
    assert demonstrate(env, env.task("eval", 3), random.Random(0)) is None


async def test_it_is_called_where_an_event_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    env = Locked()
    assert demonstrate(env, env.task("train", 3), random.Random(0))
    monkeypatch.setattr(Locked, "broken", True)
    with pytest.raises(EnvironmentBugError, match=r"tool 'look' raised KeyError on task 'train-3'"):
        demonstrate(env, env.task("train", 3), random.Random(0))


PROGRAM = """
import random, sys
import gymnasium
import forge_env as fe
import forge_env.gym
from forge_env.environment.optional import demonstrate
env = fe.make("terminal", sandboxes=fe.open_engine({engine!r}))
said = demonstrate(env, env.task("train", 0), random.Random(0))
print([message.role for message in said])
gymnasium.make("forge_env/terminal", sandboxes={engine!r}).reset(seed=1)  # and never closed
"""


@pytest.mark.slow
@pytest.mark.parametrize("engine", [pytest.param("docker", marks=pytest.mark.docker), "local"])
def test_sandboxes_of_demonstrations_are_closed_at_the_end(engine: Any) -> None:
    require(engine)
    done = subprocess.run(
        [sys.executable, "-W", "always::ResourceWarning", "-c", PROGRAM.format(engine=engine)],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "['system', 'user', 'assistant', 'tool', 'assistant']\n"
