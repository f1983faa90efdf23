"""Requests of programs to the model, their answers and their errors, independent of the API in use."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from forge_env.http.limits import RefusedRequestError
from forge_env.policy import estimated_tokens, words_of
from forge_env.tools.json_text import (
    HALF,
    MAX_DEPTH,
    BadJSONError,
    arguments_text,
    is_deep,
    without_halves,
)
from forge_env.tools.json_text import read_json as parse_json
from forge_env.tools.mcp import safe_names
from forge_env.tools.schema import LONGEST_NAME, UNSAFE
from forge_env.types import Message, Role, ToolSpec

if TYPE_CHECKING:
    from forge_env.gateway.response_tools import Declaration

IMAGE_TOKENS = 1_000
AROUND_A_MESSAGE = 4
"""Estimated tokens that a chat format adds around a message."""
MOST_MESSAGES = 10_000
"""Maximum messages of a request, earlier responses included; also maximum parts, items or tool calls of a message."""
MOST_TOOLS = 1_000
MOST_STOPS = 64
Finish = Literal["stop", "length", "tool_calls", "content_filter"]
T = TypeVar("T", bound="Wire")
T_Value = TypeVar("T_Value")


class ToolName(NamedTuple):
    """What a program calls a tool.

    Attributes:
        namespace: the tool's namespace, or an empty string.
        custom: whether it takes a text, not JSON.
    """

    namespace: str
    name: str
    custom: bool = False


@dataclass(slots=True)
class ModelRequest:
    """One request of a program to the model.

    Attributes:
        messages: the whole conversation, as sent by the program.
        stop: texts at which the answer is cut.
        max_tokens: maximum tokens of the answer; None: no limit.
        count: number of answers requested.
        model: the program's name for the model; it is returned in the response and selects nothing.
        usage: whether the program wants the numbers of tokens.
        names: what the program calls tools that the model knows by another name or kind.
        added: tools that items of the conversation added; later requests that continue it have them too.
        left_out: known types of offered tools that run on the provider's servers, which the model doesn't get; `other`
            for an unknown type.
    """

    messages: list[Message]
    tools: list[ToolSpec] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)
    max_tokens: int | None = None
    count: int = 1
    model: str = ""
    stream: bool = False
    usage: bool = True
    names: Mapping[str, ToolName] = field(default_factory=dict)
    added: list[Declaration] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        """Estimated tokens of the prompt."""
        tools = sum(estimated_tokens(tool.model_dump_json()) for tool in self.tools)
        return tools + sum(message_tokens(message) for message in self.messages)

    @property
    def images(self) -> int:
        """Number of images."""
        return sum(len(message.images) for message in self.messages)

    def in_safe_names(self, known: dict[str, str]) -> dict[str, str]:
        """Rename the tools whose names some endpoints refuse; return the new names of these and of `known` ones."""
        given = {tool.name for tool in self.tools}
        refused = [name for name in given if UNSAFE.search(name) or len(name) > LONGEST_NAME]
        names = safe_names(sorted(refused), before=known, others=given)
        if names:
            self.tools = [
                tool.model_copy(update={"name": names[tool.name]}) if tool.name in names else tool
                for tool in self.tools
            ]
            self.messages = [with_names(message, names) for message in self.messages]
        return names


@dataclass(slots=True)
class Answer:
    """An answer of the model.

    Attributes:
        stopped_at: the text in the request's `stop` at which it was cut, or None.
    """

    message: Message
    finish: Finish = "stop"
    stopped_at: str | None = None

    @classmethod
    def of(cls, message: Message, stop: Sequence[str] = ()) -> Answer:
        """Make the answer that is sent to the program, cut before the first occurrence of a stop text."""
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
        """Estimated tokens of the answer."""
        return message_tokens(self.message)


def with_names(message: Message, names: Mapping[str, str]) -> Message:
    """The message with its calls' tools renamed."""
    if not any(call.function.name in names for call in message.tool_calls):
        return message
    renamed = [names.get(call.function.name, call.function.name) for call in message.tool_calls]
    calls = [
        replace(call, function=replace(call.function, name=name))
        for call, name in zip(message.tool_calls, renamed, strict=True)
    ]
    return replace(message, tool_calls=calls)


def message_tokens(message: Message) -> int:
    """Estimated tokens of a message, including the chat format's around it."""
    return AROUND_A_MESSAGE + IMAGE_TOKENS * len(message.images) + estimated_tokens(words_of(message))


class Wire(BaseModel):
    """Base model for parts of request bodies; unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")


def read_json(body: bytes) -> Any:
    """Parse a body as JSON, without lone surrogates, which no tokenizer accepts."""
    try:
        text = body.decode("utf-8", "replace")
        value = json.loads(text)
        return without_halves(value) if HALF.search(text) else value
    except (ValueError, RecursionError) as error:
        raise RefusedRequestError(f"the body is not JSON: {error}") from error


def read(kind: type[T], data: object) -> T:
    """Validate a request body as this model. `RefusedRequestError`: it is invalid; the message names the field."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        # Lists stop at their first invalid item (`fail_fast`), so there are few errors. For a union, report the
        # alternative that matched furthest.
        deepest = max(error.errors(include_url=False), key=lambda each: len(_fields(each["loc"])))
        where = ".".join(_fields(deepest["loc"])) or "the request"
        raise RefusedRequestError(f"{where}: {deepest['msg']}") from error


