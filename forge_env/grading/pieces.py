"""The pieces of a gold solution that can be made wrong: files, answers, and arguments of tool calls."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forge_env.environment.base import Environment
from forge_env.environment.optional import gold_actions, gold_files, hand_in
from forge_env.environment.sandbox_environment import SandboxEnvironment
from forge_env.types import Action, Message, Task, as_message
from forge_env.validation.cheats import defined_names, parsed, stub_of

Kind = Literal["python", "sql", "shell", "json", "number", "list", "text"]
_NUMBER = re.compile(r"[-+]?\$?\d[\d,]*(?:\.\d+)?\s*%?")
_SQL = re.compile(r"\s*(SELECT|WITH|INSERT|UPDATE|DELETE)\b", re.IGNORECASE)
_MARKED = (
    re.compile(r"```(?P<language>\w*)[^\n]*\n(?P<answer>.*?)\n?```", re.DOTALL),
    re.compile(r"<(\w+)>(?P<answer>[^<>]*)</\1>"),
    re.compile(r"\\boxed\{(?P<answer>[^{}]*)\}"),
    re.compile(r"####[ \t]*(?P<answer>[^\n]+)"),
)
"""How answers are marked in messages: a block, a tag, LaTeX's box, the line of GSM8K."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a gold solution."""

    name: str
    """Path of a file, "answer", or `TOOL.ARGUMENT`."""
    kind: Kind
    text: str
    submit: Callable[[str], list[Action]]
    """Makes the actions that submit the solution with another text instead of this one."""
    near: frozenset[int] = frozenset()
    """Lines that the solution changes in a file that the agent is given."""

    @property
    def emptied(self) -> str:
        """Another text without what it does: empty functions, or nothing."""
        if self.kind == "python" and (stub := stub_of(self.text)) != self.text:
            return stub
        return _nothing(self.text) if self.kind == "json" else ""


def pieces(env: Environment, task: Task) -> list[Piece]:
    """All pieces of a task's gold solution; empty if it has none."""
    files = gold_files(env, task)
    if files is None:
        return list(_in_actions([as_message(action) for action in gold_actions(env, task) or []]))
    given = env.files(task) if isinstance(env, SandboxEnvironment) else {}

    def of_file(path: str, text: str) -> Piece:
        near = frozenset(_changed(given.get(path, ""), text))
        kind = "python" if path.endswith(".py") else kind_of(text)
        return Piece(path, kind, text, lambda made: hand_in(env, task, {**files, path: made}), near)

    return [of_file(path, text) for path, text in files.items() if text.strip()]


def _changed(before: str | bytes, after: str) -> Iterator[int]:
    if isinstance(before, bytes):
        before = before.decode(errors="replace")
    if not before:
        return
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    for tag, _, _, start, end in matcher.get_opcodes():
        if tag != "equal":
            yield from range(start + 1, max(end, start + 1) + 1)


def _in_actions(messages: Sequence[Message]) -> Iterator[Piece]:
    for index, message in enumerate(messages):

        def instead(made: Message, index: int = index) -> list[Action]:
            return [*messages[:index], made, *messages[index + 1 :]]

        if message.content.strip():
            yield _in_content(message, instead)
        for number, call in enumerate(message.tool_calls):
            yield from _in_call(message, number, _arguments(call.function.arguments), instead)


def _in_content(message: Message, instead: Callable[[Message], list[Action]]) -> Piece:
    """The marked answer of a message, or its last line, or all of it if it is data or a program."""
    content = message.content
    whole = kind_of(content) in ("python", "json", "sql")
    last = 0 if whole else content.rstrip().rfind("\n") + 1
    marked = (_last(pattern, content) for pattern in _MARKED)
    start, end, language = next(filter(None, marked), (last, len(content.rstrip()), ""))

    def submit(made: str) -> list[Action]:
        return instead(message.model_copy(update={"content": content[:start] + made + content[end:]}))

    return Piece("answer", kind_of(content[start:end], language), content[start:end], submit)


def _last(pattern: re.Pattern[str], text: str) -> tuple[int, int, str] | None:
    hits = list(pattern.finditer(text))
    if not hits:
        return None
    language = hits[-1].groupdict().get("language") or ""
    return *hits[-1].span("answer"), language


def _in_call(
    message: Message, number: int, arguments: Mapping[str, Any], instead: Callable[[Message], list[Action]]
) -> Iterator[Piece]:
    """The arguments of a tool call."""
    call = message.tool_calls[number]
    for key, value in arguments.items():

        def submit(made: str, key: str = key, value: object = value) -> list[Action]:
            given = {**arguments, key: made if isinstance(value, str) else json.loads(made)}
            function = call.function.model_copy(update={"arguments": json.dumps(given)})
            calls = list(message.tool_calls)
            calls[number] = call.model_copy(update={"function": function})
            return instead(message.model_copy(update={"tool_calls": calls}))

        name = f"{call.function.name}.{key}"
        if not isinstance(value, str):
            yield Piece(name, "json", json.dumps(value), submit)
        elif value.strip():
            yield Piece(name, kind_of(value, "bash" if key in ("command", "cmd") else ""), value, submit)


def _arguments(text: str) -> Mapping[str, Any]:
    try:
        given = json.loads(text)
    except ValueError:
        return {}
    return given if isinstance(given, dict) else {}


def _is_script(text: str) -> bool:
    return "\n" in text.strip() and "=" in text and parsed(text) is not None


def kind_of(text: str, language: str = "") -> Kind:
    """The kind of an answer, by its text and the language of its block."""
    if language.lower() in ("bash", "sh", "shell"):
        return "shell"
    if language.lower() in ("python", "py", "python3") or defined_names(text) or _is_script(text):
        return "python"
    if _SQL.match(text):
        return "sql"
    if _NUMBER.fullmatch(text.strip()):
        return "number"
    if isinstance(_json(text), dict | list):
        return "json"
    parts = re.split(r"[,\n]", text.strip())
    return "list" if len(parts) > 1 and all(len(part.split()) < 5 for part in parts) else "text"


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _nothing(text: str) -> str:
    """An empty value of the same JSON type, or another small one if the value is empty."""
    value = _json(text)
    if not value:
        return {"[]": "[0]", "{}": '{"x": 0}', "false": "true"}.get(json.dumps(value), "1")
    return json.dumps(type(value)())
