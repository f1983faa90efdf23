"""The vocabulary shared by environments, policies, rollouts and trainers: messages, tools, tasks."""

from __future__ import annotations

import copy
import json
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass
from pydantic_core import SchemaSerializer, SchemaValidator

from forge_env.errors import UsageError


def _number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


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
    arguments: str = "{}"


@dataclass(slots=True, kw_only=True)
class ToolCall(SlottedModel):
    """One tool call of an assistant message (OpenAI chat format)."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


@dataclass(slots=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Message(SlottedModel):
    """One chat message in OpenAI's format."""

    role: Role
    content: str = ""
    tool_calls: list[ToolCall] = Field(default_factory=list)
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None

    def to_openai(self) -> dict[str, Any]:
        """The message as an OpenAI chat dictionary, unset fields left out."""
        data = self.model_dump(exclude_none=True)
        if not self.tool_calls:
            data.pop("tool_calls")
        return data


Observation: TypeAlias = list[Message]
"""What an agent sees next: only the messages that are new since its last action."""

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
    """The assistant message that calls one tool, for gold actions, scripts and tests."""
    function = FunctionCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False))
    return Message(role="assistant", tool_calls=[ToolCall(id="call-0", function=function)])


class ToolSpec(BaseModel):
    """A tool as the model sees it: name, what it does, JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})

    def to_openai(self) -> dict[str, Any]:
        """The tool as an entry of OpenAI's `tools` list."""
        return {"type": "function", "function": self.model_dump()}


class Task(BaseModel):
    """One problem: what the agent is shown, what it is scored against, and where it belongs.

    `data` is hidden from the agent: environments must never copy it into an observation or a sandbox
    that runs agent code. `gold` is an answer that scores full marks, used by validation only.
    """

    model_config = ConfigDict(extra="forbid")

    id: str
    prompt: str
    data: dict[str, Any] = Field(default_factory=dict)
    gold: str | None = None
    difficulty: int = 1
    tags: list[str] = Field(default_factory=list)
    split: str = "train"
