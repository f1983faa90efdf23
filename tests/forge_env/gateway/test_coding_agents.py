"""Coding agents, as npm ships them, run in the sandbox as docs/environments/agents.md has it; a script of what to say
solves the task through each one's own loop, in one conversation."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import pytest_asyncio

import forge_env as fe
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import FunctionPolicy
from forge_env.sandbox import Images, SandboxEngine
from forge_env.types import Message, ToolSpec
from tests.forge_env.environment.test_docs_agents import code, page
from tests.sandboxes.conftest import require

MODULES = os.environ.get("FORGE_ENV_NODE_MODULES", "")
"""The `node_modules` that `make conformance` installs: node and the agents."""
pytestmark = [
    pytest.mark.docker,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]
COPIED = ("claude-code-linux-*", "opencode-linux-*")
"""Packages whose program npm has copied into that of the agent."""
DOCKERFILE = """\
FROM debian:12
COPY node_modules /opt/agents/node_modules
ENV PATH=/opt/agents/node_modules/.bin:/usr/local/bin:/usr/bin:/bin
COPY node /usr/local/bin/node
COPY gemini.json /etc/gemini-cli/settings.json
"""
COMMAND = "echo 42 > answer.txt"
SHELLS: dict[str, dict[str, Any]] = {
    "Bash": {"command": COMMAND, "description": "write"},
    "bash": {"command": COMMAND},
    "exec_command": {"cmd": COMMAND},
    "functions__exec": {"input": f"text(await tools.exec_command({{cmd: {COMMAND!r}}}))"},
    "run_shell_command": {"command": COMMAND, "is_background": False},
}
"""What each agent calls its shell, and a call of it."""
CONVERSATIONS = {"opencode": ["c1", "c2", "c2"]}
"""Seats of an agent that has more than one conversation: OpenCode asks for the title first."""
LEFT_OUT = {"codex": "left_out/web_search", "codex-acp": "left_out/web_search"}
"""Metric of the tools that don't run here."""


@pytest.fixture(scope="module")
def built() -> Iterator[list[str]]:
    """Names of images, removed after the engine's sandboxes."""
    import docker

    names: list[str] = []
    yield names
    with closing(docker.from_env()) as client:
        for name in names:
            client.images.remove(name, force=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(built: list[str]) -> AsyncIterator[SandboxEngine]:
    require("docker")
    async with fe.open_engine("docker", concurrency=1, warm=0) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def agents(tmp_path_factory: pytest.TempPathFactory, engine: SandboxEngine, built: list[str]) -> ModuleType:
    """The page's module, with an image of the installed packages."""
    import docker

    folder = tmp_path_factory.mktemp("agents")
    packages = folder / "image/node_modules"
    shutil.copytree(MODULES, packages, symlinks=True, copy_function=os.link, ignore=shutil.ignore_patterns(*COPIED))
    os.link(packages / "node/bin/node", folder / "image/node")
    (folder / "image/Dockerfile").write_text(DOCKERFILE)
    (folder / "image/gemini.json").write_text(code("gemini"))
    module = page()
    spec = replace(module.Agents.sandbox_spec, image=str(folder / "image"), base="python")
    module.Agents.sandbox_spec = spec
    with closing(docker.from_env()) as client:
        before = {tag for known in client.images.list() for tag in known.tags}
        name = await Images.of(engine).build(spec)
        layers = [tag for layer in client.images.get(name).history() for tag in layer["Tags"] or ()]
    built += [tag for tag in layers if tag not in before]
    return module


def say(messages: list[Message], tools: list[ToolSpec]) -> Message:
    if any(message.role == "tool" for message in messages) or not tools:
        return Message(role="assistant", content="Done.")
    shell = next(tool.name for tool in tools if tool.name in SHELLS)
    return replace(fe.call_tool(shell, **SHELLS[shell]), content="I write it.")


NAMES = ["claude", "codex", "codex-acp", "gemini", "opencode", "qwen"]


@pytest.mark.parametrize("name", NAMES)
async def test_an_agent_solves_the_task(name: str, agents: ModuleType, engine: SandboxEngine) -> None:
    config = agents.Config(agent=name)
    episode = await run_episode(lambda: agents.Agents(config, sandboxes=engine), FunctionPolicy(say), seed=1)
    assert episode.valid, episode.error
    assert episode.reward == 1.0, episode.final_observation[0].content
    assert episode.metrics["exit_code"] == 0.0, episode.final_observation[0].content
    assert [turn.seat for turn in episode.turns] == CONVERSATIONS.get(name, ["c1", "c1"]), episode.info
    assert {metric for metric in episode.metrics if metric.startswith("left_out/")} == {*LEFT_OUT.get(name, "").split()}
