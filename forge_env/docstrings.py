"""The two parts of a Google-style docstring that a tool schema needs: the description and the arguments."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_ARGUMENT_SECTIONS = {"args", "arguments", "parameters"}
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?|See Also):\s*$")
_ARGUMENT = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


@dataclass(slots=True)
class Docstring:
    """`summary` is everything before the first section; `arguments` maps parameter to its description."""

    summary: str = ""
    arguments: dict[str, str] = field(default_factory=dict)


def parse_docstring(text: str) -> Docstring:
    """Read a docstring as `inspect.getdoc` returns it."""
    sections: dict[str, list[str]] = {"": []}
    current = ""
    for line in text.splitlines():
        if match := _SECTION.match(line):
            current = match.group(1).lower()
            sections.setdefault(current, [])
        else:
            sections[current].append(line)
    result = Docstring(summary="\n".join(sections[""]).strip())
    for name in _ARGUMENT_SECTIONS & sections.keys():
        result.arguments.update(_arguments(sections[name]))
    return result


def _arguments(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    indents = [len(line) - len(line.lstrip()) for line in lines if line.strip()]
    base = min(indents, default=0)
    current: str | None = None
    for line in lines:
        indent = len(line) - len(line.lstrip())
        match = _ARGUMENT.match(line.strip())
        if line.strip() and indent == base and match:
            current = match.group(1)
            found[current] = match.group(2).strip()
        elif current is not None and line.strip():
            found[current] = f"{found[current]} {line.strip()}".strip()
    return found
