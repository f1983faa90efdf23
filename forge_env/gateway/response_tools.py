"""Tools of the responses API: as the program declares them, and as the model is offered them.

Models call functions by a name. The tools of a namespace get one name each, `NAMESPACE__TOOL`, in the characters that
model APIs accept. A custom tool, which takes a free text, becomes a function with the argument `input`. Tools that run
on OpenAI's servers are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from forge_env.gateway.request import MOST_TOOLS, ToolName, Wire, arguments_object, known_type, new_id, tool_of
from forge_env.http.limits import RefusedRequestError
from forge_env.tools.mcp import safe_names
from forge_env.types import ToolCall, ToolSpec

AT_OPENAI = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search")
"""Types of tools that run on OpenAI's servers, without the date that may follow."""
_TEXT = "The tool's whole input, as plain text."


class Declaration(Wire):
    """A tool in a request; a namespace has `tools`."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    format: dict[str, Any] | None = None
    tools: list[Declaration] = Field([], max_length=MOST_TOOLS, fail_fast=True)


class Offer:
    """The tools of a request; one that is added later replaces an earlier one of its name.

    Attributes:
        tools: the tools as the model sees them.
        names: the program's names of those whose kind or name differs, by the model's names.
        left_out: types of the tools that run on OpenAI's servers, without dates.

    Raises:
        RefusedRequestError: a tool's type is unknown, there are too many tools, or two have one name.
    """

    def __init__(self, declared: Sequence[Declaration], added: Sequence[Declaration] = ()) -> None:
        given, later = [*_placed(declared)], [*_placed(added)]
        self.left_out = [known_type(tool.type, AT_OPENAI) for _, tool in given + later if _runs_at_openai(tool)]
        known: dict[ToolName, Declaration] = {}
        for namespace, tool in given:
            if not _runs_at_openai(tool) and known.setdefault(_key(namespace, tool), tool) != tool:
                raise RefusedRequestError(f"two tools of the request are named {tool.name[:64]!r}: rename one of them")
        known |= {_key(namespace, tool): tool for namespace, tool in later if not _runs_at_openai(tool)}
        if len(known) > MOST_TOOLS:
            raise RefusedRequestError(f"the request has more than {MOST_TOOLS:,} tools with those of its namespaces")
        for custom in (each for each in known if each.custom):
            if custom._replace(custom=False) in known:
                why = f"a function and a custom tool are both named {custom.name[:64]!r}: rename one of them"
                raise RefusedRequestError(why)
        plain = {each.name for each in known if not each.namespace}
        joined = {each: _joined(each.namespace, each.name) for each in known if each.namespace}
        safe = safe_names(joined.values(), others=plain)
        self._names = {each: safe[joined[each]] if each in joined else each.name for each in known}
        self.tools = [_spec(self._names[each], tool, each.custom) for each, tool in known.items()]
        self.names = {name: each for each, name in self._names.items() if each.namespace or each.custom}

    def name(self, namespace: str, name: str, *, custom: bool = False) -> str:
        """Return the model's name of a tool, also of one that is no longer offered."""
        known = ToolName(namespace, name, custom)
        if known in self._names or not namespace:
            return self._names.get(known, name)
        joined = _joined(namespace, name)
        return safe_names([joined])[joined]


def _joined(namespace: str, name: str) -> str:
    return f"{namespace}\0_{name}"  # unique for each pair; `safe_names` replaces the NUL by an underscore


def _runs_at_openai(tool: Declaration) -> bool:
    return tool.type.startswith(AT_OPENAI)


def _placed(declared: Sequence[Declaration]) -> Iterator[tuple[str, Declaration]]:
    """Each tool with its namespace, or an empty string."""
    for tool in declared:
        if tool.type == "namespace":
            yield from ((tool.name, each) for each in tool.tools)
        else:
            yield "", tool


def _key(namespace: str, tool: Declaration) -> ToolName:
    if tool.type not in ("function", "custom"):
        raise RefusedRequestError(f"this model can't call a tool of the type {tool.type[:64]!r}: give a function")
    return ToolName(namespace, tool.name, tool.type == "custom")


def _spec(name: str, tool: Declaration, custom: bool) -> ToolSpec:
    if not custom:
        return tool_of(name, tool.description, tool.parameters)
    grammar = (tool.format or {}).get("definition")
    text = f"{_TEXT} Its grammar ({(tool.format or {}).get('syntax')}):\n{grammar}" if grammar else _TEXT
    takes = {"type": "object", "properties": {"input": {"type": "string", "description": text}}, "required": ["input"]}
    return tool_of(name, tool.description, takes)


def custom_arguments(text: str) -> str:
    """JSON arguments of a call of a custom tool, which the model sees as a function."""
    return json.dumps({"input": text}, ensure_ascii=False)


def call_item(call: ToolCall, names: Mapping[str, ToolName]) -> dict[str, Any]:
    """Item of a response for a call of the model, with the program's name of the tool."""
    name = call.function.name
    known = names.get(name, ToolName("", name))
    item = {"call_id": call.id, "name": known.name, "status": "completed"}
    if known.namespace:
        item["namespace"] = known.namespace
    arguments = call.function.arguments
    if not known.custom:
        return {"type": "function_call", "id": new_id("fc_"), "arguments": arguments, **item}
    text = arguments_object(arguments).get("input")
    return {
        "type": "custom_tool_call",
        "id": new_id("ctc_"),
        "input": text if isinstance(text, str) else arguments,
        **item,
    }
