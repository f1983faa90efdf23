"""The server without a connection: plain HTTP, JSON-RPC, and the command that starts it."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from starlette.responses import PlainTextResponse

from forge_env.cli.main import main
from forge_env.http.server import OwnPages
from tests.forge_env.serve.serving import Adder, serving, until

pytest.importorskip("uvicorn", reason='NOT RUN: pip install "forge-env[openenv]"')
websockets = pytest.importorskip("websockets.asyncio.client", reason='NOT RUN: pip install "forge-env[openenv]"')


pytestmark = pytest.mark.usefixtures("one_tls_context")
HOSTS = {"games": 200, "games.example": 200, "calculators": 200, "evil.example": 421}
"""How each is answered."""


@asynccontextmanager
async def client_of(**limits: Any) -> AsyncIterator[Any]:
    async with serving(**limits) as (url, sessions), httpx2.AsyncClient(base_url=url, trust_env=False) as client:
        client.sessions, client.served_at = sessions, url
        yield client


@pytest.mark.slow
async def test_an_episode_over_http() -> None:
    async with client_of() as client:
        reply = (await client.post("/reset", json={"seed": 7})).json()
        assert (reply["observation"]["text"], reply["reward"], reply["done"]) == ("7 + 1 = ?", None, False)
        name = {"session_id": reply["observation"]["metadata"]["session_id"]}
        client.cookies.clear()
        call = {"type": "call_tool", "tool_name": "add", "arguments": {"a": 7}}
        reply = (await client.post("/step", json={**name, "action": call})).json()
        assert reply["observation"]["result"] == "8"
        assert (await client.get("/state", params=name)).json()["step_count"] == 1
        reply = (await client.post("/step", json={**name, "action": {"message": "8"}, "timeout_s": 30})).json()
        assert (reply["reward"], reply["done"]) == (1.0, True)
        assert (await client.post("/step", json={**name, "action": {"message": "8"}})).status_code == 409
        assert (await client.post("/reset", json={**name, "seed": 8})).json()["observation"]["text"] == "8 + 1 = ?"
        assert len(client.sessions) == 1
        assert (await client.post("/close", json=name)).json() == {"closed": True}
        assert len(client.sessions) == 0
        assert (await client.get("/state")).json()["episode_id"] is None  # the cookie is gone, too
        assert (await client.get("/state", params=name)).status_code == 409
    assert Adder.opened == 0


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/reset", "{", 400, "not valid JSON"),
        ("/reset", "[" * 100_000, 400, "not valid JSON"),
        ("/reset", "[1]", 422, "a JSON object"),
        ("/reset", '{"sed": 1}', 422, "has no key 'sed'"),
        ("/reset", '{"split": "moon"}', 422, "no split 'moon'"),
        ("/step", '{"action": {"message": "1"}}', 409, "name the session"),
        ("/step", '{"session_id": "x", "action": {"message": "1"}}', 409, "no session 'x'"),
        ("/close", '{"session_id": "x"}', 409, "no session 'x'"),
    ],
)
async def test_nonsense_is_answered(path: str, body: str, status: int, said: str) -> None:
    async with client_of() as client:
        response = await client.post(path, content=body)
        assert (response.status_code, said in response.json()["detail"]) == (status, True), response.text
        await client.post("/reset", json={"seed": 1})
        steps: list[Any] = [{}, {"action": 3}, {"action": {}}, {"action": {"message": "2"}, "timeout_s": "x"}]
        for step in steps:
            assert (await client.post("/step", json=step)).status_code == 422
        assert (await client.post("/step", json={"action": {"message": "2"}})).json()["reward"] == 1.0
        await client.post("/close")


async def test_limits_hold_without_a_connection() -> None:
    wait = {"type": "call_tool", "tool_name": "wait"}
    async with client_of(max_sessions=1) as client:
        await client.post("/reset", json={"seed": 1})
        response = await client.post("/step", json={"action": wait, "timeout_s": 0.05})
        assert (response.status_code, response.json()["retriable"]) == (500, True)
        assert "longer than 0.05 s" in response.json()["detail"]
        client.cookies.clear()
        response = await client.post("/reset")
        assert (response.status_code, response.json()["code"]) == (503, "CAPACITY_REACHED")
    async with client_of(idle_timeout=0.05) as client:
        await client.post("/reset", json={"seed": 1})
        await until(lambda: len(client.sessions) == 0)
    assert Adder.opened == 0


async def test_requests_of_one_session_take_turns() -> None:
    async with client_of() as client:
        await client.post("/reset", json={"seed": 1})
        call = {"action": {"type": "call_tool", "tool_name": "add", "arguments": {"a": 1}}}
        replies = await asyncio.gather(*(client.post("/step", json=call) for _ in range(5)))
        counts = [reply.json()["observation"]["metadata"]["step_count"] for reply in replies]
        assert sorted(counts) == [1, 2, 3, 4, 5]
        await client.post("/close")


async def rpc(client: Any, method: str, **params: Any) -> Any:
    request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    response = await client.post("/mcp", json=request)
    assert (response.status_code, response.json()["id"]) == (200, 1)
    return response.json()


async def test_tools_over_json_rpc() -> None:
    async with client_of() as client:
        tools = (await rpc(client, "tools/list"))["result"]["tools"]
        assert [tool["name"] for tool in tools] == ["add", "wait", "lose", "crash"]
        assert tools[0]["inputSchema"]["required"] == ["a"]
        result = (await rpc(client, "tools/call", name="add", arguments={"a": 1, "b": 2}))["result"]
        assert (result["content"], result["isError"]) == ([{"type": "text", "text": "3"}], False)
        assert len(client.sessions) == 0  # neither had a session of its own
        session_id = (await rpc(client, "openenv/session/create", seed=3))["result"]["session_id"]
        result = (await rpc(client, "tools/call", session_id=session_id, name="sub"))["result"]
        assert result["isError"]
        assert "available tools: add" in result["data"]
        assert (await rpc(client, "openenv/session/close", session_id=session_id))["result"]["closed"]
        wrong: list[tuple[str, dict[str, Any], int]] = [
            ("fly", {}, -32601),
            ("tools/call", {}, -32602),
            ("tools/call", {"name": "add", "arguments": 3}, -32602),
            ("tools/call", {"name": "crash"}, -32603),
            ("tools/list", {"session_id": session_id}, -32602),
            ("openenv/session/close", {}, -32602),
            ("openenv/session/create", {"sed": 3}, -32602),
        ]
        for method, params, code in wrong:
            assert (await rpc(client, method, **params))["error"]["code"] == code, method
        for text, code in [("{", -32700), ("{}", -32600), ("[]", -32600)]:
            assert (await client.post("/mcp", content=text)).json()["error"]["code"] == code
        assert len(client.sessions) == 0
    assert Adder.opened == 0


async def test_tools_over_a_websocket() -> None:
    async with client_of() as client:
        url = client.served_at.replace("http", "ws")
        async with websockets.connect(f"{url}/mcp", proxy=None) as raw:
            for number in range(2):  # the second is sent before the first is answered, and both are
                call = {"name": "add", "arguments": {"a": number}}
                request = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": call}
                await raw.send(json.dumps(request))
            answers = [json.loads(await raw.recv()) for _ in range(2)]
            assert [(answer["id"], answer["result"]["data"]) for answer in answers] == [(0, "1"), (1, "2")]
        async with websockets.connect(f"{url}/ws", proxy=None) as raw:
            listing = {"jsonrpc": "2.0", "id": 5, "method": "tools/list"}
            await raw.send(json.dumps({"type": "mcp", "data": listing}))
            answer = json.loads(await raw.recv())
            assert (answer["type"], len(answer["data"]["result"]["tools"])) == ("mcp", 4)
            await raw.send(json.dumps({"type": "close"}))
        await until(lambda: len(client.sessions) == 1)  # of the tool connection, which may come back
    assert Adder.opened == 0


def serve(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "forge_env", "serve", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_stopped(ending: signal.Signals) -> None:
    import httpx2

    with serve("gsm8k", "--port", "0", "levels=[2]", "--name", "games", "--name=games.example") as process:
        line = process.stdout.readline()
        assert line.startswith("gsm8k is served at http://localhost:"), process.communicate()
        url = line.split(" at ")[1].split()[0]
        with httpx2.Client(base_url=url, trust_env=False) as client:
            assert client.get("/metadata").json()["name"] == "gsm8k"
            for host, status in {"games": 200, "games.example": 200, "evil.example": 421}.items():
                assert client.get("/health", headers={"Host": host}).status_code == status
            assert client.post("/reset", json={"seed": 1}).json()["observation"]["messages"][0]["role"] == "system"
        process.send_signal(ending)
        out, err = process.communicate(timeout=60)
        assert (out, "Traceback" in err) == ("", False), err
        assert process.returncode in (130, -signal.SIGTERM, 143)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "there is no environment 'nothing'"),
        (["gsm8k", "levels=[9]"], "no level 9"),
        (["gsm8k", "--port", "70000"], "--port: should be less than 65536, not 70000"),
        (["gsm8k", "--max-sessions", "0"], "--max_sessions: should be greater than 0"),
        (["gsm8k", "--step-timeout", "nan"], "greater than 0"),
        (["gsm8k", "--host", "not a host", "--port", "0"], "not a host"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["serve", *arguments])
    err = capsys.readouterr().err
    assert (code, said in err, "Traceback" in err) == (2, True, False), err


def test_a_port_that_is_taken_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code = main(["serve", "gsm8k", "--port", port])
    out, err = capsys.readouterr()
    assert (code, port in err, "Traceback" in err) == (2, True, False), out + err


@pytest.mark.parametrize("path", ["/reset", "/mcp", "/health"])
async def test_pages_of_other_sites_have_no_access(path: str) -> None:
    async with serving() as (url, sessions), httpx2.AsyncClient(base_url=url, trust_env=False) as client:
        for headers, status, said in [
            ({"Host": "evil.example"}, 421, "start it with --name"),
            ({"Host": "evil.example:80", "Origin": "http://evil.example"}, 421, "start it with --name"),
            ({"Host": "["}, 421, "start it with --name"),
            ({"Origin": "http://evil.example"}, 403, "other sites"),
            ({"Origin": "http://localhost.evil.example"}, 403, "other sites"),
            ({"Origin": "null"}, 403, "other sites"),
        ]:
            answer = await client.post(path, headers=headers)
            assert (answer.status_code, said in answer.text) == (status, True), headers
        for headers in ({"Host": "localhost:9"}, {"Host": "[::1]:80"}, {"Origin": "http://localhost:3000"}):
            assert (await client.post(path, headers=headers)).status_code in (200, 405), headers
        assert len(sessions) <= 3


async def test_nor_their_sockets() -> None:
    from websockets.exceptions import InvalidStatus

    async with serving() as (url, sessions):
        for path in ("/ws", "/mcp"):
            with pytest.raises(InvalidStatus, match="403"):
                await websockets.connect(url.replace("http", "ws") + path, origin="http://evil.example", proxy=None)
        assert len(sessions) == 0


@pytest.mark.parametrize("address", ["http://10.0.0.7", "http://127.0.0.1", "http://[::1]"])
async def test_a_server_has_the_names_that_it_is_given_and_pages_of_its_own(address: str) -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("here")(scope, receive, send)

    transport = httpx2.ASGITransport(OwnPages(answer, ["games.example", "Games:8000"]))  # asked at this address
    async with httpx2.AsyncClient(transport=transport, base_url=address) as client:
        for headers, status in [
            ({}, 200),
            ({"Host": "10.0.0.8:8000"}, 200),
            ({"Host": "[fe80::1]:8000"}, 200),
            ({"Host": f"{socket.gethostname()}:8000"}, 200),
            ({"Host": "games:8000"}, 200),
            ({"Host": "Games.example"}, 200),
            ({"Host": "games.example", "Origin": "https://games.example"}, 200),
            ({"Host": "games.example", "Origin": "https://evil.example"}, 403),
            ({"Host": "10.0.0.8", "Origin": "https://evil.example"}, 403),
            ({"Host": "evil.example"}, 421),
            ({"Host": "evil.example", "Origin": "http://evil.example"}, 421),
            ({"Host": "10.0.0.8.evil.example"}, 421),
            ({"Host": ""}, 421),
        ]:
            assert (await client.get("/", headers=headers)).status_code == status, headers


async def test_names_come_from_python_and_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_env.serve.openenv import app_of

    monkeypatch.setenv("FORGE_ENV_NAMES", "games games.example")
    transport = httpx2.ASGITransport(app_of("calculator", names=["calculators"]))
    async with httpx2.AsyncClient(transport=transport, base_url="http://10.0.0.7") as client:
        found = {host: (await client.get("/health", headers={"Host": host})).status_code for host in HOSTS}
    assert found == HOSTS


async def test_metrics_of_the_server() -> None:
    async with serving(max_sessions=5) as (url, _), httpx2.AsyncClient(base_url=url, trust_env=False) as client:
        named = (await client.post("/reset", json={"seed": 3})).json()["observation"]["metadata"]["session_id"]
        for tool, arguments in ("add", {"a": 1}), ("crash", {}):
            action = {"type": "call_tool", "tool_name": tool, "arguments": arguments}
            await client.post("/step", json={"session_id": named, "action": action})
        answer = await client.get("/metrics")
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        figures = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
        assert {
            name.removesuffix('{environment="adder"}'): float(value)
            for name, value in figures.items()
            if name.startswith("forge_env")
        } == {
            "forge_env_sessions": 1,
            "forge_env_sessions_limit": 5,
            "forge_env_episodes_total": 1,
            "forge_env_steps_total": 2,
            "forge_env_failures_total": 1,
        }
        assert float(figures["process_resident_memory_bytes"]) > 1e6
