"""Model endpoint for verifiers, on the loopback interface, whose answers are supplied by the caller."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from forge_env.http.limits import MAX_BODY, RefusedRequestError, check_structure
from forge_env.types import Message, ToolSpec

MODEL = "forge-env"


class Request:
    """A pending request to the model."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.messages = [_message(item) for item in body.get("messages", [])]
        self.tools = [ToolSpec.model_validate(item["function"]) for item in body.get("tools") or []]
        self.answered: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    def answer(self, message: Message) -> None:
        """Reply with an assistant message; ignored if the request is already answered or cancelled."""
        if self.answered.done():
            return
        content = message.to_openai()
        choice = {"index": 0, "message": content, "finish_reason": "tool_calls" if message.tool_calls else "stop"}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        head = {"id": "forge-env", "object": "chat.completion", "created": int(time.time()), "model": MODEL}
        self.answered.set_result({**head, "choices": [choice], "usage": usage})


def as_stream(reply: dict[str, Any]) -> str:
    """Format a completion as server-sent events: the whole message in one chunk, the finish reason, the usage."""
    [choice] = reply["choices"]
    calls = [{"index": number, **call} for number, call in enumerate(choice["message"].get("tool_calls", []))]
    delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    head = {key: reply[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        {**head, "choices": [], "usage": reply["usage"]},
    ]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def _message(item: dict[str, Any]) -> Message:
    content = item.get("content") or ""
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    known = {key: item.get(key) for key in ("tool_call_id", "name")}
    role = "system" if item["role"] == "developer" else item["role"]
    data = {"role": role, "content": content, "tool_calls": item.get("tool_calls") or [], **known}
    return Message.model_validate(data)


class Endpoint:
    """Model endpoint on the loopback interface whose answers are supplied by the caller."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[Request] = asyncio.Queue()
        self.url = ""
        self._runner: Any = None

    async def start(self) -> None:
        """Listen on a free port."""
        from aiohttp import web

        async def complete(request: web.Request) -> web.Response:
            text = await request.read()
            try:
                check_structure(text)
                body = json.loads(text)
            except (RefusedRequestError, ValueError, RecursionError) as error:
                raise web.HTTPBadRequest(text=str(error)) from None
            asked = Request(body)
            await self.requests.put(asked)
            reply = await asked.answered
            if body.get("stream"):
                return web.Response(text=as_stream(reply), content_type="text/event-stream")
            return web.json_response(reply)

        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post("/v1/chat/completions", complete)
        self._runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def stop(self) -> None:
        """Stop listening; pending requests are dropped."""
        await self._runner.cleanup()
