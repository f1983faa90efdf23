"""The vocabulary shared by environments, policies, rollouts and trainers: messages, tools, tasks."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from forge_env.errors import UsageError


def _number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Text = Annotated[str, BeforeValidator(_number_as_text)]
"""A text that a file may hold as a number: a split called 2024, an answer 42."""

Role = Literal["system", "user", "assistant", "tool"]


class FunctionCall(BaseModel):
    """The function an assistant asks for; `arguments` is JSON text exactly as the model wrote it."""

    name: str
    arguments: str = "{}"


class ToolCall(BaseModel):
    """One tool call of an assistant message (OpenAI chat format)."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(BaseModel):
    """One chat message in OpenAI's format."""

    model_config = ConfigDict(extra="forbid")

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
