"""What callers hand to a sandbox, checked before it is sent: a mistake of theirs must not look like the program's."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence

from forge_env.errors import UsageError
from sandboxes.images.runner.wire import Header


def surroundings(env: Mapping[str, str] | None, cwd: str | None) -> Header:
    """Environment variables and folder of a program, for its request. Raises `UsageError`."""
    for name, value in (env or {}).items():
        if not _text(name) or not name or "=" in name or not _text(value):
            raise UsageError(
                f"environment variable {name!r} = {value!r}", fix="use strings without NUL, and no '=' in the name"
            )
    if cwd is not None and not _text(cwd):
        raise UsageError(f"working directory {cwd!r}", fix="use a string without NUL")
    return {"env": dict(env or {}), "cwd": cwd}


def command(argv: Sequence[str], env: Mapping[str, str] | None, cwd: str | None) -> Header:
    """A program, its arguments and its surroundings, for its request. Raises `UsageError`."""
    if isinstance(argv, str | bytes) or not argv:
        raise UsageError("argv must be a non-empty list", fix="for a shell line use ['bash', '-c', line]")
    for item in argv:
        if not _text(item):
            raise UsageError(f"argument {item!r} of {argv[0]!r}", fix="use strings without NUL")
    return {"argv": list(argv), **surroundings(env, cwd)}


def encoded(text: str, what: str) -> bytes:
    """Program text or input as the runner reads it. Raises `UsageError` unless it is a string."""
    if not isinstance(text, str):
        raise UsageError(f"{what} is {type(text).__name__}", fix="use a string")
    return text.encode("utf-8", "surrogatepass")


def checked_path(path: str) -> str:
    """A relative path that stays inside the work folder, normalised. Raises `UsageError`."""
    clean = posixpath.normpath(path)
    if not path or posixpath.isabs(path) or clean == ".." or clean.startswith("../") or "\0" in path:
        raise UsageError(f"{path!r} is not inside the work folder", fix="use a relative path without '..'")
    return clean


def _text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value
