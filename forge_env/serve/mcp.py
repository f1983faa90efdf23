"""The tools of a served environment at `/mcp`: over MCP, through the official SDK, and as OpenEnv's JSON-RPC.

Clients that accept event streams are served over MCP, since the standard requires MCP clients to accept them. Each MCP
session has a separate episode, which begins with the session's first request and ends with the session, or after the
idle limit. The URL chooses the task (`/mcp?split=eval&index=3`, or `seed=`), and the prompt `task` describes it; there
are no rewards. An episode needs a session, so protocol versions without sessions are refused, and clients fall back to
a version with sessions (docs/decisions/mcp-endpoint.md).

OpenEnv's clients post single requests to the same URL, without MCP's handshake and with additional methods:

    {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {"seed": 3}}
    {"jsonrpc": "2.0", "id": 2, "method": "tools/call",
     "params": {"session_id": "...", "name": "add", "arguments": {"a": 1}}}

Also `tools/list` and `openenv/session/close`. A call without a session gets a new episode, which ends with the call.
Over a WebSocket (`/mcp`, or messages of type "mcp" on `/ws`), requests use the connection's session.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcp import MCPError, types
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from forge_env.errors import mistakes
from forge_env.http.limits import RefusedRequestError, off_loop
from forge_env.serve.sessions import Session, Sessions, WireError, parse_json, tool_entry

SERVER_ERROR = -32000
MOST_REMEMBERED = 10_000
"""Maximum number of MCP sessions whose episodes are stored; the SDK keeps as many sessions."""
_INTEGER = re.compile(r"-?[0-9]{1,18}")
_CODES = {
    "VALIDATION_ERROR": types.INVALID_PARAMS,
    "SESSION_ERROR": types.INVALID_PARAMS,
    "EXECUTION_ERROR": types.INTERNAL_ERROR,
}


def _as_mcp(error: WireError) -> MCPError:
    return MCPError(_CODES.get(error.code, SERVER_ERROR), str(error), error.details or None)


async def _call(session: Session, sessions: Sessions, name: str, arguments: Any) -> str:
    """Call a tool in a session; return its answer as text."""
    step = session.step({"type": "call_tool", "tool_name": name, "arguments": arguments})
    reply = await sessions.use(session, step)
    return str(reply["data"]["observation"]["result"] or "")


# --- MCP


@dataclass(frozen=True, slots=True)
class _Episode:
    """The episode of an MCP session."""

    session_id: str
    prompt: types.GetPromptResult


class McpEndpoint:
    """ASGI application of `/mcp` over HTTP. It serves inside its context manager `run()`."""

    def __init__(self, name: str, version: str, sessions: Sessions) -> None:
        self.sessions = sessions
        server: Server[Any] = Server(
            name,
            version=version,
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_list_prompts=self._list_prompts,
            on_get_prompt=self._get_prompt,
        )
        idle_s = sessions.limits.idle_timeout
        self._manager = StreamableHTTPSessionManager(server, json_response=True, session_idle_timeout=idle_s)
        self.run = self._manager.run
        self._episodes: dict[str, asyncio.Task[_Episode]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request."""
        request = Request(scope, receive)
        version = request.headers.get("mcp-protocol-version", HANDSHAKE_PROTOCOL_VERSIONS[0])
        if request.method == "DELETE":
            await self._manager.handle_request(scope, receive, send)
            await self._end(request.headers.get("mcp-session-id", ""))
        elif "text/event-stream" not in request.headers.get("accept", ""):
            response = Response(status_code=405, headers={"Allow": "DELETE, POST"})
            if request.method == "POST":
                body = await request.body()
                response = JSONResponse(await answer_rpc(await off_loop(len(body), lambda: _json(body)), self.sessions))
            await response(scope, receive, send)
        elif version not in HANDSHAKE_PROTOCOL_VERSIONS:
            await (await _refuse(request, version))(scope, receive, send)
        else:
            await self._manager.handle_request(scope, receive, send)

    async def _episode(self, context: Any) -> tuple[Session, _Episode]:
        """Return the session and episode of a request's MCP session; the episode starts with the first request."""
        request: Request = context.request
        mcp_session = request.headers["mcp-session-id"]
        if (task := self._episodes.get(mcp_session)) is None:
            task = self._episodes[mcp_session] = asyncio.create_task(self._begin(dict(request.query_params)))
            while len(self._episodes) > MOST_REMEMBERED:
                del self._episodes[next(iter(self._episodes))]
        try:
            episode = await asyncio.shield(task)
            return self.sessions.find(episode.session_id), episode
        except WireError as error:
            if task.exception() is not None:
                self._episodes.pop(mcp_session, None)  # the next request may try again
            raise _as_mcp(error) from error

    async def _end(self, of: str) -> None:
        if (task := self._episodes.pop(of, None)) is None:
            return
        task.cancel()  # `begin` closes its session when cancelled
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None:
            with contextlib.suppress(WireError):  # the session has already ended
                await self.sessions.close(self.sessions.find(task.result().session_id))

    async def _begin(self, query: dict[str, str]) -> _Episode:
        options = {key: int(text) if _INTEGER.fullmatch(text) else text for key, text in query.items()}
        session, reply = await self.sessions.begin(options)
        messages = [
            types.PromptMessage(
                role="assistant" if message["role"] == "assistant" else "user",
                content=types.TextContent(type="text", text=message["content"]),
            )
            for message in reply["data"]["observation"]["messages"]
        ]
        return _Episode(session.id, types.GetPromptResult(messages=messages))

    async def _list_tools(self, context: Any, params: Any) -> types.ListToolsResult:
        session, _ = await self._episode(context)  # some environments know their tools only in an episode
        tools = [
            types.Tool(name=spec.name, description=spec.description, input_schema=spec.parameters)
            for spec in session.env.tools
        ]
        return types.ListToolsResult(tools=tools)

    async def _call_tool(self, context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        session, _ = await self._episode(context)
        try:
            text = await _call(session, self.sessions, params.name, params.arguments or {})
        except WireError as error:
            raise _as_mcp(error) from error
        content = types.TextContent(type="text", text=text)
        return types.CallToolResult(content=[content], is_error=text.startswith("Error: "))

    async def _list_prompts(self, context: Any, params: Any) -> types.ListPromptsResult:
        return types.ListPromptsResult(prompts=[types.Prompt(name="task", description="the prompt of the task")])

    async def _get_prompt(self, context: Any, params: types.GetPromptRequestParams) -> types.GetPromptResult:
        if params.name != "task":
            raise MCPError(types.INVALID_PARAMS, f"there is no prompt {params.name[:80]!r}")
        return (await self._episode(context))[1].prompt


async def _refuse(request: Request, version: str) -> Response:
    """Refusal of a protocol version without sessions; it lists the supported versions."""
    try:
        request_id = (await request.json()).get("id")
    except (ValueError, AttributeError):
        request_id = None
    data = {"supported": list(HANDSHAKE_PROTOCOL_VERSIONS), "requested": version}
    error = MCPError(types.UNSUPPORTED_PROTOCOL_VERSION, "Unsupported protocol version", data)
    return JSONResponse(_failed(request_id, error), status_code=400)


# --- OpenEnv's JSON-RPC


class RpcRequest(BaseModel):
    """One JSON-RPC 2.0 request."""

    model_config = ConfigDict(extra="forbid")

    jsonrpc: str = Field(pattern=r"^2\.0$")
    method: str
    params: dict[str, Any] = Field(default_factory=dict)
    id: str | int | None = None


async def answer_rpc(data: Any, sessions: Sessions, own: Session | None = None) -> dict[str, Any]:
    """Answer one JSON-RPC request.

    Args:
        data: its JSON value, or the `WireError` raised when it was parsed.
        sessions: sessions of the server.
        own: session of the WebSocket that carried the request, if any.
    """
    request_id: Any = None
    try:
        request = _parse(data)
        request_id = request.id
        return {"jsonrpc": "2.0", "id": request_id, "result": await _dispatch(request, sessions, own)}
    except WireError as error:
        return _failed(request_id, _as_mcp(error))
    except MCPError as error:
        return _failed(request_id, error)


def rpc_refusal(error: RefusedRequestError) -> dict[str, Any]:
    """Response to a request beyond the limits of `forge_env.http.limits`."""
    return _failed(None, MCPError(types.INVALID_REQUEST, error.message))


def _json(text: bytes) -> Any:
    try:
        return parse_json(text)
    except WireError as error:
        return error


def _parse(data: Any) -> RpcRequest:
    if isinstance(data, WireError):
        raise MCPError(types.PARSE_ERROR, str(data))
    try:
        return RpcRequest.model_validate(data)
    except ValidationError as error:
        raise MCPError(types.INVALID_REQUEST, f"request: {mistakes(error)}") from None


def _failed(request_id: Any, error: MCPError) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request_id, "error": error.error.model_dump(exclude_none=True)}


