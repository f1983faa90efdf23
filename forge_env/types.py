"""The vocabulary shared by environments, policies, rollouts and trainers: messages, tools, tasks."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass
from pydantic_core import SchemaSerializer, SchemaValidator

from forge_env.errors import UsageError


def _number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def clean_unicode(text: str) -> str:
    """`text` with U+FFFD in place of unpaired surrogates, which neither UTF-8 nor a tokenizer can encode."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


Whole = Annotated[str, AfterValidator(clean_unicode)]
"""A text with U+FFFD in place of unpaired surrogates, which UTF-8 can't encode. Data sets have them if a text was
truncated within an emoji, for example."""
Text = Annotated[str, BeforeValidator(_number_as_text)]
"""A text that a file may hold as a number: a split called 2024, an answer 42."""

Role = Literal["system", "user", "assistant", "tool"]


class SlottedModel:
    """The methods of a pydantic model for its dataclasses: a third of the size, and every episode holds hundreds."""

    __slots__ = ()
    __pydantic_validator__: ClassVar[SchemaValidator]
    __pydantic_serializer__: ClassVar[SchemaSerializer]

    @classmethod
    def model_validate(cls, data: Any) -> Self:
        """An object of this class made of a mapping, or itself. `ValidationError`: it doesn't fit."""
        found: Self = cls.__pydantic_validator__.validate_python(data)
        return found

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """A dictionary; options as `pydantic.BaseModel.model_dump`."""
        data: dict[str, Any] = self.__pydantic_serializer__.to_python(self, **options)
        return data

    def model_dump_json(self, **options: Any) -> str:
        """JSON; options as `pydantic.BaseModel.model_dump_json`."""
        return self.__pydantic_serializer__.to_json(self, **options).decode()

    def model_copy(self, *, update: dict[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy, `deep` or not, with some fields replaced, which are not validated."""
        copied = copy.deepcopy(self) if deep else copy.copy(self)
        for name, value in (update or {}).items():
            setattr(copied, name, value)
        return copied


@dataclass(slots=True, kw_only=True)
class FunctionCall(SlottedModel):
    """The function an assistant asks for; `arguments` is JSON text exactly as the model wrote it."""

    name: str
    """Of the tool."""
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
    """The tool's answer names it (`Message.tool_call_id`)."""
    type: Literal["function"] = "function"
    """OpenAI knows no other."""
    function: FunctionCall
    """What is called, with what."""


@dataclass(slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Message(SlottedModel):
    """One chat message in OpenAI's format.

    Examples:
        >>> import forge_env as fe
        >>> fe.Message(role="user", content="Hello").to_openai()
        {'role': 'user', 'content': 'Hello'}
    """

    role: Role
    """Who says it."""
    content: str = ""
    """The text."""
    tool_calls: list[ToolCall] = Field(default_factory=list)
    """What an assistant calls."""
    tool_call_id: str | None = None
    """Of a tool's answer: which call it answers."""
    name: str | None = None
    """Of a tool's answer: the tool's."""
    reasoning_content: str | None = None
    """What the model thought before its answer, where that is told apart."""
    stop_reason: Literal["stop", "length", "content_filter"] = "stop"
    """Why an assistant's message ended, as `Reply` knows it. Rollouts tell `Environment.step`; records and models are
    not told."""
    images: tuple[str, ...] = ()
    """Shown after the text to models that see: `data:` addresses (`fe.image` makes them of files), or `https:` ones."""

    def to_openai(self) -> dict[str, Any]:
        """The message as an OpenAI chat dictionary, unset fields left out; with images, its content is in parts."""
        data = self.model_dump(exclude_none=True, exclude={"images", "stop_reason"})
        if not self.tool_calls:
            data.pop("tool_calls")
        data["content"] = self.parts
        return data

    @property
    def parts(self) -> str | list[dict[str, Any]]:
        """The content as OpenAI has it: the text, or a list of parts where there are images."""
        if not self.images:
            return self.content
        text = [{"type": "text", "text": self.content}] if self.content else []
        return [*text, *({"type": "image_url", "image_url": {"url": url}} for url in self.images)]

    @classmethod
    def from_openai(cls, data: Any) -> Message:
        """What `to_openai` gave. `ValidationError`, `TypeError` or `KeyError`: it is something else.

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
"""How a file begins -> its kind."""


def image(source: str | Path | bytes) -> str:
    """A picture for `Message.images`: PNG, JPEG, GIF or WebP, from a file or its bytes.

    Args:
        source: a file's path, or what is in it.

    Returns:
        A `data:` address.

    Raises:
        UsageError: it is none of these, or there is no such file.

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
"""What an agent sees next: only the messages that are new since its last action."""


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Branch(SlottedModel):
    """How a conversation begins that doesn't begin from nothing: `info["branch"]`, beside its `info["seat"]`.

    The observation holds all of its messages. A policy that can goes on from the other conversation's own tokens, and
    reads only what is new.
    """

    why: str
    """It is not the other conversation that goes on; for the record."""
    seat: str = ""
    """The other conversation."""
    turns: int = 0
    """Of the other, how many answers this one begins with; 0: none is as it was."""
    messages: int = 0
    """Messages of the observation to the end of these answers."""


Action: TypeAlias = Message | str
"""One assistant message, with or without tool calls; a plain string is an assistant message's content."""

ResetResult: TypeAlias = tuple[Observation, dict[str, Any]]
"""`(observation, info)`."""

StepResult: TypeAlias = tuple[Observation, float, bool, bool, dict[str, Any]]
"""`(observation, reward, terminated, truncated, info)`, as in gymnasium."""


def as_message(action: Action) -> Message:
    """The assistant message that `action` stands for. `UsageError`: it stands for none."""
    if isinstance(action, str):
        return Message(role="assistant", content=action)
    if not isinstance(action, Message):
        raise UsageError(f"an action is a text or a Message, not {type(action).__name__}")
    if action.role != "assistant":
        raise UsageError(f"an action is an assistant message, not {action.role!r}")
    return action


def call_tool(name: str, /, **arguments: Any) -> Message:
    """The assistant message that calls one tool, for gold actions, scripts and tests.

    Args:
        name: of the tool.
        arguments: of the call, JSON-ready.

    Examples:
        >>> import forge_env as fe
        >>> fe.call_tool("add", a=1, b=2).tool_calls[0].function.arguments
        '{"a": 1, "b": 2}'
    """
    function = FunctionCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False))
    return Message(role="assistant", tool_calls=[ToolCall(id="call-0", function=function)])


class ToolSpec(BaseModel):
    """A tool as the model sees it: name, what it does, JSON schema of its arguments.

    Examples:
        >>> import forge_env as fe
        >>> fe.ToolSpec(name="roll", description="Roll a die.").to_openai()["function"]["name"]
        'roll'
    """

    name: str
    """Of the tool."""
    description: str = ""
    """What it does, for the model."""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of its arguments, an object."""

    def to_openai(self) -> dict[str, Any]:
        """The tool as an entry of OpenAI's `tools` list."""
        return {"type": "function", "function": self.model_dump()}


class Task(BaseModel):
    """One problem: what the agent is shown, what it is scored against, and where it belongs.

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
    """Unique within the environment; records and comparisons go by it."""
    prompt: Whole
    """What the agent is told."""
    data: dict[str, Any] = Field(default_factory=dict)
    """Whatever the environment needs to play and score it; never shown to the agent."""
    gold: Whole | None = None
    """An answer that scores full marks; None where none is known."""
    history: list[Message] = Field(default_factory=list)
    """Messages that are shown to the agent before the prompt: a system message, earlier turns."""
    difficulty: int = 1
    """Level, for curricula and for scores by level."""
    tags: list[Whole] = Field(default_factory=list)
    """Words by which scores are told apart."""
    split: Whole = "train"
    """The set that it belongs to."""
