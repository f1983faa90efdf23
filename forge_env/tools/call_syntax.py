"""How models write tool calls, if not in the format of Hermes and Qwen, which `forge_env.tools.turns` reads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from forge_env.tools.json_text import BadJSONError, arguments_text, read_json
from forge_env.tools.turns import call_of, malformed, read_turn
from forge_env.types import ToolCall

_JSON = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """A way to write calls.

    Attributes:
        vllm: name of vLLM's parser of this syntax.
        read: splits a turn without thoughts into its content and its calls; None: `read_turn` finds the calls.
    """

    vllm: str
    read: Callable[[str], tuple[str, list[ToolCall]]] | None = None

    def reads_probe(self, text: str) -> bool:
        """Whether text that begins with a call of `get_probe` with the argument `key=value` is read as that call."""
        if self.read is not None:
            content, calls = self.read(text)
        else:
            turn = read_turn(text, tools=True)
            content, calls = turn.content, turn.tool_calls
        functions = [(call.function.name, call.function.arguments) for call in calls]
        return not content.strip() and functions == [("get_probe", arguments_text({"key": "value"}))]


def _read_json_calls(text: str, opening: str, arguments: str) -> tuple[str, list[ToolCall]]:
    """Read calls written as JSON objects behind `opening`, alone, in a list, or separated by semicolons."""
    content, found, rest = text.partition(opening) if opening else ("", "", text)
    if opening and not found:
        return text, []
    calls: list[ToolCall] = []
    position = 0
    while match := re.compile(r"[\s\[,;]*(?=\{)").match(rest, position):
        try:
            value, position = _JSON.raw_decode(rest, match.end())
        except (ValueError, RecursionError):  # a number with too many digits is a ValueError
            calls.append(malformed(rest[match.end() :], f"call_{len(calls)}"))
            break
        raw = rest[match.end() : position]
        given = value.get(arguments, value.get("arguments", value.get("parameters")))
        calls.append(call_of(value.get("name"), given, f"call_{len(calls)}", raw=raw))
    return (content, calls) if calls else (text, [])


def _read_llama(text: str) -> tuple[str, list[ToolCall]]:
    """Llama 3: the whole turn is `{"name": ..., "parameters": {...}}`, possibly after `<|python_tag|>`."""
    body = text.strip().removeprefix("<|python_tag|>")
    is_marked = body != text.strip() or re.search(r'"(?:parameters|arguments)"', body)  # an answer may have a name
    if not is_marked or not re.match(r'\s*\{\s*"(?:name|type|parameters)"', body):
        return text, []
    return _read_json_calls(body, "", "parameters")


_MISTRAL_CALL = re.compile(r"\s*([\w.-]+?)\s*(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?\s*(?=\{)")


def _read_mistral(text: str) -> tuple[str, list[ToolCall]]:
    """Mistral: `[TOOL_CALLS]` before a list of objects, or before each name with its arguments."""
    content, tag, rest = text.partition("[TOOL_CALLS]")
    if not tag:
        return text, []
    if rest.lstrip().startswith(("[", "{")) and not re.match(r"\s*\[(?:ARGS|CALL_ID)\]", rest):
        return _read_json_calls(text, "[TOOL_CALLS]", "arguments")
    return content, _read_named_calls(rest, _MISTRAL_CALL, "[TOOL_CALLS]")


_GEMMA_CALL = re.compile(r"\s*call:([\w.-]+)\s*(?=\{)")
_GEMMA_STRING = re.compile(r'<\|"\|>(.*?)<\|"\|>', re.DOTALL)
_GEMMA_KEY = re.compile(r'("(?:[^"\\]|\\.)*(?:"|\Z))|(?<=[{,])\s*([^\s"{}\[\],:][^"{}\[\],:]*):')


def _read_gemma(text: str) -> tuple[str, list[ToolCall]]:
    """Gemma 4: `<|tool_call>call:NAME{KEY:VALUE}<tool_call|>`, where `<|"|>` quotes strings."""
    content, tag, rest = text.partition("<|tool_call>")
    if not tag:
        return text, []
    rest = _GEMMA_STRING.sub(lambda quoted: json.dumps(quoted[1], ensure_ascii=False), rest)
    rest = _GEMMA_KEY.sub(lambda key: key[1] or json.dumps(key[2].strip(), ensure_ascii=False) + ":", rest)
    return content, _read_named_calls(rest, _GEMMA_CALL, "<tool_call|>", "<|tool_call>")


_END = re.compile(r"</s>|<\|tool_response>|<turn\|>")


def _read_named_calls(text: str, call: re.Pattern[str], *tags: str) -> list[ToolCall]:
    """Read calls, each a name that `call` matches and a JSON object, separated by commas or `tags`."""
    between = re.compile(rf"(?:[\s,]|{'|'.join(map(re.escape, tags))})*")
    calls: list[ToolCall] = []
    position = 0
    while match := call.match(text, position):
        try:
            arguments, position = _JSON.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            following = text.find(tags[0], match.end())
            position = len(text) if following < 0 else following
            arguments = text[match.end() : position]
        calls.append(call_of(match[1], arguments, f"call_{len(calls)}"))
        position = between.match(text, position).end()  # type: ignore[union-attr]
    if (left := _END.split(text[position:])[0].strip()) or not calls:
        calls.append(malformed(left, f"call_{len(calls)}"))
    return calls


_HARMONY_CALL = re.compile(r"(?:<\|channel\|>\w+)? to=(?:functions\.)?([^\s<]*)[^\n]*?<\|message\|>(.*)", re.DOTALL)


def _read_harmony(text: str) -> tuple[str, list[ToolCall]]:
    """gpt-oss: `to=functions.NAME` in a message's header, and the arguments as its text."""
    match = _HARMONY_CALL.match(text)
    return ("", [call_of(match[1], match[2], "call_0")]) if match else (text, [])


def _object(text: str) -> Any:
    """The JSON value that a text is; the text if it isn't JSON."""
    try:
        return read_json(text)
    except BadJSONError:
        return text


def _parameters(text: str) -> Iterable[tuple[str, str]]:
    for match in re.finditer(r"<parameter=([^>\s]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", text, re.DOTALL):
        yield match[1], match[2]


def _read_qwen_coder(text: str) -> tuple[str, list[ToolCall]]:
    """Qwen 3 Coder and 3.5: `<function=NAME>` with `<parameter=KEY>` blocks, possibly in `<tool_call>`."""
    content, tag, _ = text.partition("<function=")
    if not tag:
        return text, []
    calls: list[ToolCall] = []
    for match in re.finditer(r"<function=([^>\s]+)>(.*?)(?:</function>|(?=<function=)|\Z)", text, re.DOTALL):
        arguments = {key: _plain(value) for key, value in _parameters(match[2])}
        calls.append(call_of(match[1], arguments, f"call_{len(calls)}", raw=match[0]))
    return re.sub(r"<tool_call>\s*\Z", "", content), calls


def _plain(value: str) -> Any:
    """A parameter's value: JSON if it is a number, an object or a list, otherwise text."""
    parsed = _object(value)
    return value if isinstance(parsed, str) else parsed


SYNTAXES = (
    CallSyntax("hermes"),
    CallSyntax("llama3_json", _read_llama),
    CallSyntax("mistral", _read_mistral),
    CallSyntax("qwen3_coder", _read_qwen_coder),
    CallSyntax("gemma4", _read_gemma),
    CallSyntax("openai", _read_harmony),
)
"""The known ways, in the order in which they are tried."""
