"""Parsing of a model's turn into content, thoughts, tool calls and malformed calls.

Training, endpoints with native or text tools, `vllm:CHECKPOINT` and the gateway all parse turns here, so that a turn
has the same meaning regardless of its source:

- Thoughts (`<think>...</think>`) at the beginning of the text are `reasoning_content`. So is everything before a
  closing tag that the prompt has opened, and everything after an opening tag that is never closed. In gpt-oss's
  format, thoughts are the channel `analysis` and everything before a call.
- Calls are those that the chat format or the endpoint has already parsed. If there are none and tools were offered,
  they are the `<tool_call>` blocks of the text, in the format of Hermes and Qwen, except those inside thoughts.
- A call without a name (`is_malformed`) could not be parsed; its arguments are the model's unchanged text, and
  `explain` describes the mistake.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from forge_env.tools.json_text import BadJSONError, arguments_text, read_json
from forge_env.types import FunctionCall, Message, ToolCall, clean_unicode

CALL_CLOSE = "</tool_call>"
_CALL_OPEN = re.compile(r"<tool_call>\s*")
_NEXT_CALL = re.compile(r"\s*(?=<tool_call>)")
_QUOTED = re.compile(r"(?<!`)`<tool_call>`(?!`)")
_JSON = json.JSONDecoder()
_NAMES = "(?:think|thinking|thought|seed:think)"
_OPENING = rf"(?:<{_NAMES}>|\[THINK\]|<\|channel>thought|<\|START_THINKING\|>|\u25c1think\u25b7)"
_CLOSING = rf"(?:</{_NAMES}>|\[/THINK\]|<channel\|>|<\|END_THINKING\|>|\u25c1/think\u25b7)"
_OPEN = re.compile(rf"\s*{_OPENING}", re.IGNORECASE)
_CLOSE = re.compile(_CLOSING, re.IGNORECASE)
_CLOSES = re.compile(rf"(?:\s*{_CLOSING})*", re.IGNORECASE)
_TAG = re.compile(rf"{_OPENING}|{_CLOSING}", re.IGNORECASE)
_ANY_OPEN = re.compile(_OPENING, re.IGNORECASE)
_CHANNELS = re.compile(r"(?:<\|start\|>assistant)?(?: to=\S+?)?<\|channel\|>")
_OTHER_ROLE = re.compile(r"<\|start\|>(?!assistant)")
_IN_CHANNEL = re.compile(
    r"(?:<\|start\|>assistant)?([^\n]{0,200}?)<\|message\|>(.*?)(?:<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)


def read_turn(
    text: str, *, reasoning: str | None = None, calls: Sequence[ToolCall] = (), tools: bool, turn: int = 0
) -> Message:
    """Parse the text of a turn, without thoughts (`reasoning`) and `calls` that are already parsed.

    `tools`: whether tools were offered; otherwise text that looks like a call is text. `turn` numbers the turns of a
    conversation, for the ids of calls that are parsed here.
    """
    thoughts, content = split_thoughts(clean_unicode(text), only_leading=reasoning is not None)
    if reasoning is not None:
        thoughts = [clean_unicode(reasoning), *thoughts]
    if tools and not calls:
        content, blocks = _split_calls(content)
        calls = [read_call(block, f"call_{turn}_{index}") for index, block in enumerate(blocks)]
    return Message(
        role="assistant",
        content=content.strip() if thoughts or calls else content,  # separators are not part of the content
        tool_calls=list(calls),
        reasoning_content="\n".join(filter(None, map(str.strip, thoughts))) or None,
    )


def _split_calls(text: str) -> tuple[str, list[str]]:
    """Split a text into the part before the first call, and the calls.

    Tags inside the strings of a call's JSON don't end it. A tag in backticks is prose about calls.
    """
    first, blocks, position = len(text), [], 0
    while opening := _CALL_OPEN.search(text, position):
        is_object = text.startswith("{", opening.end())
        if _QUOTED.search(text, max(0, opening.start() - 2), opening.start() + len("<tool_call>`")):
            position = opening.end()
            continue
        json_end = _json_end(text, opening.end()) if is_object else opening.end()
        if json_end > opening.end() and (following := _NEXT_CALL.match(text, json_end)):
            end = position = following.end()  # the call isn't closed
        else:
            closing = text.find(CALL_CLOSE, json_end)
            end = len(text) if closing < 0 else closing
            position = end + len(CALL_CLOSE)
        first = min(first, opening.start())
        blocks.append(text[opening.start() + len("<tool_call>") : end])
    return text[:first], blocks


def _json_end(text: str, start: int) -> int:
    """End position of the JSON value at `start`; `start` if it isn't valid."""
    try:
        return _JSON.raw_decode(text, start)[1]
    except (ValueError, RecursionError):  # a number with too many digits is a ValueError
        return start


