"""Tools of an MCP server, against the official SDK."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

import forge_env as fe
from forge_env.errors import InfrastructureError
from forge_env.tools.mcp import _SHARED, McpServer, _Target, safe_names, shown
from tests.forge_env.environment.test_tool_environment import call, calls
from tests.forge_env.serve.serving import running, until

SERVER = """
from mcp.server.mcpserver import MCPServer

server = MCPServer("tests")


@server.tool()
def double(number: int) -> int:
    "Twice a number."
    if number < 0:
        raise ValueError("only positive numbers")
    return 2 * number


if __name__ == "__main__":
    server.run()
"""


@pytest.fixture(scope="module", autouse=True)
def _sdk() -> None:
    """Half a second of imports, which a process that only collects the tests does without."""
    global mcp
    mcp = pytest.importorskip("mcp")


class WithServer(fe.ToolEnvironment):
    rubric = fe.Rubric(lambda answer: 1.0)
    target: Any

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=str(index), prompt="?")

    async def setup(self, task: fe.Task) -> None:
        self.server = await McpServer.connect(self.target, timeout_s=100)
        self.server.add_tools_to(self)

    async def cleanup(self) -> None:
        await self.server.close()


def in_process(source: str = SERVER) -> Any:
    namespace: dict[str, Any] = {"__name__": "server"}
    exec(source, namespace)
    return namespace["server"]


@pytest.mark.parametrize("transport", ["in-process", "stdio"])
@pytest.mark.slow
async def test_tools_of_a_server_are_the_agents(transport: str, tmp_path: Path) -> None:
    env = WithServer()
    env.target = in_process()
    if transport == "stdio":
        (tmp_path / "server.py").write_text(SERVER)
        env.target = mcp.StdioServerParameters(command=sys.executable, args=[str(tmp_path / "server.py")])
    for _ in range(2):  # a second episode connects anew
        await env.reset(seed=0)
        (spec,) = env.tools
        assert (spec.name, spec.description) == ("double", "Twice a number.")
        assert spec.parameters["required"] == ["number"]
        right, wrong, refused, missing, broken = [
            call("double", {"number": 4}),
            call("double", {"number": "x"}),
            call("double", {"number": -1}),
            call("double"),
            call("double", "{"),
        ]
        observation, *_ = await env.step(calls(right, wrong, refused, missing, broken))
        texts = [message.content for message in observation]
        assert texts[0] == "8"
        assert all(text.startswith("Error: ") for text in texts[1:])
        assert "wrong arguments: number: missing" in texts[3]
        assert "not valid JSON" in texts[4]
        assert env.tool_errors == 4
    await env.close()
    assert env.tools == []


@pytest.mark.slow
async def test_stateless_server_serves_many_episodes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "forge_env.tools.mcp")
    talking = "import sys, os\nprint('started', file=sys.stderr, flush=True)\n" + SERVER
    talking = talking.replace("return 2 * number", "return os.getpid() if number else os._exit(1)")
    (tmp_path / "server.py").write_text(talking)
    target = mcp.StdioServerParameters(command=sys.executable, args=[str(tmp_path / "server.py")])

    async def answers(number: int, *, shared: bool = True) -> list[str]:
        servers = [await McpServer.connect(target, shared=shared, timeout_s=100) for _ in range(2)]
        try:
            return [await server.call("double", {"number": number}) for server in servers]
        finally:
            for server in servers:
                await server.close()

    first = await answers(1)
    assert first == await answers(1) == [first[0]] * 2
    with pytest.raises(InfrastructureError, match="gone; last output: started"):
        await answers(0)
    second = await answers(1)  # a lost one is started again
    assert second[0] != first[0]
    assert len({*first, *second, *(await answers(1, shared=False))}) == 4
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records].count("started") == 4


@pytest.mark.slow
async def test_an_unreachable_server_is_infrastructure(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match="MCP server"):
        await McpServer.connect(mcp.StdioServerParameters(command=sys.executable, args=["-c", "pass"]), timeout_s=20)
    failing = "raise SystemExit('no licence')"
    with pytest.raises(InfrastructureError, match=r"MCP server.*last output: no licence"):
        await McpServer.connect(mcp.StdioServerParameters(command=sys.executable, args=["-c", failing]), timeout_s=20)
    with pytest.raises(InfrastructureError, match="MCP server"):
        await McpServer.connect(mcp.StdioServerParameters(command=str(tmp_path / "none")), timeout_s=20)


async def test_failures_beside_calls_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A mistake of ours or of the SDK's can be found: it is the cause of what is raised, or in the log."""

    class Client:
        server_capabilities = SimpleNamespace(tools=None)

        def __init__(self, target: Any, **_: object) -> None:
            self.tools = target

        async def __aenter__(self) -> Client:
            return self

        async def __aexit__(self, *_: object) -> None:
            raise LookupError("it does not close")

        async def list_tools(self, cursor: str | None) -> Any:
            return self.tools

    monkeypatch.setattr(mcp, "Client", Client)
    with pytest.raises(InfrastructureError, match="can't connect") as caught:
        await McpServer.connect(None)
    assert isinstance(caught.value.__cause__, LookupError)
    server = await McpServer.connect(SimpleNamespace(tools=[], next_cursor=None))
    assert not caplog.records
    await server.close()
    (record,) = caplog.records
    assert "it does not close" in record.message
    assert record.exc_info


