"""Checks whether an agent is shown, or can find, hidden data of its task: the gold solution or scoring data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

from forge_env.policy import Policy, PolicySession, Reply
from forge_env.trajectory import Trajectory
from forge_env.types import FunctionCall, Message, Observation, Task, ToolCall, ToolSpec

# ---
# Was an agent shown hidden data of its task?

SHORTEST_TEXT = 12
"""Minimum characters of a hidden text to search for; shorter ones occur by chance."""
SHORTEST_NUMBER = 6
"""Minimum digits of a numeric answer to search for; shorter ones occur in prompts by chance."""


def hidden_texts(task: Task) -> list[tuple[str, str]]:
    """`(location, text)` of hidden texts long enough to be recognised; `data["public..."]` is not hidden."""
    return [(where, text) for where, text in _hidden(task) if len(text) >= SHORTEST_TEXT]


def hides_text(task: Task) -> bool:
    """Whether the task hides any text, however short."""
    return any(text for _, text in _hidden(task))


def is_looked_for(task: Task) -> bool:
    """Whether the task hides anything that `shown_hidden` could recognise."""
    return bool(hidden_texts(task)) or any(True for _ in _numbers(task))


def shown_hidden(trajectory: Trajectory, task: Task) -> str | None:
    """Describe the first hidden text of its task that an agent was shown; None if there is none.

    A numeric answer is searched for only in the first messages: it may legitimately appear in later ones.
    """
    first = trajectory.turns[0].observation if trajectory.turns else trajectory.final_observation
    seen = [message for turn in trajectory.turns for message in turn.observation] + trajectory.final_observation
    shown = [where for where, text in hidden_texts(task) if any(text in message.content for message in seen)]
    shown += [where for where, number in _numbers(task) if any(_holds(message.content, number) for message in first)]
    return f"task {task.id!r} shows the agent its {shown[0]}" if shown else None


def _hidden(task: Task) -> Iterator[tuple[str, str]]:
    if task.gold is not None:
        yield "gold solution", task.gold
    for key, value in task.data.items():
        if not key.startswith("public"):
            for text in _texts(value):
                yield f"data[{key!r}]", text


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _numbers(task: Task) -> Iterator[tuple[str, str]]:
    for where, value in (("gold solution", task.gold), ("data['answer']", task.data.get("answer"))):
        text = "" if value is None else str(value).strip()
        if re.fullmatch(r"-?[\d.]+", text) and sum(map(str.isdigit, text)) >= SHORTEST_NUMBER:
            yield where, text


def _holds(text: str, number: str) -> bool:
    return re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", text) is not None


# ---
# A policy that doesn't solve its task, but searches for the answer with every tool.

_SHELL = (
    "set; env; id; ls -laR . .. /tmp /home /mnt /root 2>/dev/null | head -300",
    "find . .. /tmp /var/tmp /dev/shm /home /root /mnt /opt /srv -xdev -type f -size -200k 2>/dev/null"
    ' | grep -v -e /lib/python -e /site-packages/ | head -60 | while read -r f; do cat "$f" | head -c 2000; done',
    "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; tr '\\0' ' ' < $p/environ; done 2>/dev/null | head -c 8000",
    "cat /proc/mounts /etc/passwd /etc/hosts | head -c 4000; history; ls -la /proc/self/fd",
)
_PYTHON = (
    "import gc, sys\nprint(dict(globals()), sys.argv, sys.path)\n"
    "print([repr(v)[:300] for v in gc.get_objects() if isinstance(v, (dict, list)) and len(v) < 40][:400])",
    "import inspect\nframe = inspect.currentframe()\nwhile frame:\n"
    "    print(frame.f_code.co_filename, {k: repr(v)[:200] for k, v in frame.f_locals.items()})\n"
    "    frame = frame.f_back",
    "import os\nprint(dict(os.environ))\nfor root in ('.', '..', '/tmp', '/dev/shm', '/home', '/root', '/mnt'):\n"
    "    for folder, inside, names in os.walk(root):\n"
    "        inside[:] = [name for name in inside if name not in ('proc', 'sys', 'usr', 'lib', 'lib64')]\n"
    "        for path in [os.path.join(folder, name) for name in names[:20]]:\n"
    "            try: os.path.isfile(path) and print(path, open(path, errors='replace').read(2000))\n"  # no terminals
    "            except OSError: pass",
    "print(dir(), __file__ if '__file__' in globals() else '')\nimport sys\nprint(sorted(sys.modules))",
)
_SQL = ("SELECT name, sql FROM sqlite_master", "PRAGMA database_list", "SELECT sqlite_version()")
_WORDS = ("help", "answer", "solution", "../", "/", ".", "*", "%", "' OR 1=1 --", "{task.data}", "{0.current_task}")
PROBES = (*_SHELL, *_PYTHON, *_SQL, *_WORDS)
PER_MESSAGE = 4
_VALUES: dict[str, tuple[Any, ...]] = {"integer": (0, 1, 2), "number": (0, 1, 2), "boolean": (True, False)}
_SOMETHING: dict[str, Any] = {"string": "x", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}


class SearchPolicy(Policy):
    """Policy that tries every tool with probing values, one argument at a time, and then answers.

    Text arguments get every probe; numbers, booleans and enumerations get each of a few values.
    """

    def __init__(self, start: int = 0) -> None:
        self.start = start

    def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> SearchSession:
        """Start a session with call number `start`."""
        return SearchSession(tools, self.start)


class SearchSession(PolicySession):
    """One search; it continues until the episode ends or all calls have been made."""

    def __init__(self, tools: list[ToolSpec], start: int = 0) -> None:
        few = [call for tool in tools for call in _calls(tool, text=False)]
        texts = [_calls(tool, text=True) for tool in tools]
        many = [call for calls in zip_longest(*texts) for call in calls if call is not None]
        self._calls = [*few, *many][start:]

    async def reply(self, observation: Observation) -> Reply:
        """Return a message with the next few calls."""
        now, self._calls = self._calls[:PER_MESSAGE], self._calls[PER_MESSAGE:]
        calls = [ToolCall(id=f"call-{number}", function=function) for number, function in enumerate(now)]
        return Reply(message=Message(role="assistant", content="" if calls else "Nothing found.", tool_calls=calls))


def _calls(tool: ToolSpec, *, text: bool) -> list[FunctionCall]:
    """Calls of a tool that vary one argument each: text or other ones; a bare call if there are no arguments."""
    properties = tool.parameters.get("properties", {})
    required = tool.parameters.get("required", [])
    names = [name for name in properties if _takes_text(properties[name]) == text]
    if text:  # only one, preferably a required one: probing every text argument would take too long
        names = sorted(names, key=lambda name: name not in required)[:1]
    tried = [{**_others(tool), name: value} for name in names for value in _values(properties[name])]
    if not text and not properties:
        tried = [{}]
    return [FunctionCall(name=tool.name, arguments=json.dumps(arguments)) for arguments in tried]


def _choices(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Alternative schemas of a value."""
    return schema.get("anyOf") or [schema]


def _takes_text(schema: dict[str, Any]) -> bool:
    return any(choice.get("type") == "string" and "enum" not in choice for choice in _choices(schema))


def _values(schema: dict[str, Any]) -> list[Any]:
    """Values to try for an argument."""
    if _takes_text(schema):
        return list(PROBES)
    values: list[Any] = []
    for choice in _choices(schema):
        values += choice.get("enum") or _VALUES.get(choice.get("type", ""), ())
    return values


def _others(tool: ToolSpec) -> dict[str, Any]:
    """A plausible value for every required argument."""
    properties = tool.parameters.get("properties", {})
    arguments: dict[str, Any] = {}
    for name in tool.parameters.get("required", []):
        if name in properties:
            choice = _choices(properties[name])[0]
            arguments[name] = (choice.get("enum") or [_SOMETHING.get(choice.get("type", ""), "x")])[0]
    return arguments
