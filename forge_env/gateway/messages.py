"""Anthropic's messages API: parse requests, and build responses and events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from forge_env.gateway.request import (
    MOST_MESSAGES,
    MOST_STOPS,
    MOST_TOOLS,
    Answer,
    Arguments,
    Content,
    ModelRequest,
    Part,
    Wire,
    arguments_object,
    compact,
    event,
    known_type,
    new_id,
    read,
    said,
    tool_of,
    without_repeats,
)
from forge_env.http.limits import RefusedRequestError
from forge_env.tools.turns import call_of
from forge_env.types import Message, ToolSpec

_STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
AT_ANTHROPIC = ("web_search", "web_fetch", "code_execution", "tool_search_tool", "mcp_toolset", "advisor")
"""Types of tools that run on Anthropic's servers, without their dates."""
_NO_CONTENT = ("tool_result", "tool_use", "thinking", "redacted_thinking")
"""Types of blocks that are not part of a message's content; redacted thoughts are unreadable."""
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}


class _Block(Part):
    id: str = ""
    name: str = ""
    input: Arguments = "{}"
    tool_use_id: str = ""
    content: Content = None
    thinking: str = ""


class _Message(Wire):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[_Block], Field(max_length=MOST_MESSAGES, fail_fast=True)]

    def messages(self) -> Iterator[Message]:
        blocks = [_Block(text=self.content)] if isinstance(self.content, str) else self.content
        for block in (block for block in blocks if block.type == "tool_result"):
            yield said("tool", block.content, tool_call_id=block.tool_use_id)
        calls = [block for block in blocks if block.type == "tool_use"]
        thoughts = "".join(block.thinking for block in blocks if block.type == "thinking")
        rest = [block for block in blocks if block.type not in _NO_CONTENT]
        if not blocks or any(block.type != "tool_result" for block in blocks):  # a turn may have thoughts alone
            yield said(
                self.role,
                rest,
                tool_calls=[call_of(each.name, each.input, each.id) for each in calls],
                reasoning_content=thoughts or None,
            )


class _Tool(Wire):
    type: str | None = None
    name: str = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class _Choice(Wire):
    type: str = "auto"


class MessagesRequest(Wire):
    """Body of a messages request."""

    messages: list[_Message] = Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    model: str = ""
    system: Content = None
    tools: list[_Tool] | None = Field(None, max_length=MOST_TOOLS, fail_fast=True)
    tool_choice: _Choice | None = None
    stop_sequences: list[str] | None = Field(None, max_length=MOST_STOPS, fail_fast=True)
    max_tokens: int | None = Field(None, ge=1)
    stream: bool | None = None


def read_messages(data: object) -> ModelRequest:
    """Parse a request body. `RefusedRequestError`: it is invalid or not supported."""
    body = read(MessagesRequest, data)
    system = said("system", body.system)
    hosted = [tool.type for tool in body.tools or [] if tool.type and tool.type.startswith(AT_ANTHROPIC)]
    given = [tool for tool in body.tools or [] if tool.type not in hosted]
    offered = [] if body.tool_choice and body.tool_choice.type == "none" else given
    return ModelRequest(
        messages=[
            *([system] if system.content else []),
            *(each for message in body.messages for each in message.messages()),
        ],
        tools=without_repeats(map(_tool, offered)),
        stop=body.stop_sequences or [],
        max_tokens=body.max_tokens,
        model=body.model,
        stream=bool(body.stream),
        left_out=[known_type(kind, AT_ANTHROPIC) for kind in hosted],
    )


def _tool(tool: _Tool) -> ToolSpec:
    if tool.input_schema is None:
        raise RefusedRequestError(
            f"this model doesn't know the tool {tool.name!r} ({tool.type}): give it an input_schema"
        )
    return tool_of(tool.name, tool.description, tool.input_schema)


def message_response(request: ModelRequest, answers: Sequence[Answer]) -> dict[str, Any]:
    """Response to a messages request."""
    [answer] = answers
    return {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": _blocks(answer.message),
        "stop_reason": _STOP[answer.finish] if answer.stopped_at is None else "stop_sequence",
        "stop_sequence": answer.stopped_at,
        "usage": {"input_tokens": request.prompt_tokens, "output_tokens": answer.tokens},
    }


def message_events(whole: dict[str, Any]) -> Iterator[bytes]:
    """Server-sent events of a response."""
    blocks, usage = whole["content"], whole["usage"]
    ended = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    begun = {**whole, "content": [], **dict.fromkeys(ended), "usage": {**usage, "output_tokens": 0}}
    yield event({"type": "message_start", "message": begun}, "message_start")
    for index, block in enumerate(blocks):
        empty, delta = _in_pieces(block)
        for name, part in (("start", {"content_block": empty}), ("delta", {"delta": delta}), ("stop", {})):
            kind = f"content_block_{name}"
            yield event({"type": kind, "index": index, **part}, kind)
    change = {"type": "message_delta", "delta": ended, "usage": {"output_tokens": usage["output_tokens"]}}
    yield event(change, "message_delta")
    yield event({"type": "message_stop"}, "message_stop")


def _in_pieces(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    if block["type"] == "tool_use":
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": compact(block["input"])}
    kind = block["type"]
    return {**block, kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}


def _blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning_content:
        blocks.append({"type": "thinking", "thinking": message.reasoning_content, "signature": ""})
    if message.content or not message.tool_calls:
        blocks.append({"type": "text", "text": message.content})
    return blocks + [
        {
            "type": "tool_use",
            "id": call.id,
            "name": call.function.name,
            "input": arguments_object(call.function.arguments),
        }
        for call in message.tool_calls
    ]


def anthropic_error(error: RefusedRequestError) -> dict[str, Any]:
    """Body of an error response in Anthropic's format."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}
