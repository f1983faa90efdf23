"""The tools of a served environment, to clients of the official MCP SDK."""

from __future__ import annotations

import asyncio
import re

import pytest

import forge_env as fe
from forge_env.errors import ToolError
from tests.forge_env.serve.serving import Adder, run_printed, serving, until


@pytest.fixture(scope="module", autouse=True)
def _sdk() -> None:
    """Half a second of imports, which a process that only collects the tests does without."""
    global MCPError
    MCPError = pytest.importorskip("mcp", reason='NOT RUN: pip install "forge-env[openenv]"').MCPError
    pytest.importorskip("uvicorn", reason='NOT RUN: pip install "forge-env[openenv]"')


class Counter(Adder):
    """Counts, so that two episodes can be told apart."""

    async def setup(self, task: fe.Task) -> None:
        await super().setup(task)
        self.count = 0

    @fe.tool
    async def up(self) -> int:
        """Count up."""
        self.count += 1
        return self.count


async def test_a_session_is_an_episode() -> None:
    from mcp import Client

    async with serving(Counter) as (url, sessions):
        async with (
            Client(f"{url}/mcp?split=eval&index=4", mode="legacy") as one,
            Client(f"{url}/mcp", mode="legacy") as two,
        ):
            tools = (await one.list_tools()).tools
            assert [tool.name for tool in tools] == ["add", "wait", "lose", "crash", "up"]
            assert tools[0].input_schema["properties"]["a"] == {"type": "integer", "description": "first number."}
            for number in ("1", "2"):
                result = await one.call_tool("up", {})
                assert (result.content[0].text, result.is_error) == (number, False)
            assert (await two.call_tool("up", {})).content[0].text == "1"
            assert [prompt.name for prompt in (await one.list_prompts()).prompts] == ["task"]
            prompt = await one.get_prompt("task")
            assert [message.content.text for message in prompt.messages] == ["4 + 1 = ?"]
            assert len(sessions) == Counter.opened == 2
        await until(lambda: len(sessions) == Counter.opened == 0)  # they end with their clients


async def test_without_sessions_an_episode_is_an_argument() -> None:
    from mcp import Client

    async with serving(Counter) as (url, sessions), Client(f"{url}/mcp?split=eval&index=4") as client:
        assert client.protocol_version == "2026-07-28"
        begin, end, add, *_ = (await client.list_tools()).tools
        assert (begin.name, end.name, add.name) == ("begin_episode", "end_episode", "add")
        assert list(add.input_schema["properties"]) == ["a", "b", "episode_id"]
        assert add.input_schema["required"] == ["a"]
        assert len(sessions) == Counter.opened == 0

        begun = [await client.call_tool("begin_episode", {}) for _ in range(2)]
        one, two = (result.structured_content for result in begun)
        assert [block.text for block in begun[0].content] == [f"episode_id: {one['episode_id']}", "4 + 1 = ?"]
        for who, number in ((one, "1"), (one, "2"), (two, "1"), ({}, "1"), ({}, "1")):
            assert (await client.call_tool("up", {**who})).content[0].text == number
        assert len(sessions) == Counter.opened == 2
        for arguments in (one, None):
            prompt = await client.get_prompt("task", arguments)
            assert [message.content.text for message in prompt.messages] == ["4 + 1 = ?"]
        ended = await client.call_tool("end_episode", one)
        assert (ended.content[0].text, ended.is_error) == ("The episode has ended.", False)
        for name, arguments in ("up", one), ("end_episode", one), ("end_episode", {}), ("up", {"episode_id": 4}):
            with pytest.raises(MCPError, match="there is no episode"):
                await client.call_tool(name, arguments)
        await client.call_tool("end_episode", two)
        assert len(sessions) == Counter.opened == 0


async def test_images_of_a_prompt() -> None:
    from mcp import Client, types

    class Seen(Counter):
        def task(self, split: str, index: int) -> fe.Task:
            images = (fe.image(b"GIF89a"), "https://example.com/a.png")
            shown = fe.Message(role="user", content="Look:", images=images)
            return super().task(split, index).model_copy(update={"history": [shown]})

    async with serving(Seen) as (url, sessions), Client(f"{url}/mcp") as client:
        begun = await client.call_tool("begin_episode", {})
        prompt = await client.get_prompt("task", begun.structured_content)
        for text, picture, link, _ in begun.content[1:], [message.content for message in prompt.messages]:
            assert text == types.TextContent(type="text", text="Look:")
            assert picture == types.ImageContent(type="image", mime_type="image/gif", data="R0lGODlh")
            assert link == types.ResourceLink(type="resource_link", name="image", uri="https://example.com/a.png")
        await client.call_tool("end_episode", begun.structured_content)
        assert len(sessions) == 0


