"""OpenAI's chat completions API: parse requests, and build responses and events."""

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
    Wire,
    event,
    new_id,
    now,
    read,
    said,
    tool_of,
    without_repeats,
)
from forge_env.http.limits import RefusedRequestError
from forge_env.tools.turns import call_of
from forge_env.types import Message

MOST_ANSWERS = 64


class _Function(Wire):
    name: str
    arguments: Arguments = "{}"


class _Call(Wire):
    id: str
    type: Literal["function"] = "function"
    function: _Function


class _Message(Wire):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    tool_calls: list[_Call] | None = Field(None, max_length=MOST_MESSAGES, fail_fast=True)
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    function_call: Any = None

    def message(self) -> Message:
        if self.function_call:
            raise RefusedRequestError("`function_call` is deprecated: send `tool_calls`")
        thoughts = self.reasoning_content or (self.reasoning if isinstance(self.reasoning, str) else None)
        calls = [call_of(call.function.name, call.function.arguments, call.id) for call in self.tool_calls or ()]
        more = {"tool_calls": calls, "tool_call_id": self.tool_call_id, "name": self.name}
        return said(
            "system" if self.role == "developer" else self.role,
            self.content,
            reasoning_content=thoughts,
            **more,
        )


class _Declaration(Wire):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(Wire):
    type: Literal["function"] = "function"
    function: _Declaration


class _StreamOptions(Wire):
    include_usage: bool = False


class ChatRequest(Wire):
    """Body of a chat completions request."""

    messages: list[_Message] = Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    model: str = ""
    tools: list[_Tool] | None = Field(None, max_length=MOST_TOOLS, fail_fast=True)
    tool_choice: Any = None
    functions: Any = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=MOST_ANSWERS)
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    modalities: list[Literal["text"]] | None = Field(None, max_length=1, fail_fast=True)


def read_chat(data: object) -> ModelRequest:
    """Parse a request body. `RefusedRequestError`: it is invalid or not supported."""
    body = read(ChatRequest, data)
    if body.functions:
        raise RefusedRequestError("`functions` is deprecated: send `tools`")
    offered = [] if body.tool_choice == "none" else body.tools or []
    return ModelRequest(
        messages=[message.message() for message in body.messages],
        tools=without_repeats(tool_of(**dict(tool.function)) for tool in offered),
        stop=[body.stop] if isinstance(body.stop, str) else body.stop or [],
        max_tokens=body.max_completion_tokens or body.max_tokens,
        count=body.n or 1,
        model=body.model,
        stream=bool(body.stream),
        usage=not body.stream or (body.stream_options is not None and body.stream_options.include_usage),
    )


def chat_completion(request: ModelRequest, answers: Sequence[Answer]) -> dict[str, Any]:
    """Response to a chat completions request."""
    choices = [
        {"index": index, "message": _said(answer.message), "finish_reason": answer.finish, "logprobs": None}
        for index, answer in enumerate(answers)
    ]
    usage = None
    if request.usage:
        prompt, completion = request.prompt_tokens, sum(answer.tokens for answer in answers)
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {
        "id": new_id("chatcmpl-"),
        "object": "chat.completion",
        "created": now(),
        "model": request.model,
        "choices": choices,
        "usage": usage,
    }


def chat_events(whole: dict[str, Any]) -> Iterator[bytes]:
    """Server-sent events of a response."""
    head = {**whole, "object": "chat.completion.chunk"}
    choices, usage = head.pop("choices"), head.pop("usage")
    for choice in choices:
        delta = choice["message"]
        for number, call in enumerate(delta.get("tool_calls", [])):
            call["index"] = number
        for part, finish in ((delta, None), ({}, choice["finish_reason"])):
            yield event({**head, "choices": [{"index": choice["index"], "delta": part, "finish_reason": finish}]})
    if usage is not None:
        yield event({**head, "choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def _said(message: Message) -> dict[str, Any]:
    data: dict[str, Any] = {"role": "assistant", "content": message.content or None, "refusal": None}
    if message.tool_calls:
        data["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    else:
        data["content"] = message.content
    if message.reasoning_content:
        data["reasoning_content"] = message.reasoning_content
    return data


def openai_error(error: RefusedRequestError) -> dict[str, Any]:
    """Body of an error response in OpenAI's format."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": None, "code": error.code}}
