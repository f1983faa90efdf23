"""Against the real openenv: its clients drive our server, our client drives its servers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import forge_env as fe
from forge_env.cli.main import main
from forge_env.errors import InfrastructureError
from forge_env.types import FunctionCall, Message, ToolCall
from tests.forge_env.cli.test_cli_environments import install
from tests.forge_env.serve.serving import Adder, run_printed, running, serving, until

WHY = "NOT RUN: openenv is not installed (`make conformance` makes an environment for it)"
core = pytest.importorskip("openenv.core", reason=WHY)
types = pytest.importorskip("openenv.validation.types", reason=WHY)
validation = pytest.importorskip("openenv.validation", reason=WHY)
pytestmark = pytest.mark.slow
REMOTE = "openenv"


async def test_its_generic_client_plays_an_episode() -> None:
    async with serving() as (url, sessions):
        async with core.GenericEnvClient(base_url=url) as client:
            result = await client.reset(seed=7, episode_id="mine")
            assert (result.observation["text"], result.reward, result.done) == ("7 + 1 = ?", None, False)
            result = await client.step({"type": "call_tool", "tool_name": "add", "arguments": {"a": 7}})
            assert result.observation["result"] == "8"
            state = await client.state()
            assert (state["episode_id"], state["step_count"], state["task_id"]) == ("mine", 1, "train-7")
            with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
                await client.step({"code": "print(1)"})
            result = await client.step({"message": "8"})
            assert (result.reward, result.done) == (1.0, True)
        await until(lambda: len(sessions) == 0)
    assert Adder.opened == 0


async def test_the_pages_program_plays_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as (url, _):
        await run_printed("openenv", url)
    assert capsys.readouterr().out.split()[-2:] == ["0.0", "True"], "42 is not what 3 + 1 is"


async def test_its_tool_client_lists_and_calls_tools() -> None:
    from openenv.core.mcp_client import MCPToolClient

    async with serving() as (url, _), MCPToolClient(base_url=url) as client:
        await client.reset(seed=1)
        tools = await client.list_tools()
        assert [tool.name for tool in tools] == ["add", "wait", "lose", "crash"]
        assert tools[0].input_schema["required"] == ["a"]
        assert await client.call_tool("add", a=1, b=41) == "42"


async def test_its_tool_client_works_without_a_connection_too() -> None:
    from openenv.core.mcp_client import MCPToolClient

    async with serving() as (url, sessions):
        client = MCPToolClient(base_url=url)
        client.use_production_mode = True  # JSON-RPC over HTTP
        assert [tool.name for tool in await client.list_tools()] == ["add", "wait", "lose", "crash"]
        assert await client.call_tool("add", a=1, b=41) == "42"
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            await client.call_tool("crash")
        assert len(sessions) == 1
        await client.close()
        assert len(sessions) == 0
    assert Adder.opened == 0


async def test_its_validator_finds_nothing_missing() -> None:
    from openenv.cli._validation import validate_running_environment

    async with serving() as (url, _):
        report = await asyncio.to_thread(validate_running_environment, url)
    assert report["passed"], report
    assert report["summary"]["failed_criteria"] == []
    assert (report["mode"], report["standard_profile"]) == ("simulation", "openenv-http/1.x")


class Processes:
    """Runs a package that `forge-env new` has made as a process of this machine, in place of a container."""

    name = "process"
    capabilities = frozenset(
        {pytest.importorskip("openenv.validation.types", reason=WHY).ProviderCapability.IMAGE_BUILD}
    )
    supported_network_modes = frozenset({"public"})

    def build(self, root: Path, execution: Any) -> str:
        assert {execution.dockerfile, "pyproject.toml"} <= {path.name for path in root.iterdir()}
        self.paths = [str(install(root, root.parent / "site")), str(root / "src")]
        return "sha256:" + "0" * 64

    def start(self, spec: Any) -> Processes:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(self.paths)}
        command = [sys.executable, "-m", "forge_env", "serve", "my_env", "--port", "0"]
        self.process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        self.base_url = self.process.stdout.readline().split(" at ")[1].split()[0]
        return self

    def inspect(self) -> dict[str, Any]:
        return {}

    def stop(self) -> None:
        with self.process:
            self.process.terminate()


@pytest.mark.parametrize("kind", ["tools", "single", "sandbox", "repository", "program"])
def test_its_validator_accepts_the_manifest_of_a_new_package(kind: str, tmp_path: Path) -> None:
    assert main(["new", "my_env", "--kind", kind, "--openenv", "--dir", str(tmp_path)]) == 0
    report = validation.run_validation(tmp_path / "my_env", max_level=validation.Level.STATIC)
    assert report.verdict is validation.Verdict.PASS, report


@pytest.mark.parametrize("kind", ["tools", "single"])
def test_and_what_it_does_when_it_is_served(kind: str, tmp_path: Path) -> None:
    assert main(["new", "my_env", "--kind", kind, "--openenv", "--dir", str(tmp_path)]) == 0
    report = validation.run_validation(tmp_path / "my_env", max_level=validation.Level.RUNTIME, provider=Processes())
    found = {result.check_id: result for result in report.results}
    for check in ("startup", "reward_well_formed", "observation_schema", "state_contract"):
        assert found[f"runtime.{check}"].status.value == "pass", found[f"runtime.{check}"]
    assert {result.check_id for result in report.results if result.status.value in ("fail", "error")} == set()


async def test_its_client_meets_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "forge_env", "serve", "gsm8k", "--port", "0"]
    process = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE)
    try:
        url = (await process.stdout.readline()).decode().split(" at ")[1].split()[0]
        answer = fe.make("gsm8k").task("train", 3).gold
        async with core.GenericEnvClient(base_url=url) as client:
            result = await client.reset(seed=3)
            assert result.observation["messages"][0]["role"] == "system"
            result = await client.step({"message": answer})
            assert (result.reward, result.done) == (1.0, True)
    finally:
        process.terminate()
        await process.wait()


async def test_its_synchronous_client_works() -> None:
    async with serving() as (url, _):

        def play() -> Any:
            with core.GenericEnvClient(base_url=url).sync() as client:
                client.reset(seed=1)
                return client.step({"message": "2"})

        result = await asyncio.to_thread(play)
        assert (result.reward, result.done) == (1.0, True)


async def test_a_client_that_lost_its_connection_comes_back() -> None:
    async with serving() as (url, sessions):
        client = core.GenericEnvClient(base_url=url)
        result = await client.reset(seed=3)
        session_id = result.observation["metadata"]["session_id"]
        await client.step({"type": "call_tool", "tool_name": "add", "arguments": {"a": 1}})
        client._ws.transport.abort()
        again = core.GenericEnvClient(base_url=url)
        result = await again.reset(resume=session_id)
        assert (result.observation["result"], result.observation["metadata"]["step_count"]) == ("2", 1)
        result = await again.step({"message": "4"})
        assert (result.reward, result.done) == (1.0, True)
        await again.close()
        await until(lambda: len(sessions) == 0)


async def test_a_client_that_gave_up_is_never_given_an_old_answer() -> None:
    async with serving() as (url, _):
        client = core.GenericEnvClient(base_url=url, message_timeout_s=0.3)
        await client.reset(seed=1)
        with pytest.raises(TimeoutError):
            await client.step({"type": "call_tool", "tool_name": "wait"})
        client._message_timeout = 30.0
        result = await client.reset(seed=5)
        assert result.observation["text"] == "5 + 1 = ?"
        assert (await client.step({"message": "6"})).reward == 1.0
        await client.close()


@contextlib.asynccontextmanager
async def their_server(app: Any) -> AsyncIterator[str]:
    async with running(app) as port:
        yield f"http://127.0.0.1:{port}"


def echo_app() -> Any:
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Say(Action):
        message: str

    class Said(Observation):
        echoed_message: str

    class Echo(Environment[Say, Said, State]):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._state = State(episode_id="e", step_count=0)
            self.seed = 0

        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Said:
            self.seed = seed or 0
            self._state = State(episode_id=episode_id, step_count=0)
            return Said(echoed_message=f"seed {seed}", done=False, reward=None)

        def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Said:
            self._state.step_count += 1
            done = self._state.step_count == 2
            return Said(echoed_message=action.message, done=done, reward=float(len(action.message)))

        @property
        def state(self) -> State:
            return self._state

    return create_fastapi_app(Echo, Say, Said, max_concurrent_envs=4)


async def test_an_environment_of_its_own_is_played_as_ours() -> None:
    async with their_server(echo_app()) as url:
        env = fe.make(REMOTE, url=url)
        observation, _ = await env.reset(options={"task": fe.Task(id="t", prompt="?", data={"seed": 5})})
        assert observation == [Message(role="user", content="seed 5")]
        assert env.tools == []
        observation, reward, terminated, *_ = await env.step("hello")
        assert (observation[0].content, reward, terminated) == ("hello", 5.0, False)
        observation, reward, terminated, truncated, _ = await env.step("bye")
        assert (observation[0].content, reward, terminated, truncated) == ("bye", 3.0, True, False)
        await env.close()


async def test_a_lost_episode_of_its_own_is_tried_again() -> None:
    async with their_server(echo_app()) as url:
        env: Any = fe.make(REMOTE, url=url, first_delay_s=0.0)
        await env.reset(seed=5)
        env._link._socket.transport.abort()
        with pytest.raises(InfrastructureError, match="the episode was lost"):
            await env.step("hello")
        await env.reset(seed=5)
        assert (await env.step("hello"))[1] == 5.0
        await env.close()


async def test_tools_of_its_own_are_tools_here() -> None:
    from fastmcp import FastMCP
    from openenv.core.env_server import State, create_fastapi_app
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
    from openenv.core.env_server.types import Observation

    class Tools(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            server = FastMCP("tools")

            @server.tool
            def double(number: int) -> int:
                """Twice a number."""
                return 2 * number

            super().__init__(server)
            self._state = State(episode_id="e", step_count=0)

        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
            return Observation(done=False, reward=0.0)

        def _step_impl(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
            return Observation(done=False, reward=0.0)

        @property
        def state(self) -> State:
            return self._state

    app = create_fastapi_app(Tools, CallToolAction, CallToolObservation, max_concurrent_envs=2)
    async with their_server(app) as url:
        env = fe.make(REMOTE, url=url)
        await env.reset(seed=0)
        assert [tool.name for tool in env.tools] == ["double"]
        assert "number" in env.tools[0].parameters["properties"]
        made = ToolCall(id="c", function=FunctionCall(name="double", arguments='{"number": 21}'))
        observation, *_ = await env.step(Message(role="assistant", tool_calls=[made]))
        assert (observation[0].role, observation[0].tool_call_id, observation[0].content) == ("tool", "c", "42")
        wrong = ToolCall(id="c", function=FunctionCall(name="triple", arguments="{}"))
        observation, *_ = await env.step(Message(role="assistant", tool_calls=[wrong]))
        assert observation[0].content == "Error: there is no tool 'triple'; available tools: double"
        await env.close()
