"""The instructions of a Dockerfile, as BuildKit reads them: joined lines, comments, here-documents, quotes.

Reference: https://docs.docker.com/reference/dockerfile/
"""

from __future__ import annotations

import posixpath
import re
import shlex
from dataclasses import dataclass

_DIRECTIVE = re.compile(r"#\s*(\w+)\s*=\s*(\S+)\s*")
_HEREDOC = re.compile(r"\d*<<(-?)([^<]+)")
_WITH_HEREDOC = ("RUN", "COPY", "ADD")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, on the lines `start` to `end` of the file, the last one excluded."""

    name: str
    """In capitals: `FROM`."""
    text: str
    """What follows the name, in one line; without here-documents."""
    start: int
    end: int


def instructions(dockerfile: str) -> list[Instruction]:
    """The instructions of a Dockerfile's text, in order."""
    lines = [line.removesuffix("\r") for line in dockerfile.removeprefix("\ufeff").split("\n")]
    escape = _escape(lines)
    found: list[Instruction] = []
    place = 0
    while place < len(lines):
        start, text, goes_on = place, "", True
        while goes_on and place < len(lines):
            line = lines[place].strip()
            place += 1
            if line.startswith("#") or (not line and text):
                continue  # also in the middle of an instruction
            goes_on = line.endswith(escape)
            text += line.removesuffix(escape) if goes_on else line
        name, *rest = text.split(maxsplit=1) or [""]
        if name.upper() in _WITH_HEREDOC:
            place = _after_heredocs(rest, lines, place)
        if name:
            found.append(Instruction(name.upper(), rest[0].strip() if rest else "", start, place))
    return found


def _escape(lines: list[str]) -> str:
    """The character that joins lines: a backslash, unless a directive at the top says otherwise."""
    for line in lines:
        if not (directive := _DIRECTIVE.fullmatch(line.strip())):
            break
        if directive[1].lower() == "escape":
            return directive[2]
    return "\\"


def _after_heredocs(rest: list[str], lines: list[str], place: int) -> int:
    """The line behind the here-documents of an instruction; one that has no end is none."""
    try:
        words = shlex.split("".join(rest), posix=False)
    except ValueError:  # quotes that are not closed
        words = "".join(rest).split()
    for word in words:
        if heredoc := _HEREDOC.fullmatch(word):
            end = heredoc[2].strip("\"'")
            texts = [line.lstrip("\t") if heredoc[1] else line for line in lines[place:]]
            place += texts.index(end) + 1 if end in texts else 0
    return place


@dataclass(frozen=True, slots=True)
class From:
    """What a FROM says."""

    flags: tuple[str, ...]
    """`--platform=...`"""
    image: str
    stage: str
    """The name after AS in small letters, or empty."""


def base_of(instruction: Instruction) -> From | None:
    """What a FROM says; None for another instruction, and for one that is not complete."""
    words = instruction.text.split() if instruction.name == "FROM" else []
    flags = tuple(word for word in words if word.startswith("--"))
    image, *rest = words[len(flags) :] or [""]
    named = len(rest) == 2 and rest[0].upper() == "AS"
    return From(flags, image, rest[1].lower() if named else "") if image else None


def with_base(dockerfile: str, base: str) -> str:
    """A Dockerfile's text with every image that it is `FROM`, but `scratch` and its own stages, replaced by `base`."""
    lines = dockerfile.split("\n")
    stages = {"scratch"}
    for instruction in instructions(dockerfile):
        if (said := base_of(instruction)) is None:
            continue
        if said.image.lower() not in stages:
            image = re.compile(rf"(?<=\s){re.escape(said.image)}(?=\s|$)")
            text = "\n".join(lines[instruction.start : instruction.end])
            lines[instruction.start : instruction.end] = image.sub(lambda _: base, text, count=1).split("\n")
        stages.add(said.stage)
    return "\n".join(lines)


def last_workdir(dockerfile: str) -> str | None:
    """The folder of the last stage, which begins in that of the stage it is FROM; None: in another image's."""
    folder: str | None = None
    stages: dict[str, str | None] = {}
    stage = ""
    for instruction in instructions(dockerfile):
        if instruction.name == "WORKDIR" and instruction.text:
            folder = posixpath.join(folder or "/", _unquoted(instruction.text))
        elif (said := base_of(instruction)) is not None:
            folder, stage = stages.get(said.image.lower()), said.stage
        stages[stage] = folder
    return folder


def _unquoted(text: str) -> str:
    """A word as the shell reads it, which may have blanks without quotes."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = "", "", True
    try:
        return "".join(lexer)
    except ValueError:  # a quote that is not closed
        return text
