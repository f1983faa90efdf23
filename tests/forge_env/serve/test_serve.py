"""The server and our own client of it: the whole protocol, broken connections, time-outs, limits."""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import Any

import pytest

import forge_env as fe
from environments import openenv
from forge_env.errors import EnvironmentBugError, InfrastructureError
from forge_env.rollout.episode import Retry, run_episode
from forge_env.rollout.scripted import ReplayPolicy
from forge_env.types import FunctionCall, Message, ToolCall
from tests.forge_env.serve.serving import Adder, serving, until

pytest.importorskip("starlette", reason='NOT RUN: pip install "forge-env[openenv]"')
pytest.importorskip("uvicorn", reason='NOT RUN: pip install "forge-env[openenv]"')
websockets = pytest.importorskip("websockets.asyncio.client", reason='NOT RUN: pip install "forge-env[openenv]"')

REMOTE = "openenv"


def call(name: str, **arguments: Any) -> Message:
    function = FunctionCall(name=name, arguments=json.dumps(arguments))
    return Message(role="assistant", tool_calls=[ToolCall(id="c1", function=function)])


class Raw:
    """A client that says exactly what it is told."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket

    @classmethod
    async def connect(cls, url: str) -> Raw:
        return cls(await websockets.connect(url.replace("http", "ws") + "/ws", proxy=None))

    async def send(self, kind: str, data: Any = None, **more: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, "data": data or {}, **more}))

    async def read(self) -> Any:
        return json.loads(await self.socket.recv())

    async def ask(self, kind: str, data: Any = None, **more: Any) -> Any:
        await self.send(kind, data, **more)
        return await self.read()


@pytest.mark.slow
async def test_the_protocol_as_it_goes_over_the_wire() -> None:
    async with serving() as (url, sessions):
        raw = await Raw.connect(url)
        reply = await raw.ask("reset", {"seed": 7, "episode_id": "e1"}, request_id=5)
        assert reply["request_id"] == 5
        assert reply["type"] == "observation"
        assert (reply["data"]["reward"], reply["data"]["done"]) == (None, False)
        assert reply["data"]["observation"]["text"] == "7 + 1 = ?"
        assert reply["data"]["observation"]["messages"] == [{"role": "user", "content": "7 + 1 = ?"}]
        reply = await raw.ask("step", {"type": "list_tools"})
        assert [tool["name"] for tool in reply["data"]["observation"]["tools"]] == ["add", "wait", "lose", "crash"]
        reply = await raw.ask("step", {"type": "call_tool", "tool_name": "add", "arguments": {"a": 7}})
        assert (reply["data"]["observation"]["result"], reply["data"]["observation"]["tool_name"]) == ("8", "add")
        assert await raw.ask("state") == {
            "type": "state",
            "data": {"episode_id": "e1", "step_count": 1, "task_id": "train-7"},
        }
        reply = await raw.ask("step", {"message": "8"})
        assert (reply["data"]["reward"], reply["data"]["done"]) == (1.0, True)
        assert reply["data"]["observation"]["info"]["metrics"]["exact_match"] == 1.0
        assert len(sessions) == 1
        await raw.send("close")
        await until(lambda: len(sessions) == 0)
    assert Adder.opened == 0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "INVALID_JSON"),
        ("[" * 100_000, "INVALID_JSON"),
        ("3", "VALIDATION_ERROR"),
        ('{"type": "fly"}', "UNKNOWN_TYPE"),
        ('{"type": "step", "data": {"message": "1"}}', "SESSION_ERROR"),
        ('{"type": "reset", "data": {"seed": "x"}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"sed": 1}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"split": "moon"}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"resume": "none"}}', "SESSION_ERROR"),
    ],
)
async def test_nonsense_is_answered_and_the_connection_stays(text: str, code: str) -> None:
    async with serving() as (url, _):
        raw = await Raw.connect(url)
        await raw.socket.send(text)
        reply = await raw.read()
        assert (reply["type"], reply["data"]["code"]) == ("error", code)
        assert (await raw.ask("reset", {"seed": 1}))["type"] == "observation"
        for data in ({}, {"message": 3}, {"massage": "1"}, {"type": "call_tool"}, {"message": "", "tool_calls": [1]}):
            assert (await raw.ask("step", data))["data"]["code"] == "VALIDATION_ERROR"
        assert (await raw.ask("step", {"message": "2"}))["data"]["reward"] == 1.0


async def test_an_episode_through_our_client_is_the_episode_itself() -> None:
    async with serving() as (url, sessions):
        env = fe.make(REMOTE, url=url)
        observation, info = await env.reset(options={"task": fe.Task(id="t", prompt="?", data={"seed": 4})})
        assert observation == [Message(role="user", content="4 + 1 = ?")]
        assert [tool.name for tool in env.tools] == ["add", "wait", "lose", "crash"]
        assert env.tools[0].parameters["required"] == ["a"]
        observation, reward, terminated, *_ = await env.step(call("add", a=4))
        assert observation == [Message(role="tool", content="5", tool_call_id="c1", name="add")]
        assert (reward, terminated) == (0.0, False)
        _, reward, terminated, truncated, info = await env.step("5")
        assert (reward, terminated, truncated, info["metrics"]["exact_match"]) == (1.0, True, False, 1.0)
        await env.close()
        await until(lambda: len(sessions) == 0)


async def test_a_broken_connection_is_no_lost_episode() -> None:
    async with serving() as (url, sessions):
        env: Any = fe.make(REMOTE, url=url, first_delay_s=0.0)
        await env.reset(seed=2)
        await env.step(call("add", a=1))
        env._link._socket.transport.abort()  # before the step arrives: it is sent again
        observation, *_ = await env.step(call("add", a=2))
        assert observation[0].content == "3"
        pending = asyncio.create_task(env.step(call("wait")))
        [session] = sessions._sessions.values()
        await until(lambda: session.env.turns == 3)
        before = session.let_go
        env._link._socket.transport.abort()  # while the step is under way: its answer is asked for again
        await until(lambda: session.let_go != before)
        session.env.gate.set()
        observation, *_ = await pending
        assert observation[0].content == "opened"
        assert session.env.turns == 3
        _, reward, terminated, *_ = await env.step("5")
        assert (reward, terminated) == (1.0, True)
        await env.close()


async def test_a_server_that_is_gone_is_an_infrastructure_error_and_one_that_comes_back_is_found() -> None:
    async with serving() as (url, _):
        env = fe.make(REMOTE, url=url, reconnects=1, first_delay_s=0.0)
        await env.reset(seed=1)
    with pytest.raises(InfrastructureError, match="lost"):
        await env.step("2")
    with pytest.raises(InfrastructureError, match="no connection"):
        await env.reset(seed=1)
    async with serving(port=int(url.rpartition(":")[2])):
        assert (await env.reset(seed=1))[0][0].content
        await env.close()


async def test_time_outs_hold_and_no_answer_is_taken_for_another() -> None:
    async with serving(step_timeout=0.2) as (url, sessions):
        env = fe.make(REMOTE, url=url, answer_s=30.0)
        await env.reset(seed=1)
        with pytest.raises(InfrastructureError, match=r"longer than 0\.2 s"):  # the server's limit
            await env.step(call("wait"))
        await env.close()
        await until(lambda: not any(session.waiting for session in sessions._sessions.values()))
    async with serving() as (url, sessions):
        env = fe.make(REMOTE, url=url, answer_s=0.3, reconnects=0)
        await env.reset(seed=1)
        with pytest.raises(InfrastructureError, match="lost"):  # the client's
            await env.step(call("wait"))
        [session] = sessions._sessions.values()
        session.env.gate.set()
        raw = await Raw.connect(url)
        await raw.ask("reset", {"seed": 1})
        [session] = [each for each in sessions._sessions.values() if not each.waiting]
        await raw.send("step", {"type": "call_tool", "tool_name": "wait"})
        await until(lambda: session.env.turns == 1)
        reply = await raw.ask("reset", {"seed": 3})  # given up waiting: the next answer is this message's
        assert reply["data"]["observation"]["text"] == "3 + 1 = ?"
        assert (await raw.ask("step", {"message": "4"}))["data"]["reward"] == 1.0


async def test_sessions_end_by_themselves_and_make_room() -> None:
    async with serving(max_sessions=1, reconnect=0.05) as (url, sessions):
        first = await Raw.connect(url)
        await first.ask("reset", {"seed": 1})
        second = await Raw.connect(url)
        reply = await second.ask("reset")
        assert (reply["data"]["code"], reply["data"]["active_sessions"]) == ("CAPACITY_REACHED", 1)
        with pytest.raises(InfrastructureError, match="in use"):
            await fe.make(REMOTE, url=url).reset(seed=1)
        first.socket.transport.abort()
        await until(lambda: len(sessions) == 0)  # nobody came back
        assert Adder.opened == 0
    async with serving(max_sessions=1) as (url, sessions):
        first = await Raw.connect(url)
        session_id = (await first.ask("reset", {"seed": 1}))["data"]["observation"]["metadata"]["session_id"]
        first.socket.transport.abort()
        await until(lambda: all(session.waiting for session in sessions._sessions.values()))
        second = await Raw.connect(url)
        reply = await second.ask("reset", {"resume": session_id})
        assert reply["data"]["observation"]["text"] == "1 + 1 = ?"
        third = await Raw.connect(url)  # a half-open connection: the client comes back before the server notices
        await third.ask("reset", {"resume": session_id})
        await second.socket.wait_closed()
        third.socket.transport.abort()
        await until(lambda: all(session.waiting for session in sessions._sessions.values()))
        fourth = await Raw.connect(url)  # takes the place of the one that is waiting
        assert (await fourth.ask("reset", {"seed": 2}))["type"] == "observation"
        assert (await fourth.ask("reset", {"resume": session_id}))["data"]["code"] == "SESSION_ERROR"
    async with serving(idle_timeout=0.05) as (url, sessions):
        silent = await Raw.connect(url)
        await silent.socket.wait_closed()
        await until(lambda: len(sessions) == 0)
    assert Adder.opened == 0


async def test_a_server_that_was_never_there_is_not_asked_again_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """What may have died unnoticed is tried once more; here there was no connection yet."""
    asked = []

    async def get(self: openenv.Link, path: str) -> dict[str, Any]:
        asked.append(path)
        raise openenv.ConnectionLost("refused")

    monkeypatch.setattr(openenv.Link, "get", get)
    with pytest.raises(fe.InfrastructureError, match="refused"):
        await fe.make(REMOTE, url="http://127.0.0.1:9").reset(seed=1)
    assert asked == ["/schema"]


async def test_no_more_episodes_are_begun_than_the_server_has_room_for() -> None:
    """Those that find no room wait for one of their own to end, and none is lost."""
    seen = 0

    async def episode(url: str, index: int) -> float:
        nonlocal seen
        env = fe.make(REMOTE, url=url, reconnects=0)
        [asked], _ = await env.reset(seed=index)
        seen = max(seen, Adder.opened)
        _, reward, *_ = await env.step(str(int(asked.content.split()[0]) + 1))
        await env.close()
        return reward

    async with serving(max_sessions=2, reconnect=0.05) as (url, sessions):
        assert await asyncio.gather(*(episode(url, index) for index in range(8))) == [1.0] * 8
        assert seen == 2
        await until(lambda: len(sessions) == 0)

        # others have taken all of it: there is nothing to wait for
        strangers = [await Raw.connect(url) for _ in range(2)]
        for stranger in strangers:
            await stranger.ask("reset", {"seed": 1})
        outcomes = await asyncio.gather(*(episode(url, 1) for _ in range(4)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [openenv.Full] * 4
        for stranger in strangers:
            await stranger.socket.close()
        await until(lambda: len(sessions) == 0)

        # who gives up waiting passes its place on
        first, second = fe.make(REMOTE, url=url), fe.make(REMOTE, url=url)
        await first.reset(seed=1)
        await second.reset(seed=1)
        impatient = asyncio.create_task(episode(url, 1))
        patient = asyncio.create_task(episode(url, 2))
        [waiting] = [each[url] for each in openenv._sessions.values() if url in each]
        await until(lambda: len(waiting._waiting) == 2)
        impatient.cancel()
        await first.close()
        assert await patient == 1.0
        await second.close()
        assert (waiting.live, waiting.asking) == (0, 0)


async def test_lost_infrastructure_is_tried_again_and_bugs_are_told() -> None:
    async with serving() as (url, _):
        make = lambda: fe.make(REMOTE, url=url)  # noqa: E731
        trajectory = await run_episode(make, ReplayPolicy([call("lose")]), seed=1, retry=Retry(1, 0.0))
        assert (trajectory.valid, trajectory.retries) == (False, 1)
        with pytest.raises(EnvironmentBugError, match="ZeroDivisionError"):
            await run_episode(make, ReplayPolicy([call("crash")]), seed=1)


async def test_the_documents_of_a_server() -> None:
    import httpx2

    async with serving() as (url, _), httpx2.AsyncClient(base_url=url, trust_env=False) as client:
        assert (await client.get("/health")).json() == {"status": "healthy"}
        assert (await client.get("/metadata")).json() == {
            "name": "adder", "description": "Add what you are told.", "version": fe.__version__
        }  # fmt: skip
        assert (await client.get("/schema")).json()["action"]["required"] == ["message"]


async def test_certificates_are_read_once_however_many_episodes_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them holds the event loop up: 512 episodes that asked a dead server took minutes to hear of it."""
    read, load = [], ssl.SSLContext.load_verify_locations

    def count(self: ssl.SSLContext, *arguments: Any, **named: Any) -> None:
        read.append(self)
        load(self, *arguments, **named)

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", count)
    openenv._trusted.cache_clear()
    for _ in range(3):
        with pytest.raises(fe.InfrastructureError, match="All connection attempts failed"):
            await fe.make(REMOTE, url="http://127.0.0.1:9", reconnects=1, first_delay_s=0).reset(seed=1)
    assert len(read) <= 1
