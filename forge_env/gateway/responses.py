"""OpenAI's responses API: parse requests, and build responses and events."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from forge_env.gateway.request import (
    MOST_MESSAGES,
    MOST_TOOLS,
    Answer,
    Arguments,
    Content,
    ModelRequest,
    Part,
    ToolName,
    Wire,
    event,
    merged,
    new_id,
    now,
    read,
    said,
)
from forge_env.gateway.response_tools import Declaration, Offer, call_item, custom_arguments
from forge_env.http.limits import RefusedRequestError
from forge_env.tools.turns import call_of
from forge_env.types import Message

_TOOLS = "additional_tools"
"""Type of an item that adds tools."""
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


class _Item(Wire):
    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: Content = None
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: Arguments = "{}"
    input: str = ""
    output: Content = None
    summary: list[Part] = Field([], max_length=MOST_MESSAGES, fail_fast=True)
    tools: list[Declaration] = Field([], max_length=MOST_TOOLS, fail_fast=True)

    def message(self, offer: Offer) -> Message:
        if self.type in ("function_call", "custom_tool_call"):
            custom = self.type == "custom_tool_call"
            name = offer.name(self.namespace or "", self.name, custom=custom)
            arguments = custom_arguments(self.input) if custom else self.arguments
            return Message(role="assistant", tool_calls=[call_of(name, arguments, self.call_id)])
        if self.type in ("function_call_output", "custom_tool_call_output"):
            return said("tool", self.output, tool_call_id=self.call_id)
        if self.type == "reasoning":
            parts = self.content if isinstance(self.content, list) else []  # vLLM's, instead of a summary
            thoughts = "".join(part.text or "" for part in self.summary or parts)
            return Message(role="assistant", reasoning_content=thoughts or None)
        if self.type != "message":
            raise RefusedRequestError(f"the input has an item of the type {self.type!r}, which this model can't read")
        return said("system" if self.role == "developer" else self.role, self.content)


class ResponsesRequest(Wire):
    """Body of a responses request."""

    input: str | Annotated[list[_Item], Field(max_length=MOST_MESSAGES, fail_fast=True)]
    model: str = ""
    instructions: str | None = None
    tools: list[Declaration] | None = Field(None, max_length=MOST_TOOLS, fail_fast=True)
    tool_choice: Any = None
    max_output_tokens: int | None = Field(None, ge=1)
    previous_response_id: str | None = None
    stream: bool | None = None
    background: bool | None = None
    conversation: Any = None


class Earlier(NamedTuple):
    """A conversation up to one of its responses.

    Attributes:
        messages: its messages, without instructions.
        tools: tools that its items added.
    """

    messages: list[Message]
    tools: list[Declaration]


def read_responses(data: object, earlier: Mapping[str, Earlier]) -> ModelRequest:
    """Parse a request body.

    Args:
        earlier: the conversation up to each earlier response, by the response's id.

    Raises:
        RefusedRequestError: it is invalid or not supported.
    """
    body = read(ResponsesRequest, data)
    if body.background:
        raise RefusedRequestError("background: not supported")
    if body.conversation:
        raise RefusedRequestError("conversation: not supported; send all items, or previous_response_id")
    before = Earlier([], [])
    if body.previous_response_id:
        if body.previous_response_id not in earlier:
            raise RefusedRequestError(f"there is no response {body.previous_response_id!r}", status=404)
        before = earlier[body.previous_response_id]
    items = [_Item(content=body.input)] if isinstance(body.input, str) else body.input
    if len(before.messages) + len(items) > MOST_MESSAGES:
        raise RefusedRequestError(f"the conversation has more than {MOST_MESSAGES:,} items with its earlier responses")
    system = [Message(role="system", content=body.instructions)] if body.instructions else []
    added = [*before.tools, *(tool for item in items if item.type == _TOOLS for tool in item.tools)]
    offer = Offer(body.tools or [], added)
    messages = [*system, *before.messages, *merged(item.message(offer) for item in items if item.type != _TOOLS)]
    if not messages:
        raise RefusedRequestError("input: it has no message")
    return ModelRequest(
        messages=messages,
        tools=[] if body.tool_choice == "none" else offer.tools,
        names=offer.names,
        added=added,
        left_out=offer.left_out,
        max_tokens=body.max_output_tokens,
        model=body.model,
        stream=bool(body.stream),
    )


def response(name: str, request: ModelRequest, answers: Sequence[Answer], data: Any) -> dict[str, Any]:
    """Response to a responses request; later requests continue the conversation by its id, `name`."""
    [answer] = answers
    given = data if isinstance(data, dict) else {}
    prompt, completion = request.prompt_tokens, answer.tokens
    incomplete = _INCOMPLETE.get(answer.finish)
    return {
        "id": name,
        "object": "response",
        "created_at": now(),
        "status": "completed" if incomplete is None else "incomplete",
        "error": None,
        "incomplete_details": None if incomplete is None else {"reason": incomplete},
        "instructions": given.get("instructions"),
        "metadata": given.get("metadata") or {},
        "model": request.model,
        "output": list(_items(answer.message, request.names)),
        "parallel_tool_calls": True,
        "previous_response_id": given.get("previous_response_id"),
        "temperature": given.get("temperature"),
        "top_p": given.get("top_p"),
        "tool_choice": given.get("tool_choice") or "auto",
        "tools": given.get("tools") or [],
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion,
        },
    }


def _items(message: Message, names: Mapping[str, ToolName]) -> Iterator[dict[str, Any]]:
    if message.reasoning_content:
        summary = [{"type": "summary_text", "text": message.reasoning_content}]
        yield {"type": "reasoning", "id": new_id("rs_"), "summary": summary}
    if message.content or not message.tool_calls:
        text = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        yield {
            "type": "message",
            "id": new_id("msg_"),
            "role": "assistant",
            "status": "completed",
            "content": [text],
        }
    for call in message.tool_calls:
        yield call_item(call, names)


def response_events(whole: dict[str, Any]) -> Iterator[bytes]:
    """Server-sent events of a response."""
    numbers = itertools.count()

    def emit(kind: str, **fields: Any) -> bytes:
        return event({"type": kind, "sequence_number": next(numbers), **fields}, kind)

    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    yield emit("response.created", response=begun)
    yield emit("response.in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        position = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            [part] = item["content"]
            text, at = part["text"], {**position, "content_index": 0}
            yield emit("response.output_item.added", output_index=index, item={**item, "content": []})
            yield emit("response.content_part.added", **at, part={**part, "text": ""})
            yield emit("response.output_text.delta", **at, delta=text, logprobs=[])
            yield emit("response.output_text.done", **at, text=text, logprobs=[])
            yield emit("response.content_part.done", **at, part=part)
        elif item["type"] == "function_call":
            arguments = item["arguments"]
            yield emit("response.output_item.added", output_index=index, item={**item, "arguments": ""})
            yield emit("response.function_call_arguments.delta", **position, delta=arguments)
            yield emit("response.function_call_arguments.done", **position, name=item["name"], arguments=arguments)
        elif item["type"] == "custom_tool_call":
            yield emit("response.output_item.added", output_index=index, item={**item, "input": ""})
            yield emit("response.custom_tool_call_input.delta", **position, delta=item["input"])
            yield emit("response.custom_tool_call_input.done", **position, input=item["input"])
        else:
            yield emit("response.output_item.added", output_index=index, item=item)
        yield emit("response.output_item.done", output_index=index, item=item)
    yield emit(f"response.{whole['status']}", response=whole)
