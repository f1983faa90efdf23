"""Agents that people already have, as their packages ship them, are played as programs: a script of what to say solves
the task through each one's own loop."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import forge_env as fe
from forge_env.environment.program_environment import ProgramEnvironmentConfig
from forge_env.gateway.server import Access
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import FunctionPolicy
from forge_env.sandbox import ExecResult, SandboxEngine
from forge_env.types import Message, ToolSpec
from tests.sandboxes.conftest import require

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]
WRITE = '''
def write(path: str, text: str) -> str:
    """Write a file.

    Args:
        path: of the file.
        text: what is in it.
    """
    open(path, "w").write(text)
    return "written"
'''
OPENAI_AGENTS = f"""
import sys
from agents import Agent, Runner, function_tool
{WRITE}
agent = Agent(name="Writer", instructions="You write files.", tools=[function_tool(write)], model="gpt-4.1")
print(Runner.run_sync(agent, sys.argv[1]).final_output)
"""
PYDANTIC_AI = f"""
import sys
from pydantic_ai import Agent
{WRITE}
agent = Agent("openai:gpt-4.1", instructions="You write files.", tools=[write])
print(agent.run_sync(sys.argv[1]).output)
"""
SMOLAGENTS = f"""
import os, sys
from smolagents import OpenAIModel, ToolCallingAgent, tool
{WRITE}
agent = ToolCallingAgent(tools=[tool(write)], model=OpenAIModel("any", api_base=os.environ["OPENAI_BASE_URL"]))
print(agent.run(sys.argv[1]))
"""
LANGGRAPH = f"""
import sys
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
{WRITE}
graph = create_react_agent(ChatOpenAI(model="gpt-4.1"), [write])
print(graph.invoke({{"messages": [("user", sys.argv[1])]}})["messages"][-1].content)
"""
OPENHANDS = """
import os, sys
from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.terminal import TerminalTool
llm = LLM(model="openai/any", api_key=os.environ["OPENAI_API_KEY"], base_url=os.environ["OPENAI_BASE_URL"])
agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name, params={"terminal_type": "subprocess"})])
conversation = Conversation(agent=agent, workspace=os.getcwd())
conversation.send_message(sys.argv[1])
conversation.run()
"""
SCRIPT = ("agent.py",)
MINI = ("-m", "minisweagent.run.mini", "--yolo", "--exit-immediately", "--model", "openai/any", "--task")
ALL = {
    "openai_agents": ("agents", OPENAI_AGENTS, SCRIPT),
    "pydantic_ai": ("pydantic_ai", PYDANTIC_AI, SCRIPT),
    "smolagents": ("smolagents", SMOLAGENTS, SCRIPT),
    "langgraph": ("langgraph", LANGGRAPH, SCRIPT),
    "mini_swe_agent": ("minisweagent", "", MINI),
    "openhands": ("openhands", OPENHANDS, SCRIPT),
}
"""Module of each program, source of a script, where there is one, and what Python is called with."""
PROGRAMS = {name: program for name, (module, *program) in ALL.items() if find_spec(module)}
"""Those that are installed: OpenHands' SDK needs an environment of its own."""
PACKAGES = (
    *("openai-agents", "pydantic-ai-slim[openai]", "smolagents[openai]", "langgraph", "langchain-openai", "openai"),
    *("mini-swe-agent", "mcp"),  # litellm imports mcp, and doesn't say so
    *("openhands-sdk", "openhands-tools"),
)
"""What they need in a sandbox, in the versions that are installed here."""
ENGINE = "docker" if "openhands" in PROGRAMS else "local"
"""The engine of the sandboxes: OpenHands opens a pseudo-terminal, which sandboxes of the local engine don't have."""
QUIET = {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "OPENHANDS_SUPPRESS_BANNER": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "true",
}
"""No program of theirs tells anybody else of its run, or asks on its first start."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[SandboxEngine]:
    require(ENGINE)
    async with fe.open_engine(ENGINE, concurrency=1) as engine:
        yield engine


async def right(env: Real) -> float:
    return float(await env.read_text("answer.txt") == "42\n")


class Real(fe.ProgramEnvironment):
    """A program of this machine, which is trusted here: it is the script that speaks for the model."""

    rubric = fe.Rubric(right)
    arguments: tuple[str, ...]
    folder: Path

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=str(index), prompt="Write 42 into answer.txt.", split=split)

    async def run(self, task: fe.Task, access: Access) -> ExecResult:
        home = {"HOME": str(self.folder), "PATH": os.environ["PATH"], **QUIET, **access.environment}
        pipe = asyncio.subprocess.PIPE
        program = await asyncio.create_subprocess_exec(
            sys.executable,
            *self.arguments,
            task.prompt,
            cwd=self.folder,
            env=home,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
        )
        try:
            out, err = await program.communicate()
        except asyncio.CancelledError:
            program.kill()
            await program.wait()
            raise
        if (answer := self.folder / "answer.txt").exists():
            await self.sandbox.write_text("answer.txt", answer.read_text())
        return ExecResult(exit_code=program.returncode, stdout=out.decode(), stderr=err.decode())


class Inside(fe.ProgramEnvironment):
    """The same programs in the episode's sandbox, without network, from packages of its own."""

    rubric = fe.Rubric(right)
    source: str
    arguments: tuple[str, ...]

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=str(index), prompt="Write 42 into answer.txt.", split=split)

    def files(self, task: fe.Task) -> dict[str, str | bytes]:
        return {"agent.py": self.source}

    def argv(self, task: fe.Task) -> list[str]:
        return ["python3", *self.arguments, task.prompt]

    def environment(self, task: fe.Task) -> dict[str, str]:
        return QUIET


