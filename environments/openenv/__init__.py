"""Client for environments behind an OpenEnv server, as an `Environment`.

    env = fe.make("openenv", url="http://localhost:8000")

The server's observation becomes a user message: its text field, or the whole observation as JSON. The server's action
schema determines how the agent acts: tools of a tool server become tools; an action with one required text field is the
agent's message; any other action becomes a tool `act` with the action's schema, or a message with the action as JSON.

If the server is full, further episodes of this process wait until one of the process's sessions has ended.

Every wait has a limit, and an answer is never matched to another request: a connection that timed out is closed.
Servers of forge-env are asked to resume the episode on a new connection; with other servers the episode is lost, which
raises an `InfrastructureError`, so it is retried from the start.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from pydantic import Field

from forge_env.environment.base import Environment, EnvironmentConfig, resolve_task
from forge_env.errors import EnvironmentBugError, InfrastructureError, UsageError
from forge_env.tools.json_text import BadJSONError, read_json
from forge_env.tools.schema import unknown_tool
from forge_env.types import Action, Message, Observation, ResetResult, StepResult, Task, ToolCall, ToolSpec, as_message
from forge_env.working_time import limited_elsewhere, waiting

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

T = TypeVar("T")


class OpenEnvConfig(EnvironmentConfig):
    """Address of the server, time limits, and retries."""

    url: str
    """URL of the server, such as http://localhost:8000."""
    reset_options: dict[str, Any] = Field(default_factory=dict)
    """Additional arguments of the server's reset."""
    max_turns: int = Field(100, ge=1)
    """Maximum number of assistant messages before the episode is truncated."""
    connect_s: float = Field(10.0, gt=0)
    """Timeout for a connection, in seconds."""
    answer_s: float = Field(120.0, gt=0)
    """Timeout for an answer, in seconds."""
    reconnects: int = Field(3, ge=0)
    """Number of retries to connect; the delay doubles after each."""
    first_delay_s: float = Field(0.2, ge=0)
    """Delay before the first retry, in seconds."""
    max_message_mb: float = Field(64.0, gt=0)
    """Maximum size of a message of the server, in MiB."""


class ConnectionLost(Exception):
    """The connection broke, or an answer timed out."""


class Refused(EnvironmentBugError):
    """The server answered with an error."""

    def __init__(self, message: str, *, fix: str | None = None, code: str = "", reason: str = "") -> None:
        super().__init__(message, fix=fix)
        self.code = code
        self.reason = reason


TRIES_AFTER_ONE_ENDED = 3


class Full(InfrastructureError):
    """The server has no room for another session."""


class Sessions:
    """The sessions that the episodes of one event loop have with a server.

    Attributes:
        live: number of open sessions.
        asking: number of requested sessions without an answer so far.
    """

    def __init__(self) -> None:
        self.live = self.asking = 0
        self._waiting: deque[asyncio.Future[bool]] = deque()

    def answered(self, *, given: bool) -> None:
        """Record that a requested session was granted, or refused for lack of room."""
        self.asking -= 1
        self.live += given
        while not self.live and not self.asking and self._wake(False):
            pass  # no session is left whose end could make room for the waiting ones

    def end(self) -> None:
        """Record the end of a session and wake the longest waiting episode."""
        self.live -= 1
        self._wake(True)

    async def one_less(self) -> bool:
        """Wait until a session has ended, first come, first served; return False if no session is left to wait for."""
        if not self.live and not self.asking:
            return False
        ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(ended)
        try:
            with waiting():
                return await ended
        except asyncio.CancelledError:
            if ended.done() and not ended.cancelled():  # pass the free place on to the next waiter
                self._wake(True)
            raise

    def _wake(self, room: bool) -> bool:
        while self._waiting:
            ended = self._waiting.popleft()
            if not ended.done():
                ended.set_result(room)
                return True
        return False


_sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Sessions]] = WeakKeyDictionary()
"""Sessions by event loop and address of the server."""


@lru_cache(maxsize=1)
def _trusted() -> ssl.SSLContext:
    """SSL context with the trusted authorities, cached since loading blocks the event loop for tens of milliseconds."""
    import httpx2

    return httpx2.create_ssl_context(trust_env=False)


