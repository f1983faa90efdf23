"""What a program asks of the model, whichever API it speaks: one request, its answer, and why it was refused."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from forge_env.policy import estimated_tokens, words_of
from forge_env.tools.schema import clean_unicode
from forge_env.types import FunctionCall, Message, Role, ToolCall, ToolSpec

AROUND_A_MESSAGE = 4
"""Tokens with which a chat format surrounds one."""
Finish = Literal["stop", "length", "tool_calls", "content_filter"]
T = TypeVar("T", bound="Wire")


class RefusedRequestError(Exception):
    """A request that gets no answer. The program reads why, in the form of the API that it speaks.

    Attributes:
        status: of HTTP. Clients try again by themselves after 408, 409, 429 and 5xx, and after no other.
        code: of the kind of error, for programs.
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.message, self.status, self.code = message, status, code


@dataclass(slots=True)
class ModelRequest:
    """One request of a program to the model.

    Attributes:
        messages: the whole conversation, as the program tells it.
        tools: that the model may call.
        stop: texts at which the answer is cut.
        max_tokens: of the answer; None: as many as there may be.
        count: how many answers are asked for.
        model: the name that the program calls the model by; it is repeated to it, and chooses nothing.
        stream: the program wants to read events.
    """

    messages: list[Message]
    tools: list[ToolSpec] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)
    max_tokens: int | None = None
    count: int = 1
    model: str = ""
    stream: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Estimated."""
        tools = sum(estimated_tokens(tool.model_dump_json()) for tool in self.tools)
        return tools + sum(message_tokens(message) for message in self.messages)


@dataclass(slots=True)
class Answer:
    """What the model answers.

    Attributes:
        message: of the assistant.
        finish: why it ended.
    """

    message: Message
    finish: Finish = "stop"

    @classmethod
    def of(cls, message: Message, stop: Sequence[str] = ()) -> Answer:
        """The answer as the program gets it: cut before the first of the texts that end it."""
        ends = [end for text in stop if text and (end := message.content.find(text)) >= 0]
        if ends:
            cut = {"content": message.content[: min(ends)], "tool_calls": [], "stop_reason": "stop"}
            return cls(message.model_copy(update=cut))
        if message.stop_reason != "stop":
            return cls(message, message.stop_reason)
        return cls(message, "tool_calls" if message.tool_calls else "stop")

    @property
    def tokens(self) -> int:
        """Estimated."""
        return message_tokens(self.message)


def message_tokens(message: Message) -> int:
    """About how many tokens a message has, what surrounds it included."""
    return AROUND_A_MESSAGE + estimated_tokens(words_of(message))


class Wire(BaseModel):
    """Part of a request as it is sent; what is not named here is left out."""

    model_config = ConfigDict(extra="ignore")


def read(kind: type[T], data: object) -> T:
    """A request of this kind. `RefusedRequestError`: it is none; says where."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the request"
        raise RefusedRequestError(f"{where}: {first['msg']}") from error


def text_of(content: str | Sequence[Part] | None, what: str) -> str:
    """The text of a message's content. `RefusedRequestError`: there is more in it than text."""
    if content is None or isinstance(content, str):
        return clean_unicode(content or "")
    for part in content:
        if part.text is None:
            raise RefusedRequestError(
                f"{what} has a part of the type {part.type!r}: this model reads text only", code="unsupported_content"
            )
    return clean_unicode("".join(part.text or "" for part in content))


class Part(Wire):
    """Part of a content."""

    type: str = "text"
    text: str | None = None


def said(role: Role, content: str | Sequence[Part] | None, **more: Any) -> Message:
    """A message of a program."""
    return Message(role=role, content=text_of(content, f"a message of the {role}"), **more)


def call_of(call_id: str, name: str, arguments: str) -> ToolCall:
    """A call as a program repeats it."""
    return ToolCall(id=call_id, function=FunctionCall(name=clean_unicode(name), arguments=clean_unicode(arguments)))


def new_id(prefix: str) -> str:
    """A name that no other answer has."""
    return f"{prefix}{uuid.uuid4().hex[:24]}"


def now() -> int:
    """Seconds since the epoch, as answers tell them."""
    return int(time.time())


def event(data: object, name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {compact(data)}\n\n".encode()


def compact(data: object) -> str:
    """JSON without spaces."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False)


def merged(messages: Iterable[Message]) -> list[Message]:
    """Messages in which what one assistant turn says is one: APIs that send items send its text and calls apart."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else None
        if last is not None and last.role == message.role == "assistant":
            last.content += message.content
            last.tool_calls = [*last.tool_calls, *message.tool_calls]
            last.reasoning_content = (last.reasoning_content or "") + (message.reasoning_content or "") or None
        else:
            found.append(message)
    return found
