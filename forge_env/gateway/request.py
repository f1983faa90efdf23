"""What a program asks of the model, whichever API it speaks: one request, its answer, and why it was refused."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forge_env.policy import estimated_tokens, words_of
from forge_env.tools.schema import clean_unicode
from forge_env.types import FunctionCall, Message, Role, ToolCall, ToolSpec

AROUND_A_MESSAGE = 4
"""Tokens with which a chat format surrounds one."""
MOST_MESSAGES = 10_000
"""Of one request; also of the parts, items and tool calls of a message."""
MOST_TOOLS = 1_000
MOST_STRINGS = 100_000
"""Keys and texts in the JSON of a request, without those that are said in a text: each costs time to read."""
MOST_STOPS = 64
MOST_NESTED = 64
"""Levels of a JSON value in a request: tools' parameters and calls' arguments are gone through by recursion later."""
HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""How JSON spells half of a surrogate pair, or what might be one."""
Finish = Literal["stop", "length", "tool_calls", "content_filter"]
T = TypeVar("T", bound="Wire")
T_Value = TypeVar("T_Value")


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
        stopped_at: the text of the request's `stop` that ended it, if one did.
    """

    message: Message
    finish: Finish = "stop"
    stopped_at: str | None = None

    @classmethod
    def of(cls, message: Message, stop: Sequence[str] = ()) -> Answer:
        """The answer as the program gets it: cut before the first of the texts that end it."""
        ends = [(end, text) for text in stop if text and (end := message.content.find(text)) >= 0]
        if ends:
            end, text = min(ends)
            cut = {"content": message.content[:end], "tool_calls": [], "stop_reason": "stop"}
            return cls(message.model_copy(update=cut), stopped_at=text)
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


def read_json(body: bytes | bytearray) -> Any:
    """What a body says, without halves of surrogate pairs, which no tokenizer takes.

    Raises:
        RefusedRequestError: it isn't JSON, or takes too long to read.
    """
    text = body.decode("utf-8", "replace")
    if text.count('"') - text.count('\\"') > 2 * MOST_STRINGS:
        raise RefusedRequestError(f"the body has more than {MOST_STRINGS:,} strings")
    try:
        found = json.loads(text)
        return _whole(found) if HALF.search(text) else found
    except (ValueError, RecursionError) as error:
        raise RefusedRequestError(f"the body is not JSON: {error}") from error


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return clean_unicode(value)
    if isinstance(value, dict):
        return {clean_unicode(key): _whole(item) for key, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list) else value


def read(kind: type[T], data: object) -> T:
    """A request of this kind. `RefusedRequestError`: it is none; says where."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the request"
        raise RefusedRequestError(f"{where}: {first['msg']}") from error


def shallow(value: T_Value, what: str) -> T_Value:
    """A JSON value that is not nested too deeply. `RefusedRequestError`: it is."""
    level: list[Any] = [value]
    for _ in range(MOST_NESTED):
        inside = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [each for values in inside for each in values]
        if not level:
            return value
    raise RefusedRequestError(f"{what} are nested more than {MOST_NESTED} levels deep")


def shallow_tool(tool: ToolSpec) -> ToolSpec:
    """A tool whose parameters are not nested too deeply. `RefusedRequestError`: they are."""
    shallow(tool.parameters, f"the parameters of the tool {tool.name[:64]!r}")
    return tool


def text_of(content: str | Sequence[Part] | None, what: str) -> str:
    """The text of a message's content. `RefusedRequestError`: there is more in it than text."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.text is None:
            raise RefusedRequestError(
                f"{what} has a part of the type {part.type!r}: this model reads text only", code="unsupported_content"
            )
    return "".join(part.text or "" for part in content)


class Part(Wire):
    """Part of a content."""

    type: str = "text"
    text: str | None = None


Content = str | Annotated[list[Part], Field(max_length=MOST_MESSAGES)] | None
"""Of a message."""


def said(role: Role, content: str | Sequence[Part] | None, **more: Any) -> Message:
    """A message of a program."""
    return Message(role=role, content=text_of(content, f"a message of the {role}"), **more)


def call_of(call_id: str, name: str, arguments: str) -> ToolCall:
    """A call as a program repeats it."""
    return ToolCall(id=call_id, function=FunctionCall(name=name, arguments=arguments))


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