def test_names_that_endpoints_do_not_accept_are_changed() -> None:
    names = ["calendar_read", "calendar.read", "calendar/read", "größe", "a" * 70, "a" * 71, "."]
    safe = safe_names(names)
    assert list(map(safe.get, names[:4])) == ["calendar_read", "calendar_read_2", "calendar_read_3", "gr__e"]
    assert len(set(safe.values())) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) for name in safe.values())
    assert safe_names(["2fa", "-x"]) == {"2fa": "_2fa", "-x": "_-x"}
    assert safe_names(["a.b", "a_b"], "git_", {"a.b": "git_a_b"}) == {"a.b": "git_a_b", "a_b": "git_a_b_2"}
    assert safe_names(["a"], others={"a", "a_2"}) == {"a": "a_3"}


def test_every_kind_of_result_is_shown() -> None:
    from mcp import types

    text = types.TextContent(type="text", text="hi")
    page = types.TextResourceContents(uri="file:///a.py", text="print(1)")
    blob = types.BlobResourceContents(uri="file:///a.bin", blob="AA==", mimeType="application/zip")
    link = types.ResourceLink(type="resource_link", name="a.py", uri="file:///a.py", description="a program")
    picture = types.ImageContent(type="image", data="AA==", mimeType="image/png")
    resources = [types.EmbeddedResource(type="resource", resource=each) for each in (page, blob)]
    result = types.CallToolResult(content=[text, *resources, link, picture], structuredContent={"a": 1})
    assert shown(result).split("\n") == [
        "hi",
        "print(1)",
        "[application/zip: file:///a.bin]",
        "[a.py: a program](file:///a.py)",
        "[image: image/png]",
    ]
    assert shown(types.CallToolResult(content=[], structuredContent={"é": [1]})) == '{"é": [1]}'
    assert shown(types.CallToolResult(content=[])) == ""
    data = {"city": "Köln", "celsius": 21.5, "rain": None, "hours": ["6\n7"]}
    short, whole = (types.TextContent(type="text", text=text) for text in ("It is 21.5", json.dumps(data)))
    assert shown(types.CallToolResult(content=[whole], structuredContent=data)) == whole.text
    assert shown(types.CallToolResult(content=[short], structuredContent=data)).startswith(
        'It is 21.5\n{"city": "Köln"'
    )


@pytest.mark.parametrize(
    ("text", "structured", "added"),
    [
        ("10 results", {"page": 1}, True),
        ("-1, 1.5, x1", {"page": 1}, True),
        ("true story", {"page": 1, "last": True}, True),
        ("Page 1.", {"page": 1}, False),
        ("[3,1,-2,true]", {"numbers": [3, 1, -2, True]}, False),
    ],
)
def test_a_number_is_repeated_only_as_a_whole(text: str, structured: dict[str, Any], added: bool) -> None:
    from mcp import types

    content = [types.TextContent(type="text", text=text)]
    result = types.CallToolResult(content=content, structuredContent=structured)
    assert (shown(result) != text) == added


DOORS = """
from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("doors")


@server.tool(name="door.open")
async def open_door(ctx: Context) -> str:
    "Open the door."
    def look() -> str:
        "Look around."
        return "a vault"
    server.add_tool(look, name="door open")
    server.remove_tool("knock")
    await ctx.notify_tools_changed()
    await ctx.session.send_tool_list_changed()
    return "open"


@server.tool()
def knock() -> str:
    "Knock."
    return "knock knock"


if __name__ == "__main__":
    server.run()
"""