async def _dispatch(request: RpcRequest, sessions: Sessions, own: Session | None) -> dict[str, Any]:
    params = dict(request.params)
    session_id = params.pop("session_id", None)
    match request.method:
        case "openenv/session/create":
            if own is not None:
                return {"session_id": own.id}
            session, _ = await sessions.begin(params)
            return {"session_id": session.id}
        case "openenv/session/close":
            if not isinstance(session_id, str):
                raise MCPError(types.INVALID_PARAMS, "session_id is required")
            await sessions.close(sessions.find(session_id))
            return {"session_id": session_id, "closed": True}
        case "tools/list" | "tools/call":
            if own is not None or session_id is not None:
                return await _tools(request.method, params, own or sessions.find(str(session_id)), sessions)
            session = await sessions.open(named=True)
            try:
                return await _tools(request.method, params, session, sessions)
            finally:
                await sessions.close(session)
        case other:
            raise MCPError(types.METHOD_NOT_FOUND, f"there is no method {other[:80]!r}")


async def _tools(method: str, params: Mapping[str, Any], session: Session, sessions: Sessions) -> dict[str, Any]:
    if not session.started:  # some environments know their tools only in an episode
        await sessions.use(session, session.reset({}))
    if method == "tools/list":
        entries = [tool_entry(spec) for spec in session.env.tools]
        return {"tools": [{**entry, "inputSchema": entry["input_schema"]} for entry in entries]}
    if not isinstance(params.get("name"), str):
        raise MCPError(types.INVALID_PARAMS, "name is required")
    text = await _call(session, sessions, params["name"], params.get("arguments") or {})
    # OpenEnv's client reads `data`; MCP specifies `content`.
    return {"content": [{"type": "text", "text": text}], "isError": text.startswith("Error: "), "data": text}
