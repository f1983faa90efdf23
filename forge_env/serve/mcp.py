"""The tools of a served environment at `/mcp`: over MCP, through the official SDK, and as OpenEnv's JSON-RPC.

Clients that accept event streams are served over MCP, since the standard requires MCP clients to accept them. The URL
chooses the task (`/mcp?split=eval&index=3`, or `seed=`), and the prompt `task` describes it; there are no rewards.

Until MCP 2025-11-25, each session has a separate episode, which begins with the session's first request and ends with
the session. Since MCP 2026-07-28 there are no sessions: the tool `begin_episode` returns an id that every other tool
takes as the argument `episode_id`, and `end_episode` ends it. A call without the id gets a new episode, which ends with
the call. Idle episodes end after the idle limit (docs/decisions/mcp-endpoint.md).

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
from collections.abc import AsyncIterator, Mapping
from typing import Any

from mcp import MCPError, types
from mcp.server.caching import CacheHint
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, LATEST_MODERN_VERSION
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
LIST_TTL_MS = 300_000
"""Milliseconds for which clients may keep the list of tools; without sessions, a list takes an episode."""
BEGIN = "begin_episode"
END = "end_episode"
EPISODE_ID = "episode_id"
EPISODE_ID_SCHEMA = {
    "type": "string",
    "description": f"the id that {BEGIN} returned; without it, a new episode begins and ends with this call",
}
_INTEGER = re.compile(r"-?[0-9]{1,18}")
_DATA_URL = re.compile(r"data:([^;,]+);base64,(.*)", re.DOTALL)
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

Context = ServerRequestContext[Any, Request]
"""A request, in the SDK's terms."""


