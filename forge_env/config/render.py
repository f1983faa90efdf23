"""A resolved recipe as YAML in which every key carries its documentation."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from forge_env.config.problems import section_of
from forge_env.config.recipe import RunConfig, Section
from forge_env.config.yaml_format import dump

WIDTH = 110


def render(config: RunConfig) -> str:
    """The recipe with comments; reading it back gives an equal recipe."""
    lines = [f"# {line}" for line in (RunConfig.__doc__ or "").strip().splitlines()]
    return "\n".join([*lines, *_section(config, 0)]) + "\n"


def _section(section: Section, indent: int) -> Iterator[str]:
    pad = " " * indent
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        inner = section_of(field.annotation)
        if inner is not None and indent == 0:
            yield ""
        text = field.description or ""
        for line in textwrap.wrap(text, WIDTH - indent):
            yield f"{pad}# {line}"
        if isinstance(value, Section):
            yield f"{pad}{name}:"
            yield from _section(value, indent + 2)
        else:
            yield from (f"{pad}{line}" for line in _plain(name, value))


def _plain(name: str, value: Any) -> list[str]:
    text = dump({name: value}, WIDTH)
    return text.rstrip("\n").split("\n")