def split_thoughts(text: str, *, only_leading: bool = False, opened: bool = False) -> tuple[list[str], str]:
    """Split a turn's text into `(thoughts, rest)`.

    A block that is never closed extends to the end, or to a complete call at the end: some models call a tool without
    closing their thoughts. Blocks may be nested. Repeated closing tags are dropped.

    Args:
        only_leading: thoughts that the prompt opened are already parsed, so a lone closing tag ends no block.
        opened: the prompt has opened a block.
    """
    if _CHANNELS.match(text):
        return _split_channels(text)
    thoughts: list[str] = []
    opening = _OPEN.match(text)
    start = 0 if opening is None else opening.end()
    if opening is None and not opened:  # a closing tag alone ends a block that the prompt has opened
        closing, inner = _CLOSE.search(text), _ANY_OPEN.search(text)
        if only_leading or closing is None or (inner is not None and inner.start() < closing.start()):
            return [], text[_CLOSES.match(text).end() :]  # type: ignore[union-attr]
    while True:
        closing = _closing(text, start)
        if closing is None:
            call = text.find("<tool_call>", start)
            end = call if call >= 0 and text.rstrip().endswith(CALL_CLOSE) else len(text)
            return [*thoughts, text[start:end]], text[end:]
        thoughts.append(_ANY_OPEN.sub("", text[start : closing.start()]))
        start = _CLOSES.match(text, closing.end()).end()  # type: ignore[union-attr]
        if (opening := _OPEN.match(text, start)) is None:
            return thoughts, text[start:]
        start = opening.end()


def _split_channels(text: str) -> tuple[list[str], str]:
    """Split a turn of gpt-oss by channel; a call keeps its header, and text without a complete header is unchanged.

    The turn ends with its first call, whose end is a stop token, or where the model writes another role.
    """
    thoughts: list[str] = []
    content: list[str] = []
    for header, body in _IN_CHANNEL.findall(text):
        if _OTHER_ROLE.search(header):
            break
        if " to=" in header:
            return [*thoughts, *content], f"{header}<|message|>{body}"
        (thoughts if "<|channel|>analysis" in header else content).append(body)
    return thoughts, "\n".join(content) if thoughts or content else text


def _closing(text: str, start: int) -> re.Match[str] | None:
    """Find the tag that closes the block with content at `start`; the next closing tag if inner blocks stay open."""
    first, depth = None, 1
    for tag in _TAG.finditer(text, start):
        if _OPEN.fullmatch(tag.group()):
            depth += 1
            continue
        first = first or tag
        depth -= 1
        if depth == 0:
            return tag
    return first


def call_of(name: Any, arguments: Any, call_id: str, raw: str | None = None) -> ToolCall:
    """Build a call from a name and arguments of any JSON type; a malformed call if the name is not a text."""
    if isinstance(name, str) and name.strip():
        # interned: shared by the calls of all open episodes
        function = FunctionCall(name=sys.intern(clean_unicode(name.strip())), arguments=arguments_text(arguments))
        return ToolCall(id=call_id, function=function)
    if raw is None:
        raw = arguments if isinstance(arguments, str) else arguments_text({"name": name, "arguments": arguments})
    return malformed(raw, call_id)


def read_call(block: str, call_id: str) -> ToolCall:
    """Parse a call, `{"name": ..., "arguments": {...}}`; the call is malformed if `block` isn't such an object.

    The object may be the value of "function", as in OpenAI's format. The arguments may be named "parameters", as in
    Llama's format.
    """
    try:
        data = read_json(block, finite=False)  # as vLLM's parsers: the tool rejects the arguments
    except BadJSONError:
        data = None
    if not isinstance(data, dict):
        return malformed(block, call_id)
    if isinstance(function := data.get("function"), dict):
        data = function
    if _lacks_arguments(data):
        return malformed(block, call_id)
    return call_of(data.get("name"), data.get("arguments", data.get("parameters")), call_id, raw=block)


def _lacks_arguments(data: dict[str, Any]) -> bool:
    """Whether a call has keys such as "args" instead of "arguments"; a call with none of them is complete."""
    return not data.keys() & {"arguments", "parameters"} and bool(data.keys() - {"name", "id", "type"})


def malformed(raw: str, call_id: str = "call_0") -> ToolCall:
    """Build a malformed call from text that could not be parsed."""
    return ToolCall(id=call_id, function=FunctionCall(name="", arguments=clean_unicode(raw.strip())))


def is_malformed(call: ToolCall) -> bool:
    """Whether the call could not be parsed."""
    return not call.function.name.strip()


def explain(block: str) -> str:
    """Describe the mistake in the text of a malformed call."""
    try:
        data = read_json(block)
    except BadJSONError as error:
        return f"it is not valid JSON: {error}"
    if not isinstance(data, dict):
        return f"it must be a JSON object, not {_kind(data)}"
    if "name" not in data:
        return 'its "name" is missing'
    if isinstance(data["name"], str) and data["name"].strip() and _lacks_arguments(data):
        return 'its "arguments" are missing'
    return f'its "name" must be the name of a tool, not {_kind(data["name"])}'


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return "an empty string" if not value.strip() else "a string"
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return json.dumps(value)[:40]