class Link:
    """Connection to a server: one request at a time, each with a time limit."""

    def __init__(self, config: OpenEnvConfig) -> None:
        self.config = config
        self._asking: Sessions | None = None
        self._live: Sessions | None = None
        self._http = config.url.rstrip("/").replace("ws://", "http://", 1).replace("wss://", "https://", 1)
        self._ws = self._http.replace("http://", "ws://", 1).replace("https://", "wss://", 1) + "/ws"
        self._socket: ClientConnection | None = None

    @property
    def is_open(self) -> bool:
        """Whether a connection is open on this side; the server may already be gone."""
        return self._socket is not None

    async def get(self, path: str) -> dict[str, Any]:
        """Fetch a JSON document from the server. `ConnectionLost`: the server can't be reached or returns no JSON."""
        import httpx2

        async def fetch() -> dict[str, Any]:
            try:
                async with httpx2.AsyncClient(
                    timeout=self.config.answer_s, trust_env=False, verify=_trusted()
                ) as client:
                    response = await client.get(f"{self._http}{path}")
                    response.raise_for_status()
                    document: dict[str, Any] = response.json()
                    return document
            except (httpx2.HTTPError, ValueError) as error:
                raise ConnectionLost(f"{path}: {type(error).__name__}: {error}") from error

        with limited_elsewhere():
            return await self._again(fetch)

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send one message and return the data of its answer.

        Raises `ConnectionLost` (the connection is then closed), `Refused`, `Full` if no session of this event loop can
        make room, and `InfrastructureError` if a retry may succeed.
        """
        sessions = _sessions.setdefault(asyncio.get_running_loop(), {}).setdefault(self._http, Sessions())
        tries = 0
        with limited_elsewhere():
            while True:
                try:
                    return await self._exchange(kind, data, sessions)
                except Full:
                    if await sessions.one_less():
                        tries = TRIES_AFTER_ONE_ENDED
                    elif not tries:
                        raise
                    else:  # the server may notice the end of that session slightly later
                        await asyncio.sleep(self.config.first_delay_s / tries)
                        tries -= 1

    async def _exchange(self, kind: str, data: Mapping[str, Any], sessions: Sessions) -> dict[str, Any]:
        from websockets.exceptions import WebSocketException

        if self._socket is None:
            self._socket = await self._again(self._connect)
            sessions.asking += 1
            self._asking = sessions
        try:
            async with asyncio.timeout(self.config.answer_s):
                await self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
                answer = json.loads(await self._socket.recv())
        except TimeoutError as error:
            self.drop()
            raise ConnectionLost(f"no answer to {kind} within {self.config.answer_s:g} s") from error
        except (OSError, ValueError, WebSocketException) as error:
            self.drop()
            raise ConnectionLost(f"{type(error).__name__}: {error}") from error
        except asyncio.CancelledError:
            self.drop()  # its pending answer would be taken for that of the next request
            raise
        content: dict[str, Any] = answer.get("data") or {}
        if answer.get("type") != "error":
            if self._asking is not None:
                self._asking, self._live = None, sessions
                sessions.answered(given=True)
            return content
        code, reason = str(content.get("code", "")), str(content.get("message", ""))
        if code == "CAPACITY_REACHED":
            self.drop()
            raise Full(f"{self.config.url}: {reason}")
        if code == "FACTORY_ERROR" or content.get("retriable"):
            self.drop()
            raise InfrastructureError(f"{self.config.url}: {reason}")
        raise Refused(f"{self.config.url} refused {kind}: {reason} ({code})", code=code, reason=reason)

    async def _connect(self) -> ClientConnection:
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        size = int(self.config.max_message_mb * 1024 * 1024)
        try:
            return await connect(self._ws, open_timeout=self.config.connect_s, max_size=size, proxy=None)
        except (OSError, TimeoutError, WebSocketException) as error:
            raise ConnectionLost(f"no connection: {type(error).__name__}: {error}") from error

    async def _again(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Await `attempt()`, retrying with exponential backoff while the server can't be reached."""
        for number in range(self.config.reconnects + 1):
            try:
                return await attempt()
            except ConnectionLost:
                if number == self.config.reconnects:
                    raise
            await asyncio.sleep(self.config.first_delay_s * 2**number)
        raise AssertionError("unreachable")

    def drop(self) -> None:
        """Abort the connection without a closing handshake."""
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.transport.abort()
        self._end()

    def _end(self) -> None:
        asking, live, self._asking, self._live = self._asking, self._live, None, None
        if asking is not None:
            asking.answered(given=False)
        if live is not None:
            live.end()

    async def close(self) -> None:
        """End the session on the server, then the connection."""
        from websockets.exceptions import WebSocketException

        socket, self._socket = self._socket, None
        if socket is None:
            return
        try:
            async with asyncio.timeout(self.config.connect_s):
                await socket.send(json.dumps({"type": "close"}))
                await socket.close()
        except (OSError, TimeoutError, WebSocketException):
            socket.transport.abort()
        finally:
            self._end()


