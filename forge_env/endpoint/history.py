"""Conversation history for requests to an endpoint, with the model's turns as the model wrote them.

With native tools, messages are OpenAI's. With text tools, for endpoints without tool support, the system message
describes the tools, calls stay in the text, and a user message has the results between `<tool_response>` tags. Most
open models are trained on this format (Hermes, Qwen).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from forge_env.tools.json_text import BadJSONError, read_json
from forge_env.tools.turns import is_malformed
from forge_env.types import Message, ToolCall, ToolSpec

INSTRUCTIONS = """You may call tools. They are described here as JSON, one on a line:
{tools}

To call a tool, write a JSON object with its name and arguments between tags, and end your message:
<tool_call>
{{"name": "TOOL", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>
Several such blocks call several tools. A message without one is your final answer."""

REASONING = ("reasoning_content", "reasoning", "reasoning_details")
"""Fields in which endpoints return thoughts (DeepSeek, vLLM, OpenRouter)."""


class History:
    """The messages of one conversation with an endpoint."""

    def __init__(self, tools: Sequence[ToolSpec], *, as_text: bool) -> None:
        self._as_text = as_text
        self._instructions = ""
        if as_text and tools:
            self._instructions = _instructions(tools)
        self._messages: list[dict[str, Any]] = []
        self._results: list[Message] = []
        """Tool results at the end of the conversation; they are sent as one user message."""
        self._text_calls: set[str] = set()
        """Ids of calls that stay in the text of their turn."""

    def add(self, observation: Sequence[Message]) -> None:
        """Append the environment's messages."""
        for message in observation:
            if message.role == "tool" and (self._as_text or message.tool_call_id in self._text_calls):
                self._add_result(message)
            else:
                self._results = []
                self._messages.append(wire(message))

    def add_turn(self, text: str, message: Message, thoughts: Mapping[str, Any]) -> None:
        """Append the model's turn.

        Args:
            text: content as the endpoint returned it.
            thoughts: fields of `REASONING` as the endpoint returned them. They are sent back only with calls: some
                endpoints require them there, and several reject them without calls.
        """
        calls = message.tool_calls
        in_text = "<tool_call>" in text
        if self._as_text or in_text or any(map(is_malformed, calls)):
            self._text_calls.update(call.id for call in calls)
            text = text if in_text else "\n".join(filter(None, [text, *map(_block, calls)]))
            calls = []
        self._results = []
        turn = wire(message.model_copy(update={"content": text, "tool_calls": calls}))
        self._messages.append({**turn, **(thoughts if calls else {})})

    def messages(self, *, reasoning: bool) -> list[dict[str, Any]]:
        """All messages of a request, with thoughts or without."""
        messages = self._messages
        if self._instructions:
            first, *rest = messages or [{}]
            if first.get("role") == "system":
                messages = [{**first, "content": f"{first['content']}\n\n{self._instructions}"}, *rest]
            else:
                messages = [{"role": "system", "content": self._instructions}, *messages]
        if reasoning or not any(name in message for message in messages for name in REASONING):
            return list(messages)
        return [{name: value for name, value in each.items() if name not in REASONING} for each in messages]

    def _add_result(self, message: Message) -> None:
        if self._results:
            del self._messages[-1]
        self._results.append(message)
        text = "\n".join(f"<tool_response>\n{each.content}\n</tool_response>" for each in self._results)
        images = tuple(image for each in self._results for image in each.images)
        self._messages.append(wire(Message(role="user", content=text, images=images)))


def tools_as_text(messages: Iterable[Message], tools: Sequence[ToolSpec]) -> list[Message]:
    """A conversation with its tools, calls and results as text, as `History` writes them.

    Args:
        tools: tools to describe in the system message; none for a later part.
    """
    result: list[Message] = []
    responses = False
    for message in messages:
        if message.role == "tool":
            text = f"<tool_response>\n{message.content}\n</tool_response>"
            if responses:
                text = f"{result.pop().content}\n{text}"
            message = Message(role="user", content=text, images=message.images)
            responses = True
        else:
            responses = False
            if message.tool_calls:
                text = "\n".join(filter(None, [message.content, *map(_block, message.tool_calls)]))
                message = message.model_copy(update={"content": text, "tool_calls": []})
        result.append(message)
    if not tools:
        return result
    text = _instructions(tools)
    if result and result[0].role == "system":
        return [result[0].model_copy(update={"content": f"{result[0].content}\n\n{text}"}), *result[1:]]
    return [Message(role="system", content=text), *result]


def _instructions(tools: Sequence[ToolSpec]) -> str:
    return INSTRUCTIONS.format(tools="\n".join(json.dumps(tool.to_openai()["function"]) for tool in tools))


def _block(call: ToolCall) -> str:
    """A call as text, for turns from which the endpoint removed the call's text."""
    name, arguments = call.function.name, call.function.arguments
    written = arguments if is_malformed(call) else f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'
    return f"<tool_call>\n{written}\n</tool_call>"


def wire(message: Message) -> dict[str, Any]:
    """A message in OpenAI's format; tool messages have no name, which several endpoints reject."""
    data: dict[str, Any] = {"role": message.role, "content": message.parts}
    if message.tool_calls:
        data["tool_calls"] = [_wire_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        data["tool_call_id"] = message.tool_call_id
    if message.name is not None and message.role != "tool":
        data["name"] = message.name
    return data


def _wire_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(text: str) -> str:
    """Arguments for the history; wrapped if invalid, since servers that parse them would reject the whole request."""
    try:
        readable = isinstance(read_json(text), dict)
    except BadJSONError:
        readable = False
    return text if readable else json.dumps({"arguments": text})
