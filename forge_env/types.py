"""Types shared by environments, policies, rollouts and trainers: messages, tools, tasks."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import SchemaSerializer, SchemaValidator

from forge_env.errors import UsageError


def _number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def clean_unicode(text: str) -> str:
    """`text` with U+FFFD in place of unpaired surrogates, which neither UTF-8 nor a tokenizer can encode."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


Whole = Annotated[str, AfterValidator(clean_unicode)]
"""A string in which unpaired surrogates, which UTF-8 can't encode, are replaced by U+FFFD. Data sets contain them if a
text was cut within an emoji, for example."""
Text = Annotated[str, BeforeValidator(_number_as_text)]
"""A string that a file may give as a number, such as a split named 2024 or the answer 42."""

Role = Literal["system", "user", "assistant", "tool"]


class SlottedModel:
    """The pydantic model methods, for slotted pydantic dataclasses.

    Such an object takes a third of a model's memory, and every episode holds hundreds of them.
    """

    __slots__ = ()
    __pydantic_validator__: ClassVar[SchemaValidator]
    __pydantic_serializer__: ClassVar[SchemaSerializer]

    @classmethod
    def model_validate(cls, data: Any) -> Self:
        """Build an object from a mapping, or return it if it is one. Raises `ValidationError` on invalid data."""
        validated: Self = cls.__pydantic_validator__.validate_python(data)
        return validated

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """Convert to a dictionary; takes the options of `pydantic.BaseModel.model_dump`."""
        data: dict[str, Any] = self.__pydantic_serializer__.to_python(self, **options)
        return data

    def model_dump_json(self, **options: Any) -> str:
        """Convert to JSON; takes the options of `pydantic.BaseModel.model_dump_json`."""
        return self.__pydantic_serializer__.to_json(self, **options).decode()

    def model_copy(self, *, update: dict[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy the object, deeply if `deep`. Fields in `update` are replaced without validation."""
        copied = copy.deepcopy(self) if deep else copy.copy(self)
        for name, value in (update or {}).items():
            setattr(copied, name, value)
        return copied


@dataclass(slots=True, kw_only=True)
class FunctionCall(SlottedModel):
    """The function that an assistant calls; `arguments` is the JSON text exactly as the model wrote it."""

    name: str
    """Name of the tool."""
    arguments: str = "{}"
    """A JSON object as text."""


@dataclass(slots=True, kw_only=True)
class ToolCall(SlottedModel):
    """One tool call of an assistant message (OpenAI chat format).

    Examples:
        >>> import forge_env as fe
        >>> call = fe.call_tool("weigh", colour="red").tool_calls[0]
        >>> call.function.arguments
        '{"colour": "red"}'
    """

    id: str
    """Id that the tool's answer refers to in `Message.tool_call_id`."""
    type: Literal["function"] = "function"
    """Always "function", the only type that OpenAI's format defines."""
    function: FunctionCall
    """The tool's name and the arguments."""


@dataclass(slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Message(SlottedModel):
    """One chat message in OpenAI's format.

    Examples:
        >>> import forge_env as fe
        >>> fe.Message(role="user", content="Hello").to_openai()
        {'role': 'user', 'content': 'Hello'}
    """

    role: Role
    """Author of the message."""
    content: str = ""
    """The text."""
    tool_calls: list[ToolCall] = Field(default_factory=list)
    """Tool calls of an assistant message."""
    tool_call_id: str | None = None
    """Id of the call that a tool message answers."""
    name: str | None = None
    """Name of the tool, in a tool message."""
    reasoning_content: str | None = None
    """The model's reasoning before its answer, if the endpoint returns it separately."""
    stop_reason: Literal["stop", "length", "content_filter"] = "stop"
    """Why an assistant message ended, as in `Reply`. Rollouts pass it to `Environment.step`; it is neither recorded nor
    sent to models."""
    images: tuple[str, ...] = ()
    """Images shown after the text to vision models: `https:` URLs, or `data:` URLs as `fe.image` makes them."""

    def to_openai(self) -> dict[str, Any]:
        """Convert to an OpenAI chat dictionary without unset fields; with images, the content is a list of parts."""
        data = self.model_dump(exclude_none=True, exclude={"images", "stop_reason"})
        if not self.tool_calls:
            data.pop("tool_calls")
        data["content"] = self.parts
        return data

    @property
    def parts(self) -> str | list[dict[str, Any]]:
        """The content in OpenAI's format: the text, or a list of parts if there are images."""
        if not self.images:
            return self.content
        text = [{"type": "text", "text": self.content}] if self.content else []
        return [*text, *({"type": "image_url", "image_url": {"url": url}} for url in self.images)]

    @classmethod
    def from_openai(cls, data: Any) -> Message:
        """Rebuild a message from the output of `to_openai`.

        Raises `ValidationError`, `TypeError` or `KeyError` if `data` is not a chat message.

        Args:
            data: a chat message as a dictionary.
        """
        if not isinstance(data.get("content"), list):
            return cls.model_validate(data)
        parts = data["content"]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        images = tuple(part["image_url"]["url"] for part in parts if part["type"] != "text")
        return cls.model_validate({**data, "content": "".join(texts), "images": images})


_IMAGES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif"}
"""First bytes of an image file -> its format."""


def image(source: str | Path | bytes) -> str:
    """Convert a PNG, JPEG, GIF or WebP image to a URL for `Message.images`.

    Args:
        source: path of the file, or its content.

    Returns:
        A `data:` URL.

    Raises:
        UsageError: the content is in none of these formats, or the file can't be read.

    Examples:
        >>> import forge_env as fe
        >>> fe.image(b"GIF89a")
        'data:image/gif;base64,R0lGODlh'
    """
    if isinstance(source, bytes):
        data, name = source, "these bytes are"
    else:
        name = f"{source} is"
        try:
            data = Path(source).read_bytes()
        except OSError as error:
            raise UsageError(f"can't read the image {source}: {error.strerror}") from error
    kind = next((kind for start, kind in _IMAGES.items() if data.startswith(start)), None)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        kind = "webp"
    if kind is None:
        raise UsageError(f"{name} not an image", fix="give a PNG, JPEG, GIF or WebP")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


Observation: TypeAlias = list[Message]
"""Input of the agent's next action: only the messages that are new since its last one."""


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Branch(SlottedModel):
    """How a conversation starts if it continues from another one: `info["branch"]`, beside its `info["seat"]`.

    The observation holds all of its messages. A policy that supports it continues from the other conversation's tokens
    and reads only the messages that are new.
    """

    why: str
    """Why this is a new conversation rather than a continuation of the other one; for the record."""
    seat: str = ""
    """Seat of the other conversation."""
    turns: int = 0
    """Number of answers of the other conversation that this one starts with; 0 if none is unchanged."""
    messages: int = 0
    """Number of messages of the observation up to the end of these answers."""


Action: TypeAlias = Message | str
"""One assistant message, with or without tool calls; a plain string is an assistant message's content."""

ResetResult: TypeAlias = tuple[Observation, dict[str, Any]]
"""`(observation, info)`."""

StepResult: TypeAlias = tuple[Observation, float, bool, bool, dict[str, Any]]
"""`(observation, reward, terminated, truncated, info)`, as in gymnasium."""


def as_message(action: Action) -> Message:
    """Convert an action to an assistant message. Raises `UsageError` if that is impossible."""
    if isinstance(action, str):
        return Message(role="assistant", content=action)
    if not isinstance(action, Message):
        fix = "fe.Message.from_openai(...) makes one" if isinstance(action, dict) else None
        raise UsageError(f"an action is a text or a Message, not {type(action).__name__}", fix=fix)
    if action.role != "assistant":
        raise UsageError(f"an action is an assistant message, not {action.role!r}")
    return action


def call_tool(name: str, /, **arguments: Any) -> Message:
    """Build an assistant message that calls one tool, for gold actions, scripts and tests.

    Args:
        name: name of the tool.
        arguments: arguments of the call, JSON-ready.

    Examples:
        >>> import forge_env as fe
        >>> fe.call_tool("add", a=1, b=2).tool_calls[0].function.arguments
        '{"a": 1, "b": 2}'
    """
    function = FunctionCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False))
    return Message(role="assistant", tool_calls=[ToolCall(id="call-0", function=function)])


class ToolSpec(BaseModel):
    """A tool as the model sees it: its name, its description and the JSON schema of its arguments.

    Examples:
        >>> import forge_env as fe
        >>> fe.ToolSpec(name="roll", description="Roll a die.").to_openai()["function"]["name"]
        'roll'
    """

    name: str
    """Name of the tool."""
    description: str = ""
    """Description for the model."""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of the arguments; its type is an object."""

    def to_openai(self) -> dict[str, Any]:
        """The tool as an entry of OpenAI's `tools` list."""
        return {"type": "function", "function": self.model_dump()}


_FIELDS_ELSEWHERE = {
    "input": "prompt=",
    "question": "prompt=",
    "messages": "history= and prompt=",
    "target": 'data={"answer": ...}',
    "answer": 'data={"answer": ...}',
    "info": "data=",
    "metadata": "data=",
}
"""Names of a task's fields in other frameworks, and what they are here."""


class Task(BaseModel):
    """One problem: the prompt for the agent, the data to score it against, and the split that it belongs to.

    `data` is hidden from the agent: environments must never copy it into an observation or a sandbox
    that runs agent code. `gold` is an answer that scores full marks, used by validation only.

    Examples:
        >>> import forge_env as fe
        >>> task = fe.Task(id="eval-3", prompt="What is 6 * 7?", data={"answer": 42}, gold="42", split="eval")
        >>> task.difficulty
        1
    """

    model_config = ConfigDict(extra="forbid")

    id: Whole
    """Id, unique within the environment; records and comparisons identify tasks by it."""
    prompt: Whole
    """Text shown to the agent."""
    data: dict[str, Any] = Field(default_factory=dict)
    """Data the environment needs to play and score the task; never shown to the agent."""
    gold: Whole | None = None
    """An answer that scores full marks; None if none is known."""
    history: list[Message] = Field(default_factory=list)
    """Messages shown to the agent before the prompt: a system message, earlier turns."""
    difficulty: int = 1
    """Level, for curricula and for scores by level."""
    tags: list[Whole] = Field(default_factory=list)
    """Labels by which scores are broken down."""
    split: Whole = "train"
    """Name of the set that the task belongs to."""

    @model_validator(mode="before")
    @classmethod
    def _names_elsewhere(cls, values: Any) -> Any:
        for name, ours in _FIELDS_ELSEWHERE.items():
            if isinstance(values, dict) and name in values and name not in cls.model_fields:
                raise ValueError(f"a task has no `{name}`: write {ours}")
        return values