def _fields(location: Sequence[str | int]) -> list[str]:
    """A location without pydantic's names for the alternatives of a union."""
    return [str(part) for part in location if isinstance(part, int) or (part.isidentifier() and part != "str")]


def shallow(value: T_Value, what: str) -> T_Value:
    """Return a JSON value unchanged. `RefusedRequestError`: it is nested too deeply."""
    if is_deep(value):
        raise RefusedRequestError(f"{what} are nested more than {MAX_DEPTH} levels deep")
    return value


def tool_of(name: str, description: str | None, parameters: dict[str, Any] | None) -> ToolSpec:
    """Make a `ToolSpec` for a program's tool. `RefusedRequestError`: it has no name, or too deep parameters."""
    if not name:
        raise RefusedRequestError("a tool of the request has no name: give each tool a name")
    shallow(parameters, f"the parameters of the tool {name[:64]!r}")
    return ToolSpec(
        name=name, description=description or "", parameters=parameters or {"type": "object", "properties": {}}
    )


def without_repeats(tools: Iterable[ToolSpec]) -> list[ToolSpec]:
    """The tools, each once. `RefusedRequestError`: two different ones have the same name."""
    known: dict[str, ToolSpec] = {}
    for tool in tools:
        if known.setdefault(tool.name, tool) != tool:
            raise RefusedRequestError(f"two tools of the request are named {tool.name[:64]!r}: rename one of them")
    return list(known.values())


def known_type(kind: str, known: Iterable[str]) -> str:
    """The longest of these known types with which a tool's type begins, or `other`; it names a metric."""
    return max((each for each in known if kind.startswith(each)), key=len, default="other")


def text_of(content: str | Sequence[Part] | None, what: str) -> str:
    """Text of a message's content. `RefusedRequestError`: the content has parts other than text and images."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.text is None and part.image is None:
            raise RefusedRequestError(
                f"{what} has a part of the type {part.type!r}: this model reads text and images only",
                code="unsupported_content",
            )
    return "\n".join(part.text for part in content if part.text)


class _URL(Wire):
    url: str


class ImageSource(Wire):
    """Source of an image: its address, or its data in base64."""

    url: str = ""
    media_type: str = ""
    data: str = ""


class Part(Wire):
    """Part of a message's content."""

    type: str = "text"
    text: str | None = Field(None, validation_alias=AliasChoices("text", "refusal"))
    image_url: str | _URL | None = None
    source: ImageSource | None = None
    model_config = ConfigDict(populate_by_name=True)

    @property
    def image(self) -> str | None:
        """URL of the image that this part is, or None. `RefusedRequestError`: it is neither `https:` nor `data:`."""
        url: str | None = None
        if self.type in ("image_url", "input_image"):
            url = self.image_url.url if isinstance(self.image_url, _URL) else self.image_url
        elif self.type == "image" and self.source is not None:
            url = self.source.url or f"data:{self.source.media_type};base64,{self.source.data}"
        if url is not None and not url.startswith(("https://", "http://", "data:image/")):
            raise RefusedRequestError(
                f"the image {url[:64]!r} is neither an https: nor a data:image/ URL", code="unsupported_content"
            )
        return url


Arguments = Annotated[str, BeforeValidator(lambda value: arguments_text(shallow(value, "the arguments of a call")))]
"""Arguments of a call, sent as a JSON object or as its text."""
Content = str | Annotated[list[Part], Field(max_length=MOST_MESSAGES, fail_fast=True)] | None
"""Content of a message: text, parts or nothing."""


def said(role: Role, content: str | Sequence[Part] | None, **more: Any) -> Message:
    """Make a message from a program's request."""
    parts = [] if content is None or isinstance(content, str) else content
    images = tuple(image for part in parts if (image := part.image))
    return Message(role=role, content=text_of(content, f"a message of the {role}"), images=images, **more)


def arguments_object(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object; other text is wrapped, for the program to reject."""
    text = arguments_text(arguments)
    try:
        value = parse_json(text)
    except BadJSONError:
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def new_id(prefix: str) -> str:
    """Make a unique id with this prefix."""
    return f"{prefix}{uuid.uuid4().hex[:24]}"


def now() -> int:
    """Current time in whole seconds since the epoch."""
    return int(time.time())


def event(data: object, name: str = "") -> bytes:
    """Encode one server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {compact(data)}\n\n".encode()


def compact(data: object) -> str:
    """Encode a value as JSON without spaces."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False)


def merged(messages: Iterable[Message]) -> list[Message]:
    """Merge successive assistant messages into one: APIs based on items send a turn's text and calls separately."""
    result: list[Message] = []
    for is_turn, group in itertools.groupby(messages, key=lambda message: message.role == "assistant"):
        items = [*group]
        if is_turn and len(items) > 1:
            items = [
                Message(
                    role="assistant",
                    content="".join(item.content for item in items),
                    tool_calls=[call for item in items for call in item.tool_calls],
                    reasoning_content="".join(item.reasoning_content or "" for item in items) or None,
                )
            ]
        result += items
    return result
