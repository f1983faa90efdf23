"""OpenEnv over plain HTTP, for clients that have no WebSocket: `/reset`, `/step`, `/state`, `/close`, `/mcp`.

    POST /reset {"seed": 7}                                  -> {"observation": {...}, "reward": null, "done": false}
    POST /step  {"session_id": "...", "action": {"message": "8"}}

The session's id is in the metadata of every observation, and in a cookie, which HTTP clients that keep cookies send by
themselves. A session ends when it is closed, or silent for too long.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from forge_env.serve.http_sessions import HttpSessions
from forge_env.serve.openenv_rpc import answer_rpc
from forge_env.serve.wire import EpisodeState, WireError, schemas

COOKIE = "openenv_session"
PROTOCOL = "1.0.0"
"""Version of OpenEnv's HTTP interface."""
_STATUS = {"INVALID_JSON": 400, "VALIDATION_ERROR": 422, "SESSION_ERROR": 409, "CAPACITY_REACHED": 503}


def http_routes(sessions: HttpSessions, name: str) -> list[BaseRoute]:
    """The routes of a server whose sessions over HTTP these are."""

    async def reset(request: Request) -> Response:
        data = await _body(request)
        session_id = data.pop("session_id", None) or request.cookies.get(COOKIE)
        try:
            session = sessions.find(str(session_id)) if session_id else await sessions.open()
        except WireError as error:
            if error.code != "SESSION_ERROR":
                raise
            session = await sessions.open()  # the old one has ended: reset starts anew anyway
        reply = await sessions.use(session, session.reset(data))
        response = JSONResponse(reply["data"])
        response.set_cookie(COOKIE, session.id, httponly=True, samesite="strict")
        return response

    async def step(request: Request) -> Response:
        data = await _body(request)
        session = _named(request, data)
        action, timeout_s = data.get("action"), data.get("timeout_s")
        if not isinstance(action, dict):
            raise WireError("VALIDATION_ERROR", "action: an object is needed, such as {'message': text}")
        if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s > 0):
            raise WireError("VALIDATION_ERROR", "timeout_s is no number above 0")
        reply = await sessions.use(session, session.step(action, timeout_s=timeout_s))
        return JSONResponse(reply["data"])

    async def state(request: Request) -> Response:
        data = dict(request.query_params)
        if not (data.get("session_id") or request.cookies.get(COOKIE)):
            return JSONResponse(EpisodeState().model_dump())
        return JSONResponse(_named(request, data).state.model_dump())

    async def close(request: Request) -> Response:
        session = _named(request, await _body(request))
        await sessions.close(session.id)
        response = JSONResponse({"closed": True})
        response.delete_cookie(COOKIE)
        return response

    async def mcp(request: Request) -> Response:
        return JSONResponse(await answer_rpc(await request.body(), sessions))

    async def document(request: Request) -> Response:
        return JSONResponse(openapi(name))

    def _named(request: Request, data: dict[str, Any]) -> Any:
        session_id = data.get("session_id") or request.cookies.get(COOKIE)
        if not session_id:
            raise WireError(
                "SESSION_ERROR", "name the session: reset's answer has it in observation.metadata.session_id"
            )
        return sessions.find(str(session_id))

    posts = {"/reset": reset, "/step": step, "/close": close, "/mcp": mcp}
    gets = {"/state": state, "/openapi.json": document}
    return [
        *(Route(path, _answered(handler), methods=["POST"]) for path, handler in posts.items()),
        *(Route(path, _answered(handler)) for path, handler in gets.items()),
    ]


def _answered(handler: Any) -> Any:
    """`handler`, whose `WireError`s become responses."""

    async def respond(request: Request) -> Response:
        try:
            response: Response = await handler(request)
        except WireError as error:
            detail = {"detail": str(error), "code": error.code, **error.details}
            return JSONResponse(detail, status_code=_STATUS.get(error.code, 500))
        return response

    return respond


async def _body(request: Request) -> dict[str, Any]:
    text = await request.body()
    try:
        data = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise WireError("INVALID_JSON", f"not valid JSON: {str(error)[:200]}") from None
    if not isinstance(data, dict):
        raise WireError("VALIDATION_ERROR", "the body is a JSON object")
    return data


def openapi(name: str) -> dict[str, Any]:
    """The OpenAPI document of a server."""

    def answered(schema: dict[str, Any]) -> dict[str, Any]:
        return {"200": {"description": "OK", "content": {"application/json": {"schema": schema}}}}

    def post(summary: str, body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        content = {"application/json": {"schema": {"type": "object", **body}}}
        return {"post": {"summary": summary, "requestBody": {"content": content}, "responses": answered(answer)}}

    session = {"session_id": {"type": "string"}}
    whole = {"integer": {"type": "integer"}, "string": {"type": "string"}}
    found = schemas()
    result = {"type": "object", "properties": {"observation": found["observation"], "reward": {}, "done": {}}}
    asked = {"seed": whole["integer"], "index": whole["integer"], "split": whole["string"]}
    step = {**session, "action": found["action"], "timeout_s": {"type": "number"}}
    paths: dict[str, Any] = {
        "/reset": post("start an episode", {"properties": {**session, **asked}}, result),
        "/step": post("act", {"properties": step, "required": ["action"]}, result),
        "/state": {"get": {"summary": "where the episode stands", "responses": answered(found["state"])}},
        "/close": post("end a session", {"properties": session}, {"type": "object"}),
        "/mcp": post("JSON-RPC: tools/list, tools/call", {}, {"type": "object"}),
    }
    for path in ("/health", "/metadata", "/schema"):
        paths[path] = {"get": {"summary": path[1:], "responses": answered({"type": "object"})}}
    return {"openapi": "3.1.0", "info": {"title": name, "version": PROTOCOL}, "paths": paths}
