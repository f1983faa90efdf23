"""Tool calls as plain text, for endpoints that know no tools: described in the system message, parsed from replies.

The format is the one most open models have seen (Hermes, Qwen): JSON between `<tool_call>` tags; results come back
in a user message between `<tool_response>` tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from forge_env.types import FunctionCall, Message, ToolCall, ToolSpec

INSTRUCTIONS = """You may call tools. They are described here as JSON, one on a line:
{tools}

To call a tool, write a JSON object with its name and arguments between tags, and end your message:
<tool_call>
{{"name": "TOOL", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>
Several such blocks call several tools. A message without one is your final answer."""

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def as_plain_chat(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """The conversation in the roles system, user and assistant alone."""
    chat: list[dict[str, Any]] = []
    for message in messages:
        if message.role == "tool":
            text = f"<tool_response>\n{message.content}\n</tool_response>"
            if chat and chat[-1].get("results"):
                chat[-1]["content"] += f"\n{text}"
                chat[-1]["images"] += message.images
            else:
                chat.append({"role": "user", "content": text, "images": message.images, "results": True})
        else:
            blocks = [_write(call) for call in message.tool_calls]
            text = "\n".join(filter(None, [message.content, *blocks]))
            chat.append({"role": message.role, "content": text, "images": message.images})
    if tools:
        lines = "\n".join(json.dumps(tool.to_openai()["function"]) for tool in tools)
        instructions = INSTRUCTIONS.format(tools=lines)
        if chat and chat[0]["role"] == "system":
            chat[0]["content"] += f"\n\n{instructions}"
        else:
            chat.insert(0, {"role": "system", "content": instructions, "images": ()})
    return [
        {"role": each["role"], "content": Message(role="user", content=each["content"], images=each["images"]).parts}
        for each in chat
    ]


def _write(call: ToolCall) -> str:
    if not call.function.name:  # it could not be read: show it as it was
        return f"<tool_call>{call.function.arguments}</tool_call>"
    try:
        block = json.dumps({"name": call.function.name, "arguments": json.loads(call.function.arguments)})
    except (ValueError, RecursionError):  # no JSON, or nested too deeply to be read
        block = json.dumps({"name": call.function.name, "arguments": call.function.arguments})
    return f"<tool_call>\n{block}\n</tool_call>"


def parse_calls(message: Message, *, turn: int) -> Message:
    """`message` with the calls its text spells taken out of it.

    A block that can't be read becomes a call without a name, which environments answer with what is wrong; its
    arguments are the block as the model wrote it.
    """
    calls = [
        ToolCall(id=f"call_{turn}_{index}", function=_read(block))
        for index, block in enumerate(_CALL.findall(message.content))
    ]
    if not calls:
        return message
    content = _CALL.sub("", message.content).strip()
    return message.model_copy(update={"content": content, "tool_calls": [*message.tool_calls, *calls]})


def _read(block: str) -> FunctionCall:
    try:
        data = json.loads(block)
        name, arguments = data["name"], data.get("arguments", {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return FunctionCall(name="", arguments=block)
    if not isinstance(name, str):
        return FunctionCall(name="", arguments=block)
    return FunctionCall(name=name, arguments=text)
