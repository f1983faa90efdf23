"""OpenEnv's messages, as its WebSocket carries them, and what they mean for an `Environment`.

    -> {"type": "reset", "data": {"seed": 7}}
    <- {"type": "observation", "data": {"observation": {...}, "reward": null, "done": false}}
    -> {"type": "step", "data": {"message": "hello"}}
    -> {"type": "step", "data": {"type": "call_tool", "tool_name": "add", "arguments": {"a": 1}}}
    -> {"type": "state"}    <- {"type": "state", "data": {"episode_id": "...", "step_count": 1}}
    <- {"type": "error", "data": {"message": "...", "code": "VALIDATION_ERROR"}}

Ours adds fields that its clients pass on or ignore: `messages`, `terminated`, `truncated`, `info` and `metadata`
in an observation, `request_id` in an answer to a message that had one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forge_env.types import FunctionCall, Message, ToolCall, ToolSpec

ERROR_CODES = (
    "INVALID_JSON",
    "UNKNOWN_TYPE",
    "VALIDATION_ERROR",
    "EXECUTION_ERROR",
    "CAPACITY_REACHED",
    "FACTORY_ERROR",
    "SESSION_ERROR",
)


class WireError(Exception):
    """Something to be answered with an error message; `code` is one of `ERROR_CODES`."""

    def __init__(self, code: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.details = details

    def reply(self) -> dict[str, Any]:
        """The error as a message."""
        return {"type": "error", "data": {"message": str(self), "code": self.code, **self.details}}


class AssistantAction(BaseModel):
    """What the agent says: the text of its message, and tool calls in OpenAI's format."""

    model_config = ConfigDict(extra="forbid")

    message: str = Field(description="text of the assistant's message")
    tool_calls: list[ToolCall] = Field(default_factory=list, description="tool calls in OpenAI's format")
    metadata: dict[str, Any] = Field(default_factory=dict)


class CallTool(BaseModel):
    """One tool call, as OpenEnv's tool clients send it."""

    model_config = ConfigDict(extra="forbid")

    type: str
    tool_name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)


class TextObservation(BaseModel):
    """What the agent sees next: the new messages, in OpenAI's format."""

    messages: list[dict[str, Any]] = Field(default_factory=list)
    text: str = ""
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)


class EpisodeState(BaseModel):
    """Where an episode stands."""

    episode_id: str | None = None
    step_count: int = 0
    task_id: str | None = None


def schemas() -> dict[str, Any]:
    """JSON schemas of the three models above, as `/schema` answers."""
    return {
        "action": AssistantAction.model_json_schema(),
        "observation": TextObservation.model_json_schema(),
        "state": EpisodeState.model_json_schema(),
    }


def parse_message(text: str) -> dict[str, Any]:
    """One message of a client.

    Raises:
        WireError: it is no JSON object with a `type`.
    """
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError("INVALID_JSON", f"not valid JSON: {str(error)[:200]}") from None
    if not isinstance(message, dict) or not isinstance(message.get("data", {}), dict):
        raise WireError("VALIDATION_ERROR", "a message is an object with a type, and data that is an object")
    return message


def parse_action(data: Mapping[str, Any], call_id: str) -> Message:
    """The assistant message that the data of a `step` stands for.

    Raises:
        WireError: it stands for none.
    """
    try:
        if data.get("type") == "call_tool":
            call = CallTool.model_validate(data)
            function = FunctionCall(name=call.tool_name, arguments=json.dumps(call.arguments))
            return Message(role="assistant", tool_calls=[ToolCall(id=call_id, function=function)])
        action = AssistantAction.model_validate(data)
    except ValidationError as error:
        item = error.errors(include_url=False)[0]
        where = ".".join(map(str, item["loc"]))
        raise WireError("VALIDATION_ERROR", f"{where}: {item['msg']}; an action is {{'message': text}}") from None
    return Message(role="assistant", content=action.message, tool_calls=action.tool_calls)


def observation_reply(
    messages: Sequence[Message],
    metadata: Mapping[str, Any],
    *,
    reward: float | None = None,
    terminated: bool = False,
    truncated: bool = False,
    info: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The answer to `reset` or `step`; `extra` goes beside the observation's own fields."""
    observation = TextObservation(
        messages=[message.to_openai() for message in messages],
        text="\n\n".join(message.content for message in messages),
        terminated=terminated,
        truncated=truncated,
        info=json.loads(json.dumps(dict(info or {}), default=str)),
        metadata=dict(metadata),
    )
    data = {
        "observation": {**observation.model_dump(), **(extra or {})},
        "reward": reward,
        "done": terminated or truncated,
    }
    return {"type": "observation", "data": data}


def tool_entry(spec: ToolSpec) -> dict[str, Any]:
    """A tool as OpenEnv lists it."""
    return {"name": spec.name, "description": spec.description, "input_schema": spec.parameters}
