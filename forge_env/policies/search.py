"""An agent that doesn't solve its task but looks for the answer: with every tool, everywhere."""

from __future__ import annotations

import json
from typing import Any

from forge_env.policy import Reply
from forge_env.types import FunctionCall, Message, Observation, ToolCall, ToolSpec

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
    "    for folder, _, names in os.walk(root):\n        for name in names[:20]:\n"
    "            try: print(folder, name, open(os.path.join(folder, name), errors='replace').read(2000))\n"
    "            except OSError: pass",
    "print(dir(), __file__ if '__file__' in globals() else '')\nimport sys\nprint(sorted(sys.modules))",
)
_SQL = ("SELECT name, sql FROM sqlite_master", "PRAGMA database_list", "SELECT sqlite_version()")
_WORDS = ("help", "answer", "solution", "../", "/", ".", "*", "%", "' OR 1=1 --", "{task.data}", "{0.current_task}")
PROBES = (*_SHELL, *_PYTHON, *_SQL, *_WORDS)
PER_MESSAGE = 4


class SearchPolicy:
    """Gives every probe to every tool that takes a text, then answers something.

    Args:
        start: probes to pass over, because an episode before this one has tried them.
    """

    def __init__(self, start: int = 0) -> None:
        self.start = start

    def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> SearchSession:
        """A session that begins with the first probe."""
        return SearchSession(tools, self.start)


class SearchSession:
    """One search; it goes on until the episode ends, or nothing is left to try."""

    def __init__(self, tools: list[ToolSpec], start: int = 0) -> None:
        found = [(tool, _text_argument(tool)) for tool in tools]
        self._calls = [
            FunctionCall(name=tool.name, arguments=json.dumps({**_others(tool, argument), argument: probe}))
            for probe in PROBES
            for tool, argument in found
            if argument is not None
        ][start:]

    async def reply(self, observation: Observation) -> Reply:
        """The next few probes."""
        now, self._calls = self._calls[:PER_MESSAGE], self._calls[PER_MESSAGE:]
        calls = [ToolCall(id=f"call-{number}", function=function) for number, function in enumerate(now)]
        return Reply(message=Message(role="assistant", content="" if calls else "Nothing found.", tool_calls=calls))


def _text_argument(tool: ToolSpec) -> str | None:
    """The argument that takes a text, a required one first."""
    properties = tool.parameters.get("properties", {})
    texts = [name for name, schema in properties.items() if schema.get("type") == "string" and "enum" not in schema]
    required = tool.parameters.get("required", [])
    return next(iter(sorted(texts, key=lambda name: name not in required)), None)


def _others(tool: ToolSpec, argument: str | None) -> dict[str, Any]:
    """Something for the other arguments that are required."""
    values: dict[str, Any] = {"string": "x", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
    properties = tool.parameters.get("properties", {})
    return {
        name: (properties[name].get("enum") or [values.get(properties[name].get("type"), "x")])[0]
        for name in tool.parameters.get("required", [])
        if name != argument and name in properties
    }
