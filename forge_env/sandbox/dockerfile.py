"""A parser of Dockerfiles that follows BuildKit: continued lines, comments, here-documents, quotes.

Reference: https://docs.docker.com/reference/dockerfile/
"""

from __future__ import annotations

import posixpath
import re
import shlex
from dataclasses import dataclass

_DIRECTIVE = re.compile(r"#\s*(\w+)\s*=\s*(\S+)\s*")
_WORD = re.compile(r"""(?:[^\s\\'"]|\\.|'[^']*'|"(?:[^"\\]|\\.)*")+""")
"""A word of a shell command; quotes in it may contain blanks."""
_HEREDOC = re.compile(r"\d*<<(-?)([^<]+)")
_WITH_HEREDOC = ("RUN", "COPY", "ADD")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, in the file's lines `start` to `end` (exclusive)."""

    name: str
    """In upper case, such as `FROM`."""
    text: str
    """The arguments on one line, without here-documents."""
    start: int
    end: int


def instructions(dockerfile: str) -> list[Instruction]:
    """The instructions of a Dockerfile, in order."""
    lines = [line.removesuffix("\r") for line in dockerfile.removeprefix("\ufeff").split("\n")]
    escape = _escape(lines)
    parsed: list[Instruction] = []
    position = 0
    while position < len(lines):
        start, text, continues = position, "", True
        while continues and position < len(lines):
            line = lines[position].strip()
            position += 1
            if line.startswith("#") or (not line and text):
                continue  # skipped within an instruction too
            continues = line.endswith(escape)
            text += line.removesuffix(escape) if continues else line
        name, *rest = text.split(maxsplit=1) or [""]
        if name.upper() in _WITH_HEREDOC:
            position = _after_heredocs(rest, lines, position)
        if name:
            parsed.append(Instruction(name.upper(), rest[0].strip() if rest else "", start, position))
    return parsed


def _escape(lines: list[str]) -> str:
    """The line continuation character: a backslash, unless a directive at the top of the file changes it."""
    for line in lines:
        if not (directive := _DIRECTIVE.fullmatch(line.strip())):
            break
        if directive[1].lower() == "escape":
            return directive[2]
    return "\\"


def _after_heredocs(rest: list[str], lines: list[str], position: int) -> int:
    """The line after an instruction's here-documents. Unterminated ones are ignored."""
    for word in _WORD.findall("".join(rest)):
        if heredoc := _HEREDOC.fullmatch(word):
            end = _unquoted(heredoc[2])
            texts = [line.lstrip("\t") if heredoc[1] else line for line in lines[position:]]
            position += texts.index(end) + 1 if end in texts else 0
    return position


@dataclass(frozen=True, slots=True)
class From:
    """The parts of a `FROM` instruction."""

    flags: tuple[str, ...]
    """Flags, such as `--platform=...`."""
    image: str
    stage: str
    """The name after AS, in lower case, or empty."""


def base_of(instruction: Instruction) -> From | None:
    """Parse a `FROM` instruction. Returns None for other instructions and incomplete ones."""
    words = instruction.text.split() if instruction.name == "FROM" else []
    flags = tuple(word for word in words if word.startswith("--"))
    image, *rest = words[len(flags) :] or [""]
    named = len(rest) == 2 and rest[0].upper() == "AS"
    return From(flags, image, rest[1].lower() if named else "") if image else None


def with_base(dockerfile: str, base: str) -> str:
    """Replace every base image of a Dockerfile, except `scratch` and its own stages, with `base`."""
    lines = dockerfile.split("\n")
    stages = {"scratch"}
    for instruction in instructions(dockerfile):
        if (base_image := base_of(instruction)) is None:
            continue
        if base_image.image.lower() not in stages:
            image = re.compile(rf"(?<=\s){re.escape(base_image.image)}(?=\s|$)")
            text = "\n".join(lines[instruction.start : instruction.end])
            lines[instruction.start : instruction.end] = image.sub(lambda _: base, text, count=1).split("\n")
        stages.add(base_image.stage)
    return "\n".join(lines)


def last_workdir(dockerfile: str) -> str | None:
    """Working folder of the last stage, which inherits its base stage's; None if the base image determines it."""
    folder: str | None = None
    stages: dict[str, str | None] = {}
    stage = ""
    for instruction in instructions(dockerfile):
        if instruction.name == "WORKDIR" and instruction.text:
            folder = posixpath.join(folder or "/", _unquoted(instruction.text))
        elif (base_image := base_of(instruction)) is not None:
            folder, stage = stages.get(base_image.image.lower()), base_image.stage
        stages[stage] = folder
    return folder


def _unquoted(text: str) -> str:
    """Remove the quotes of a word. Unquoted words may contain spaces."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = "", "", True
    try:
        return "".join(lexer)
    except ValueError:  # unbalanced quotes
        return text