def inside(name: str, engine: SandboxEngine, **config: Any) -> Callable[[], Inside]:
    """Makes the environment around one of `PROGRAMS`."""

    class Program(Inside):
        sandbox_spec = fe.SandboxSpec(packages=tuple(installed()), memory_mb=4096, disk_mb=128)
        source, arguments = PROGRAMS[name]

    made = ProgramEnvironmentConfig(memory_mb=4096, wall_s=300.0, cpu_s=300.0, **config)
    return lambda: Program(made, sandboxes=engine)


def installed() -> Iterator[str]:
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            yield f"{name}=={version(name.partition('[')[0])}"


def say(messages: list[Message], tools: list[ToolSpec]) -> Message:
    """What a model would say that can do the task, with the tools that the program offers."""
    done = any(message.role == "tool" or "written" in message.content for message in messages)
    offered = {tool.name for tool in tools}
    if "terminal" in offered and not done:
        return called("terminal", command="echo 42 > answer.txt")
    if "bash" in offered:
        return called("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" if done else "echo 42 > answer.txt")
    if not done:
        return called("write", path="answer.txt", text="42\n")
    return (
        called("final_answer", answer="Done.")
        if "final_answer" in offered
        else fe.Message(role="assistant", content="Done.")
    )


def called(name: str, **arguments: Any) -> Message:
    call: Message = fe.call_tool(name, **arguments)
    return call


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel of the package that OpenHands needs and that the index has as a source only; sandboxes install wheels."""
    if "openhands" in PROGRAMS:
        build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, "func-timeout"]
        subprocess.run(build, check=True)
        monkeypatch.setenv("PIP_FIND_LINKS", f"{os.environ.get('PIP_FIND_LINKS', '')} {tmp_path}")


@pytest.mark.usefixtures("wheels")
@pytest.mark.timeout(900)  # the packages are installed first
@pytest.mark.parametrize("name", PROGRAMS)
async def test_it_runs_inside_a_sandbox(name: str, engine: SandboxEngine) -> None:
    episode = await run_episode(inside(name, engine), FunctionPolicy(say), seed=1)
    assert episode.valid, episode.error
    assert episode.reward == 1.0, episode.final_observation[0].content
    assert (episode.metrics["exit_code"], len(episode.turns)) == (0.0, 2), episode.final_observation[0].content


@pytest.mark.parametrize("name", PROGRAMS)
async def test_its_own_loop_solves_the_task(name: str, engine: SandboxEngine, tmp_path: Path) -> None:
    def make() -> Real:
        env = Real(sandboxes=engine)
        source, env.arguments = PROGRAMS[name]
        env.folder = tmp_path
        (tmp_path / "agent.py").write_text(source)
        return env

    episode = await run_episode(make, FunctionPolicy(say), seed=1)
    assert episode.valid, episode.error
    assert episode.reward == 1.0, episode.final_observation[0].content
    assert episode.metrics["exit_code"] == 0.0, episode.final_observation[0].content
    assert len(episode.turns) == 2
    branches = episode.info.get("branches", {})
    if name == "smolagents":  # it tells the model of its own calls in words of its own
        assert {branch["why"] for branch in branches.values()} == {"an answer was changed"}
        return
    assert {turn.seat for turn in episode.turns} == {"c1"}, branches
    assert [turn.message.tool_calls[0].function.name for turn in episode.turns[:1]] in (
        ["write"],
        ["bash"],
        ["terminal"],
    )
    told = episode.turns[1].observation
    assert all(message.role != "assistant" for message in told), "only what is new"