async def test_names_that_a_protocol_without_sessions_needs() -> None:
    from mcp import Client

    class Taken(Adder):
        @fe.tool
        async def watch(self, episode_id: str) -> str:
            """Watch an episode."""
            return episode_id

    async with serving(Taken) as (url, _):
        async with Client(f"{url}/mcp") as client:
            with pytest.raises(MCPError, match="'watch' has a name or argument that MCP 2026-07-28 needs"):
                await client.list_tools()
        async with Client(f"{url}/mcp", mode="legacy") as client:
            assert (await client.call_tool("watch", {"episode_id": "4"})).content[0].text == "4"


async def test_the_pages_program_calls_a_tool(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as (url, _):
        await run_printed("mcp", url)
    task, answer = capsys.readouterr().out.splitlines()
    assert task == "3 + 1 = ?"
    assert re.search(r"text='3'", answer)


async def test_our_own_client_offers_them_to_an_agent() -> None:
    from forge_env.tools.mcp import McpServer

    async with serving(Counter) as (url, sessions):
        server = await McpServer.connect(f"{url}/mcp")
        assert await server.call("add", {"a": 1, "b": 2}) == "3"
        assert await asyncio.gather(*(server.call("up", {}) for _ in range(3))) == ["1", "2", "3"]
        with pytest.raises(ToolError, match="there is no tool 'sub'"):
            await server.call("sub", {})
        with pytest.raises(ToolError, match="ZeroDivisionError"):
            await server.call("crash", {})
        with pytest.raises(ToolError, match="reset first"):  # which ended the episode
            await server.call("up", {})
        await server.close()
        await until(lambda: len(sessions) == 0)


async def test_what_is_wrong_is_said() -> None:
    from mcp import Client

    async with serving(Counter, max_sessions=1) as (url, sessions):
        async with Client(f"{url}/mcp?sed=4", mode="legacy") as client:
            with pytest.raises(MCPError, match="reset has no key 'sed'"):
                await client.list_tools()
            with pytest.raises(MCPError, match="no prompt 'tusk'"):
                await client.get_prompt("tusk")
        assert len(sessions) == 0
        async with Client(f"{url}/mcp", mode="legacy") as first, Client(f"{url}/mcp", mode="legacy") as second:
            await first.list_tools()
            with pytest.raises(MCPError, match="all 1 sessions are in use"):
                await second.list_tools()


async def test_a_silent_session_ends() -> None:
    from mcp import Client

    async with serving(Counter, idle_timeout=0.2) as (url, sessions), Client(f"{url}/mcp", mode="legacy") as client:
        await client.list_tools()
        await until(lambda: len(sessions) == Counter.opened == 0)
        with pytest.raises(MCPError):
            await client.call_tool("up", {})


async def test_a_slow_start_holds_up_nobody_else() -> None:
    from mcp import Client

    gate = asyncio.Event()

    class Slow(Counter):
        async def setup(self, task: fe.Task) -> None:
            await super().setup(task)
            if task.id == "train-7":
                await gate.wait()

    async with serving(Slow) as (url, sessions):
        async with (
            Client(f"{url}/mcp?index=7", mode="legacy") as slow,
            Client(f"{url}/mcp?index=1", mode="legacy") as quick,
        ):
            waiting = [asyncio.create_task(slow.call_tool("up", {})) for _ in range(2)]
            await until(lambda: Slow.opened == 1)
            assert (await quick.call_tool("up", {})).content[0].text == "1"
            gate.set()
            answers = [(await task).content[0].text for task in waiting]
            assert answers == ["1", "2"]  # of one episode
        await until(lambda: len(sessions) == 0)
    assert Slow.opened == 0


async def test_the_protocol_over_plain_http() -> None:
    import httpx2

    async with serving(Counter) as (url, _), httpx2.AsyncClient(base_url=url, trust_env=False) as client:
        headers = {"Accept": "application/json, text/event-stream"}
        version = "io.modelcontextprotocol/protocolVersion"
        client_of = "io.modelcontextprotocol/clientCapabilities"
        discover = {"jsonrpc": "2.0", "id": 7, "method": "server/discover"}
        for number, status in ("2026-07-28", 200), ("2031-01-01", 400):
            message = {**discover, "params": {"_meta": {version: number, client_of: {}}}}
            chosen = {"MCP-Protocol-Version": number, "Mcp-Method": "server/discover", "Accept": "application/json"}
            answer = await client.post("/mcp", json=message, headers=chosen)
            assert (answer.status_code, answer.json()["id"]) == (status, 7)
            assert "2026-07-28" in answer.text
        assert answer.json()["error"]["code"] == -32022
        assert (await client.get("/mcp")).status_code == 405
        hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
        first = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
        answer = await client.post("/mcp", json=first, headers=headers)
        assert answer.json()["result"]["serverInfo"] == {"name": "adder", "version": fe.__version__}
        headers["Mcp-Session-Id"] = answer.headers["mcp-session-id"]
        headers["MCP-Protocol-Version"] = "2025-11-25"
        assert (await client.delete("/mcp", headers=headers)).status_code == 200
        listing = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
        assert (await client.post("/mcp", json=listing, headers=headers)).status_code == 404