async def test_tools_change_with_the_servers_list() -> None:
    env = WithServer()
    env.target = in_process(DOORS)
    await env.reset(seed=0)
    assert [tool.name for tool in env.tools] == ["door_open", "knock"]
    (answer,), *_ = await env.step(fe.call_tool("door_open"))
    first, _, change, gone, new = answer.content.splitlines()
    assert (first, change, gone) == ("open", "The tools have changed.", "No longer available: knock")
    assert '"name":"door_open_2","description":"Look around."' in new
    (answer,), *_ = await env.step(fe.call_tool("door_open_2"))
    assert answer.content == "a vault"
    (answer,), *_ = await env.step(fe.call_tool("knock"))
    assert answer.content == "Error: there is no tool 'knock'; available tools: door_open, door_open_2"
    await env.close()
    assert env.tools == []


async def test_a_new_tool_with_the_name_of_another_gets_a_number() -> None:
    class Locked(WithServer):
        @fe.tool
        def lock(self) -> str:
            """Lock the door."""
            return "locked"

    env = Locked()
    env.target = in_process(DOORS.replace('name="door open"', 'name="lock"'))
    await env.reset(seed=0)
    await env.step(fe.call_tool("door_open"))
    assert [tool.name for tool in env.tools] == ["lock", "door_open", "lock_2"]
    for name, said in ("lock", "locked"), ("lock_2", "a vault"):
        (answer,), *_ = await env.step(fe.call_tool(name))
        assert answer.content == said
    await env.close()


async def test_an_answer_is_kept_if_the_changed_tools_cannot_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_env.tools import mcp as module

    server = await McpServer.connect(in_process(DOORS))

    async def fail(client: Any) -> Any:
        raise mcp.MCPError(-32603, "busy")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_list_tools", fail)
        assert (await server.call("door.open", {})).splitlines()[0] == "open"
    assert "knock" in server._connection.tools
    assert await server.call("door open", {}) == "a vault"  # which lists them
    assert "knock" not in server._connection.tools
    await server.close()


async def test_two_servers_with_the_same_tools() -> None:
    class Two(WithServer):
        async def setup(self, task: fe.Task) -> None:
            self.servers = [await McpServer.connect(in_process(), prefix=prefix) for prefix in ("a.", "b.")]
            for server in self.servers:
                server.add_tools_to(self)

        async def cleanup(self) -> None:
            for server in self.servers:
                await server.close()

    env = Two()
    await env.reset(seed=0)
    observation, *_ = await env.step(calls(call("a_double", {"number": 4}), call("b_double", {"number": 5})))
    assert [message.content for message in observation] == ["8", "10"]
    await env.close()


@asynccontextmanager
async def served(wrap: Callable[[ASGIApp], ASGIApp] = lambda app: app) -> AsyncIterator[str]:
    """The address of a server of doors over HTTP."""
    async with running(wrap(in_process(DOORS).streamable_http_app())) as port:
        yield f"http://127.0.0.1:{port}/mcp"


def newest_only(app: ASGIApp) -> ASGIApp:
    """A server that refuses protocols with sessions."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and b"2026-07-28" not in dict(scope["headers"]).get(b"mcp-protocol-version", b""):
            data = {"supported": ["2026-07-28"], "requested": "2025-11-25"}
            error = {"code": -32022, "message": "Unsupported protocol version", "data": data}
            await JSONResponse({"jsonrpc": "2.0", "id": 1, "error": error}, 400)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return wrapped


@pytest.mark.parametrize("shared", [False, True])
async def test_a_server_of_both_protocols_keeps_a_session_unless_it_is_shared(shared: bool) -> None:
    async with served() as url:
        server = await McpServer.connect(url, shared=shared)
        assert server._connection._client.protocol_version == ("2026-07-28" if shared else "2025-11-25")
        assert await server.call("knock", {}) == "knock knock"
        await server.call("door.open", {})
        connection = server._connection  # the announcement may come after the answer, in the session's own stream
        await until(lambda: connection._changed or "door open" in connection.tools)
        assert await server.call("door open", {}) == "a vault"
        env = WithServer()
        assert server.update(env) == ""  # it has none of the server's tools
        server.add_tools_to(env)
        assert "No longer available: knock" in server.update(env)
        assert [tool.name for tool in env.tools] == ["door_open", "door_open_2"]
        await server.close()
        if shared:
            _SHARED.forget(_Target(repr(url), 30.0, url, sessions=False))


async def test_a_server_of_the_newest_protocol_only() -> None:
    async with served(newest_only) as url:
        server = await McpServer.connect(url)
        assert server._connection._client.protocol_version == "2026-07-28"
        assert await server.call("knock", {}) == "knock knock"
        await server.close()