# --- the environment

TOOL_SCHEMAS = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of the action schemas that tool servers publish."""
TEXT_FIELDS = ("text", "message", "observation", "content", "prompt", "output", "response", "result", "echoed_message")


class OpenEnvEnvironment(Environment):
    """An environment in another process or on another machine, over OpenEnv's protocol."""

    config_class = OpenEnvConfig
    config: OpenEnvConfig

    def __init__(self, config: EnvironmentConfig | None = None, **context: Any) -> None:
        super().__init__(config, **context)
        self._link = Link(self.config)
        self._schema: dict[str, Any] | None = None
        self._tools: list[ToolSpec] = []
        self._remote_tools = False
        self._metadata: dict[str, Any] = {}
        self._turns = 0
        self._running = False

    def task(self, split: str, index: int) -> Task:
        """Return a task with a seed for the server's environment; even seeds belong to `train`, odd ones to `eval`."""
        seed = 2 * (self.config.seed * 1_000_003 + index) + (split == "eval")
        return Task(
            id=f"{split}-{index}", prompt=f"Episode {seed} of {self.config.url}", data={"seed": seed}, split=split
        )

    @property
    def tools(self) -> list[ToolSpec]:
        """Tools of the server; empty before the first `reset`."""
        return self._tools

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Start an episode on the server.

        Raises:
            InfrastructureError: the server can't be reached or doesn't answer in time.
        """
        task = resolve_task(self, seed, options)
        self._running = False
        asked = {"seed": task.data.get("seed", seed), **self.config.reset_options}
        reused = self._link.is_open
        try:
            try:
                data = await self._start(asked)
            except ConnectionLost:
                if not reused:
                    raise
                data = await self._start(asked)  # the reused connection was dead
        except ConnectionLost as error:
            raise InfrastructureError(f"{self.config.url}: {error}") from error
        self._turns, self._running = 0, True
        observation, info = self._shown(data, [])
        return observation, {"task_id": task.id, "split": task.split, **info}

    async def step(self, action: Action) -> StepResult:
        """Send the action of a message, or each of its tool calls in order.

        Raises:
            InfrastructureError: the episode was lost with the connection.
        """
        if not self._running:
            raise UsageError("step() without a running episode", fix="call reset() first")
        message = as_message(action)
        self._turns += 1
        observation: Observation = []
        reward, terminated, truncated = 0.0, False, False
        info: dict[str, Any] = {}
        for payload, call in self._payloads(message):
            if isinstance(payload, str):
                observation.append(_answer(payload, call))
                continue
            data = await self._step(payload)
            shown, info = self._shown(data, [call] if call else [])
            observation += shown
            reward += float(data.get("reward") or 0.0)
            if data.get("done"):
                truncated = bool(data.get("observation", {}).get("truncated"))
                terminated = not truncated
                break
        if truncated:
            info.setdefault("truncation", "limit")
        elif not terminated and self._turns >= self.config.max_turns:
            truncated, info["truncation"] = True, "turns"
        self._running = not (terminated or truncated)
        return observation, reward, terminated, truncated, info

    async def close(self) -> None:
        """Close the session and the connection."""
        self._running = False
        await self._link.close()

    async def _start(self, asked: dict[str, Any]) -> dict[str, Any]:
        await self._learn_actions()
        return await self._link.ask("reset", asked)

    async def _learn_actions(self) -> None:
        """Fetch the server's action schema and derive the tools from it, once."""
        if self._schema is not None:
            return
        schema = (await self._link.get("/schema")).get("action", {})
        properties = {name: value for name, value in schema.get("properties", {}).items() if name != "metadata"}
        ours = {"message", "tool_calls"} <= properties.keys()
        if ours or schema.get("title") in TOOL_SCHEMAS:
            self._tools, self._remote_tools = await self._list_tools(), True
        elif _text_field(schema) is None:
            parameters = {**schema, "properties": properties}
            self._tools = [ToolSpec(name="act", description="Act in the environment.", parameters=parameters)]
        self._schema = schema

    async def _list_tools(self) -> list[ToolSpec]:
        data = await self._link.ask("step", {"type": "list_tools"})
        return [
            ToolSpec(
                name=tool["name"],
                description=tool.get("description") or "",
                parameters=tool.get("input_schema") or tool.get("inputSchema") or {"type": "object", "properties": {}},
            )
            for tool in data.get("observation", {}).get("tools", [])
        ]

    def _payloads(self, message: Message) -> list[tuple[dict[str, Any] | str, ToolCall | None]]:
        """Payloads to send for a message; a string is instead an error message for the agent."""
        schema = self._schema or {}
        ours = {"message", "tool_calls"} <= schema.get("properties", {}).keys()
        if ours:  # a server of forge-env accepts the message unchanged
            calls = [call.model_dump() for call in message.tool_calls]
            return [({"message": message.content, "tool_calls": calls}, None)]
        if message.tool_calls:
            return [(self._call_payload(call), call) for call in message.tool_calls]
        if (field := _text_field(schema)) is not None:
            return [({field: message.content}, None)]
        try:
            action = json.loads(_unfenced(message.content))
        except (ValueError, RecursionError):
            action = None
        if isinstance(action, dict):
            return [(action, None)]
        names = ", ".join(tool.name for tool in self._tools)
        return [(f"Error: that is not an action; call one of the tools: {names}", None)]

    def _call_payload(self, call: ToolCall) -> dict[str, Any] | str:
        names = [tool.name for tool in self._tools]
        if call.function.name not in names:
            return unknown_tool(call, names).text
        try:
            arguments = read_json(call.function.arguments or "{}")
        except BadJSONError as error:
            return f"Error: the arguments are not valid JSON: {error}"
        if not isinstance(arguments, dict):
            return "Error: the arguments must be a JSON object"
        if self._remote_tools:
            return {"type": "call_tool", "tool_name": call.function.name, "arguments": arguments}
        return arguments

    async def _step(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Send one action; if the server rejects it as invalid, return the error as an observation."""
        try:
            return await self._link.ask("step", payload)
        except ConnectionLost as error:
            return await self._after_loss(payload, error)
        except Refused as error:
            if error.code != "VALIDATION_ERROR":
                raise
            return {"observation": {"text": f"Error: {error.reason}"}, "reward": None, "done": False}

    async def _after_loss(self, payload: dict[str, Any], cause: Exception) -> dict[str, Any]:
        """Resume the episode on a new connection, if the server supports it."""
        lost = InfrastructureError(f"{self.config.url}: the episode was lost: {cause}")
        session_id = self._metadata.get("session_id")
        if session_id is None:
            raise lost from cause
        try:
            data = await self._link.ask("reset", {"resume": session_id})
            arrived = data["observation"]["metadata"]["step_count"] > self._metadata["step_count"]
            return data if arrived else await self._link.ask("step", payload)
        except (ConnectionLost, Refused, KeyError) as error:
            raise lost from error

    def _shown(self, data: Mapping[str, Any], calls: list[ToolCall]) -> ResetResult:
        """Convert an answer into messages and `info`."""
        observation = data.get("observation") or {}
        self._metadata = dict(observation.get("metadata") or {})
        info = dict(observation.get("info") or {})
        if "messages" in observation and "terminated" in observation:  # from a forge-env server
            return [Message.model_validate(message) for message in observation["messages"]], info
        if calls and "tool_name" in observation:
            failure = observation.get("error")
            text = f"Error: {failure.get('message')}" if failure else _result_text(observation.get("result"))
        else:
            text = observation_text(observation)
        return [_answer(text, calls[0] if calls else None)], {**info, "metadata": self._metadata}


def observation_text(observation: Mapping[str, Any]) -> str:
    """The text of an observation that consists of one text field; otherwise the whole observation as JSON."""
    fields = {key: value for key, value in observation.items() if key not in ("metadata", "done", "reward")}
    texts = [key for key in TEXT_FIELDS if isinstance(fields.get(key), str)]
    if len(texts) == 1 and len(fields) == 1:
        return str(fields[texts[0]])
    return json.dumps(fields, ensure_ascii=False)


def _result_text(result: Any) -> str:
    if isinstance(result, dict) and "data" in result:  # FastMCP's wrapper around the value of a tool
        result = result["data"]
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def _answer(text: str, call: ToolCall | None) -> Message:
    if call is None:
        return Message(role="user", content=text)
    return Message(role="tool", content=text, tool_call_id=call.id, name=call.function.name[:64])


def _text_field(schema: Mapping[str, Any]) -> str | None:
    """Name of the only required field of an action, if it is a string."""
    required = [name for name in schema.get("required", []) if name != "metadata"]
    if len(required) == 1 and schema["properties"].get(required[0], {}).get("type") == "string":
        return str(required[0])
    return None


def _unfenced(text: str) -> str:
    lines = text.strip().split("\n")  # JSON may contain other line separators
    fenced = len(lines) > 2 and lines[0].startswith("```") and lines[-1].startswith("```")
    return "\n".join(lines[1:-1]) if fenced else text
