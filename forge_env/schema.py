"""Versions of the files that forge-env writes, stored as `schema: 1` in each file.

A file without a version predates versioning and is read as version 1. A version newer than this forge-env supports is
refused, because the file could be misinterpreted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_env.errors import UsageError

KEY = "schema"
VERSION = 1
"""Version of every kind of file; a kind that changes gets its own constant."""


def with_schema(data: Mapping[str, Any], version: int = VERSION) -> dict[str, Any]:
    """Add the version to a file's content, as its first key."""
    return {KEY: version, **data}


def without_schema(data: Mapping[str, Any], name: str, newest: int = VERSION) -> dict[str, Any]:
    """Check the version of a file's content and remove it.

    Args:
        newest: newest supported version.
    """
    version = data.get(KEY, 1)
    if type(version) is not int or version < 1:
        raise UsageError(f"{name}: {KEY}: {version!r} is not a version", fix=f"write {KEY}: {newest}")
    if version > newest:
        text = f"{name} has version {version}, this forge-env reads up to version {newest}"
        raise UsageError(text, fix="update forge-env")
    return {key: value for key, value in data.items() if key != KEY}