class McpEndpoint:
    """ASGI application of `/mcp` over HTTP. It serves inside its context manager `run()`."""

    def __init__(self, name: str, version: str, sessions: Sessions) -> None:
        self.sessions = sessions
        server: Server[Any] = Server(
            name,
            version=version,
            cache_hints={"tools/list": CacheHint(LIST_TTL_MS)},
            get_tool_input_schema=lambda tool: None,  # no argument is repeated in a header, so there is none to check
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_list_prompts=self._list_prompts,
            on_get_prompt=self._get_prompt,
        )
        idle_s = sessions.limits.idle_timeout
        self._manager = StreamableHTTPSessionManager(server, json_response=True, session_idle_timeout=idle_s)
        self.run = self._manager.run
        self._episodes: dict[str, asyncio.Task[Session]] = {}
        """Episodes by MCP session."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request."""
        request = Request(scope, receive)
        if request.method == "DELETE":
            await self._manager.handle_request(scope, receive, send)
            await self._end(request.headers.get("mcp-session-id", ""))
        elif "text/event-stream" in request.headers.get("accept", "") or "mcp-protocol-version" in request.headers:
            await self._manager.handle_request(scope, receive, send)
        else:
            response = Response(status_code=405, headers={"Allow": "DELETE, POST"})
            if request.method == "POST":
                body = await request.body()
                response = JSONResponse(await answer_rpc(await off_loop(len(body), lambda: _json(body)), self.sessions))
            await response(scope, receive, send)

    @contextlib.asynccontextmanager
    async def _episode(self, context: Context, episode_id: object = None) -> AsyncIterator[Session]:
        """Find or begin the episode of a request. `MCPError`: there is no such episode, or none could begin."""
        try:
            if not _stateless(context):
                yield await self._episode_of_session(context)
            elif episode_id is not None:
                yield self._named(episode_id)
            else:
                session = await self._begin(context)
                try:
                    yield session
                finally:
                    await self.sessions.close(session)
        except WireError as error:
            raise _as_mcp(error) from error

    async def _episode_of_session(self, context: Context) -> Session:
        """Return the episode of an MCP session; it begins with the session's first request."""
        mcp_session = _request(context).headers["mcp-session-id"]
        if (task := self._episodes.get(mcp_session)) is None:
            task = self._episodes[mcp_session] = asyncio.create_task(self._begin(context))
            while len(self._episodes) > MOST_REMEMBERED:
                del self._episodes[next(iter(self._episodes))]
        try:
            return self.sessions.find((await asyncio.shield(task)).id)
        except WireError:
            if task.exception() is not None:
                self._episodes.pop(mcp_session, None)  # the next request may try again
            raise

    def _named(self, episode_id: object) -> Session:
        try:
            return self.sessions.find(str(episode_id))
        except WireError:
            message = f"there is no episode {str(episode_id)[:64]!r}, or it has ended: begin one with {BEGIN}"
            raise MCPError(types.INVALID_PARAMS, message) from None

    async def _end(self, of: str) -> None:
        if (task := self._episodes.pop(of, None)) is None:
            return
        task.cancel()  # `begin` closes its session when cancelled
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None:
            await self.sessions.close(task.result())

    async def _begin(self, context: Context) -> Session:
        query = _request(context).query_params
        options = {key: int(text) if _INTEGER.fullmatch(text) else text for key, text in query.items()}
        return (await self.sessions.begin(options))[0]

    async def _list_tools(self, context: Context, params: Any) -> types.ListToolsResult:
        async with self._episode(context) as session:  # some environments know their tools only in an episode
            tools = [
                types.Tool(name=spec.name, description=spec.description, input_schema=spec.parameters)
                for spec in session.env.tools
            ]
        return types.ListToolsResult(tools=_with_episode_id(tools) if _stateless(context) else tools)

    async def _call_tool(self, context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        arguments = dict(params.arguments or {})
        episode_id = None
        if _stateless(context):
            episode_id = arguments.pop(EPISODE_ID, None)
            if params.name == BEGIN:
                return await self._begin_episode(context)
            if params.name == END:
                await self.sessions.close(self._named(episode_id))
                return _text("The episode has ended.")
        async with self._episode(context, episode_id) as session:
            return _text(await _call(session, self.sessions, params.name, arguments))

    async def _begin_episode(self, context: Context) -> types.CallToolResult:
        try:
            session = await self._begin(context)
        except WireError as error:
            raise _as_mcp(error) from error
        prompt = [block for message in session.opening for block in _blocks(message["content"])]
        usage = types.TextContent(type="text", text=f"{EPISODE_ID}: {session.id}")
        return types.CallToolResult(content=[usage, *prompt], structured_content={EPISODE_ID: session.id})

    async def _list_prompts(self, context: Context, params: Any) -> types.ListPromptsResult:
        argument = types.PromptArgument(name=EPISODE_ID, description=EPISODE_ID_SCHEMA["description"])
        arguments = [argument] if _stateless(context) else None
        prompt = types.Prompt(name="task", description="the prompt of the task", arguments=arguments)
        return types.ListPromptsResult(prompts=[prompt])

    async def _get_prompt(self, context: Context, params: types.GetPromptRequestParams) -> types.GetPromptResult:
        if params.name != "task":
            raise MCPError(types.INVALID_PARAMS, f"there is no prompt {params.name[:80]!r}")
        async with self._episode(context, (params.arguments or {}).get(EPISODE_ID)) as session:
            messages = [
                types.PromptMessage(
                    role="assistant" if message["role"] == "assistant" else "user",
                    content=block,
                )
                for message in session.opening
                for block in _blocks(message["content"])
            ]
        return types.GetPromptResult(messages=messages)


def _request(context: Context) -> Request:
    assert context.request is not None  # only transports other than HTTP have none
    return context.request


def _stateless(context: Context) -> bool:
    """Whether the protocol of a request has no sessions."""
    return context.protocol_version not in HANDSHAKE_PROTOCOL_VERSIONS


def _blocks(content: str | list[dict[str, Any]]) -> list[types.ContentBlock]:
    """Convert the content of a message in OpenAI's format; an image that isn't in the message becomes a link."""
    if isinstance(content, str):
        return [types.TextContent(type="text", text=content)]
    return [
        types.TextContent(type="text", text=part["text"])
        if part["type"] == "text"
        else _image(part["image_url"]["url"])
        for part in content
    ]


def _image(url: str) -> types.ImageContent | types.ResourceLink:
    if (match := _DATA_URL.fullmatch(url)) is None:
        return types.ResourceLink(type="resource_link", name="image", uri=url)
    return types.ImageContent(type="image", mime_type=match[1], data=match[2])


def _text(text: str) -> types.CallToolResult:
    content = types.TextContent(type="text", text=text)
    return types.CallToolResult(content=[content], is_error=text.startswith("Error: "))


def _with_episode_id(tools: list[types.Tool]) -> list[types.Tool]:
    """Add the argument `episode_id` to tools, and the tools that begin and end an episode."""
    for tool in tools:
        if tool.name in (BEGIN, END) or EPISODE_ID in tool.input_schema.get("properties", {}):
            message = f"the tool {tool.name!r} has a name or argument that MCP {LATEST_MODERN_VERSION} needs: rename it"
            raise MCPError(types.INTERNAL_ERROR, message)
        properties = {**tool.input_schema.get("properties", {}), EPISODE_ID: EPISODE_ID_SCHEMA}
        tool.input_schema = {**tool.input_schema, "properties": properties}
    described = {
        BEGIN: ("Begin an episode: returns its episode_id, and the task.", {"type": "object", "properties": {}}),
        END: (
            "End an episode.",
            {"type": "object", "properties": {EPISODE_ID: EPISODE_ID_SCHEMA}, "required": [EPISODE_ID]},
        ),
    }
    return [
        *(types.Tool(name=name, description=text, input_schema=schema) for name, (text, schema) in described.items()),
        *tools,
    ]


# --- OpenEnv's JSON-RPC


class RpcRequest(BaseModel):
    """One JSON-RPC 2.0 request."""

    model_config = ConfigDict(extra="forbid")

    jsonrpc: str = Field(pattern=r"^2\.0$")
    method: str
    params: dict[str, Any] = Field(default_factory=dict)
    id: str | int | None = None


async def answer_rpc(data: Any, sessions: Sessions, own: Session | None = None) -> dict[str, Any]:
    """Answer one JSON-RPC request."""
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
