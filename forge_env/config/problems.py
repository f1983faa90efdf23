"""What is wrong with a recipe, said in one line for each mistake: where it stands and what was probably meant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from forge_env.config.recipe import RunConfig, Section
from forge_env.errors import did_you_mean

KeyPath: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A recipe as read: its name, its data, and where every key stands."""

    name: str
    data: dict[str, Any]
    lines: dict[KeyPath, int]

    @property
    def stem(self) -> str:
        """Name without folder and `.yaml`: what a run is called by default."""
        return Path(self.name).stem

    def where(self, path: KeyPath) -> str:
        """`file:line` of a key, or of the nearest key above it."""
        line = self.line(path)
        return f"{self.name}:{line}" if line else self.name

    def line(self, path: KeyPath) -> int:
        """Line of a key, or of the nearest key above it; 0 when none stands in the file."""
        return next((self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), 0)


def problems(error: ValidationError, source: Source, overridden: set[KeyPath]) -> list[str]:
    """One line for every mistake, in the order of the file; keys set on the command line are shown as written there."""
    found = []
    for item in error.errors():
        path = tuple(str(part) for part in item["loc"])
        dotted = ".".join(path)
        forced = any(path[: len(key)] == key or key[: len(path)] == path for key in overridden)
        place = f"--{dotted}" if forced else f"{source.where(path)}: {dotted}" if dotted else source.name
        found.append((forced, source.line(path), f"{place}: {_what(item, path)}"))
    return [text for _, _, text in sorted(found)]


def _what(item: ErrorDetails, path: KeyPath) -> str:
    if item["type"] == "extra_forbidden":
        return f"unknown key{_suggestion(path)}"
    if item["type"] == "missing":
        return f"missing (add it, for example `{path[-1]}: {_example(path)}`)"
    message = item["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    shown = repr(item["input"])
    if len(shown) > 60 or isinstance(item["input"], dict | BaseModel):
        return message
    return f"{message}, not {shown}"


def _suggestion(path: KeyPath) -> str:
    """What the unknown key was probably meant to be: a neighbour first, else the same name elsewhere."""
    section = _section(path[:-1])
    neighbours = list(section.model_fields) if section else []
    if guess := did_you_mean(path[-1], neighbours):
        return f" (did you mean {'.'.join([*path[:-1], guess])}?)"
    elsewhere = {key.rpartition(".")[2]: key for key in reversed(list(keys()))}
    if guess := did_you_mean(path[-1], elsewhere):
        return f" (did you mean {elsewhere[guess]}?)"
    return f" (known here: {', '.join(neighbours)})" if neighbours else ""


def _section(path: KeyPath) -> type[Section] | None:
    model: type[Section] = RunConfig
    for part in path:
        field = model.model_fields.get(part)
        inner = section_of(field.annotation) if field else None
        if inner is None:
            return None
        model = inner
    return model


def section_of(annotation: Any) -> type[Section] | None:
    """The section class in `X` or `X | None`, or None for a plain value."""
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def keys(model: type[Section] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the recipe, nearest to the root first within a section."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if inner := section_of(field.annotation):
            yield from keys(inner, f"{prefix}{name}.")


def _example(path: KeyPath) -> str:
    return {"environment": "{name: coding_rlvr}", "name": "coding_rlvr"}.get(path[-1], "VALUE")
