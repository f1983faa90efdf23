"""What a program asks of the model, whichever API it speaks: one request, its answer, and why it was refused."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from forge_env.policy import estimated_tokens, words_of
from forge_env.serve.limits import RefusedRequestError
from forge_env.tools.json_text import (
    HALF,
    MAX_DEPTH,
    BadJSONError,
    arguments_text,
    is_deep,
    without_halves,
)
from forge_env.tools.json_text import read_json as parse_json
from forge_env.types import Message, Role, ToolSpec

AROUND_A_MESSAGE = 4
"""Tokens with which a chat format surrounds one."""
MOST_MESSAGES = 10_000
"""Of one request; also of the parts, items and tool calls of a message."""
MOST_TOOLS = 1_000
MOST_STOPS = 64
Finish = Literal["stop", "length", "tool_calls", "content_filter"]
T = TypeVar("T", bound="Wire")
T_Value = TypeVar("T_Value")


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


def read_json(body: bytes) -> Any:
    """The value of a body, without halves of surrogate pairs, which no tokenizer takes.

    Raises:
        RefusedRequestError: it isn't JSON.
    """
    try:
        text = body.decode("utf-8", "replace")
        value = json.loads(text)
        return without_halves(value) if HALF.search(text) else value
    except (ValueError, RecursionError) as error:
        raise RefusedRequestError(f"the body is not JSON: {error}") from error


def read(kind: type[T], data: object) -> T:
    """A request of this kind. `RefusedRequestError`: it is none; says where."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        # of a union, report the alternative that matched furthest
        deepest = max(error.errors(include_url=False), key=lambda each: len(_fields(each["loc"])))
        where = ".".join(_fields(deepest["loc"])) or "the request"
        raise RefusedRequestError(f"{where}: {deepest['msg']}") from error


def _fields(location: Sequence[str | int]) -> list[str]:
    """A location without pydantic's names for the alternatives of a union."""
    return [str(part) for part in location if isinstance(part, int) or (part.isidentifier() and part != "str")]


def shallow(value: T_Value, what: str) -> T_Value:
    """A JSON value that is not nested too deeply. `RefusedRequestError`: it is."""
    if is_deep(value):
        raise RefusedRequestError(f"{what} are nested more than {MAX_DEPTH} levels deep")
    return value


def tool_of(name: str, description: str | None, parameters: dict[str, Any] | None) -> ToolSpec:
    """A tool that a program offers. `RefusedRequestError`: its parameters are nested too deeply."""
    shallow(parameters, f"the parameters of the tool {name[:64]!r}")
    return ToolSpec(
        name=name, description=description or "", parameters=parameters or {"type": "object", "properties": {}}
    )


def text_of(content: str | Sequence[Part] | None, what: str) -> str:
    """The text of a message's content. `RefusedRequestError`: there is more in it than text."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.text is None:
            raise RefusedRequestError(
                f"{what} has a part of the type {part.type!r}: this model reads text only", code="unsupported_content"
            )
    return "\n".join(part.text for part in content if part.text)


class Part(Wire):
    """Part of a content."""

    type: str = "text"
    text: str | None = None


Arguments = Annotated[str, BeforeValidator(lambda value: arguments_text(shallow(value, "the arguments of a call")))]
"""Arguments of a call: a JSON object, or its text."""
Content = str | Annotated[list[Part], Field(max_length=MOST_MESSAGES)] | None
"""Of a message."""


def said(role: Role, content: str | Sequence[Part] | None, **more: Any) -> Message:
    """A message of a program."""
    return Message(role=role, content=text_of(content, f"a message of the {role}"), **more)


def arguments_object(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object; other text is wrapped, for the program to reject."""
    text = arguments_text(arguments)
    try:
        value = parse_json(text)
    except BadJSONError:
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


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
