"""Versions of the files that forge-env writes: `schema: 1` stands in each of them.

A file without a version was written before there were any, and is read as version 1. A newer one than this forge-env
knows is refused: read as if it were old, it could be misunderstood.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_env.errors import UsageError

KEY = "schema"
VERSION = 1
"""Of every kind of file, until one of them changes: that kind then gets a constant of its own."""


def with_schema(data: Mapping[str, Any], version: int = VERSION) -> dict[str, Any]:
    """The content of a file, its version first."""
    return {KEY: version, **data}


def without_schema(data: Mapping[str, Any], name: str, newest: int = VERSION) -> dict[str, Any]:
    """What was read from a file, without its version.

    Args:
        data: the file's content.
        name: what the file is called in messages.
        newest: the newest version that can be read.

    Raises:
        UsageError: the file is of a newer version, or its version is not one.
    """
    version = data.get(KEY, 1)
    if type(version) is not int or version < 1:
        raise UsageError(f"{name}: {KEY}: {version!r} is not a version", fix=f"write {KEY}: {newest}")
    if version > newest:
        text = f"{name} has version {version}, this forge-env reads up to version {newest}"
        raise UsageError(text, fix="update forge-env")
    return {key: value for key, value in data.items() if key != KEY}
