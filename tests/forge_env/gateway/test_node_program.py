"""A command-line agent in Node, as its package ships it, runs in a sandbox of an image of its own; a script of what to
say solves the task through its loop."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

import forge_env as fe
from forge_env.environment.program_environment import ProgramEnvironmentConfig
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import FunctionPolicy
from forge_env.sandbox import SandboxEngine
from forge_env.types import Message, ToolSpec
from tests.sandboxes.conftest import require

MODULES = os.environ.get("FORGE_ENV_NODE_MODULES", "")
"""The `node_modules` that `make conformance` installs: the packages node and @qwen-code/qwen-code."""
pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(600)]
PLACE = "/opt/agent"
NODE, QWEN = f"{PLACE}/node_modules/node/bin/node", f"{PLACE}/node_modules/@qwen-code/qwen-code/cli-entry.js"
ADDRESS_SPACE_MB = 1 << 17
"""Node reserves much more than it uses: the sandbox's own memory is what bounds it."""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("image")
    shutil.copytree(MODULES, folder / "node_modules", symlinks=True)
    (folder / "Dockerfile").write_text(f"FROM debian:12\nCOPY node_modules {PLACE}/node_modules\n")
    return str(folder)


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[SandboxEngine]:
    require("docker")
    async with fe.open_engine("docker", concurrency=1, warm=0) as engine:
        yield engine


async def right(env: Node) -> float:
    return float(await env.read_text("answer.txt") == "42\n")


class Node(fe.ProgramEnvironment):
    """Qwen Code, one task."""

    rubric = fe.Rubric(right)

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=str(index), prompt="Write 42 into answer.txt.", split=split)

    def argv(self, task: fe.Task) -> list[str]:
        return [NODE, QWEN, "--yolo", "--auth-type", "openai", "--model", "any", task.prompt]

    def environment(self, task: fe.Task) -> dict[str, str]:
        return {"OPENAI_MODEL": "any", "HOME": "/root"}


def inside(image: str, engine: SandboxEngine, **config: Any) -> Callable[[], Node]:
    """Makes the environment around it."""

    class Program(Node):
        sandbox_spec = fe.SandboxSpec(image, base="python", writable=("/root",), memory_mb=4096, disk_mb=256)

    made = ProgramEnvironmentConfig(memory_mb=ADDRESS_SPACE_MB, wall_s=300.0, cpu_s=300.0, **config)
    return lambda: Program(made, sandboxes=engine)


def say(messages: list[Message], tools: list[ToolSpec]) -> Message:
    if any(message.role == "tool" for message in messages) or not tools:
        return Message(role="assistant", content="Done.")
    call: Message = fe.call_tool("run_shell_command", command="echo 42 > answer.txt", is_background=False)
    return call


async def test_an_agent_in_node_solves_the_task(image: str, engine: SandboxEngine) -> None:
    episode = await run_episode(inside(image, engine), FunctionPolicy(say), seed=1)
    assert episode.valid, episode.error
    assert episode.reward == 1.0, episode.final_observation[0].content
    assert episode.metrics["exit_code"] == 0.0, episode.final_observation[0].content
    assert any("run_shell_command" in str(turn.message.tool_calls) for turn in episode.turns)
