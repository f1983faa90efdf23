"""OpenEnv's JSON-RPC endpoint `/mcp`: the tools of a served environment, without rewards.

    {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {"seed": 3}}
    {"jsonrpc": "2.0", "id": 2, "method": "tools/call",
     "params": {"session_id": "...", "name": "add", "arguments": {"a": 1}}}

Also `tools/list` and `openenv/session/close`. A call without a session has an episode of its own, which ends with it.
Over a WebSocket (`/mcp`, or messages of type "mcp" on `/ws`) the connection's own session is meant.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forge_env.serve.http_sessions import HttpSessions
from forge_env.serve.sessions import Session
from forge_env.serve.wire import WireError, tool_entry

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS = -32700, -32600, -32601, -32602
INTERNAL_ERROR, SERVER_ERROR = -32603, -32000
_CODES = {"VALIDATION_ERROR": INVALID_PARAMS, "SESSION_ERROR": INVALID_PARAMS, "EXECUTION_ERROR": INTERNAL_ERROR}


class RpcRequest(BaseModel):
    """One JSON-RPC 2.0 request."""

    model_config = ConfigDict(extra="forbid")

    jsonrpc: str = Field(pattern=r"^2\.0$")
    method: str
    params: dict[str, Any] = Field(default_factory=dict)
    id: str | int | None = None


class RpcError(Exception):
    """To be answered as a JSON-RPC error."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.data = data


async def answer_rpc(text: str | bytes, sessions: HttpSessions, own: Session | None = None) -> dict[str, Any]:
    """The response to one request; `own` is the session of the WebSocket that it came over."""
    request_id: Any = None
    try:
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RpcError(PARSE_ERROR, f"not valid JSON: {str(error)[:200]}") from None
        try:
            request = RpcRequest.model_validate(data)
        except ValidationError as error:
            item = error.errors(include_url=False)[0]
            where = ".".join(map(str, item["loc"])) or "request"
            raise RpcError(INVALID_REQUEST, f"{where}: {item['msg']}") from None
        request_id = request.id
        result = await _dispatch(request, sessions, own)
    except WireError as error:
        code = _CODES.get(error.code, SERVER_ERROR)
        return _failed(request_id, code, str(error), error.details)
    except RpcError as error:
        return _failed(request_id, error.code, str(error), error.data)
    return {"jsonrpc": "2.0", "id": request_id, "result": result}


def _failed(request_id: Any, code: int, message: str, data: Any) -> dict[str, Any]:
    error: dict[str, Any] = {"code": code, "message": message}
    if data:
        error["data"] = data
    return {"jsonrpc": "2.0", "id": request_id, "error": error}


async def _dispatch(request: RpcRequest, sessions: HttpSessions, own: Session | None) -> dict[str, Any]:
    params = dict(request.params)
    session_id = params.pop("session_id", None)
    match request.method:
        case "openenv/session/create":
            if own is not None:
                return {"session_id": own.id}
            session = await sessions.open()
            try:
                await sessions.use(session, session.reset(params))
            except BaseException:  # cancelled too: the session is nobody's yet
                await sessions.close(session.id)
                raise
            return {"session_id": session.id}
        case "openenv/session/close":
            if not isinstance(session_id, str):
                raise RpcError(INVALID_PARAMS, "session_id is required")
            await sessions.close(session_id)
            return {"session_id": session_id, "closed": True}
        case "tools/list" | "tools/call":
            if own is not None:
                return await _tools(request.method, params, own, None)
            if session_id is not None:
                return await _tools(request.method, params, sessions.find(str(session_id)), sessions)
            session = await sessions.open()
            try:
                return await _tools(request.method, params, session, sessions)
            finally:
                await sessions.close(session.id)
        case other:
            raise RpcError(METHOD_NOT_FOUND, f"there is no method {other[:80]!r}")


async def _tools(
    method: str, params: Mapping[str, Any], session: Session, sessions: HttpSessions | None
) -> dict[str, Any]:
    async def use(answer: Any) -> dict[str, Any]:
        reply: dict[str, Any] = await (session.work(answer) if sessions is None else sessions.use(session, answer))
        return reply

    if not session.started:  # some environments know their tools only in an episode
        await use(session.reset({}))
    if method == "tools/list":
        entries = [tool_entry(spec) for spec in session.env.tools]
        return {"tools": [{**entry, "inputSchema": entry["input_schema"]} for entry in entries]}
    if not isinstance(params.get("name"), str):
        raise RpcError(INVALID_PARAMS, "name is required")
    arguments = params.get("arguments") or {}
    reply = await use(session.step({"type": "call_tool", "tool_name": params["name"], "arguments": arguments}))
    text = reply["data"]["observation"]["result"] or ""
    # `data` is what OpenEnv's own client reads, `content` what MCP says.
    return {"content": [{"type": "text", "text": text}], "isError": text.startswith("Error: "), "data": text}
