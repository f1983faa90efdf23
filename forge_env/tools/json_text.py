"""JSON as models and programs write it: read within bounds, and every mistake explained so that it can be mended."""

from __future__ import annotations

import json
import re
from typing import Any

from forge_env.types import clean_unicode

MAX_DEPTH = 64
"""Levels of nesting that are read. What is deeper overflows the stack of whatever walks it next."""
HALF = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
"""Half of a surrogate pair, escaped or not; the escape of a whole pair matches too."""
_SHOWN = 24
"""Characters of the text that an explanation quotes."""


class BadJSONError(ValueError):
    """The text can't be read as JSON; the message says what is wrong, and where."""


def read_json(text: str) -> Any:
    """The value that a JSON text spells, without halves of surrogate pairs, which can't be encoded.

    Raises:
        BadJSONError: it is not JSON, is nested more than `MAX_DEPTH` levels deep, or has a number that is too long.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadJSONError(_explained(text, error)) from error
    except ValueError as error:  # Python's limit on the digits of an integer
        raise BadJSONError("a number in it has more than 4,300 digits") from error
    except RecursionError:
        value = None
        deep = True
    else:
        deep = is_deep(value)
    if deep:
        raise BadJSONError(f"it is nested more than {MAX_DEPTH} levels deep")
    return without_halves(value) if HALF.search(text) else value


def _explained(text: str, error: json.JSONDecodeError) -> str:
    at = f"at line {error.lineno}, column {error.colno}"
    rest = text[error.pos : error.pos + _SHOWN]
    if not rest.strip():
        return f"it ends too early, {at}: {error.msg}"
    return f"{error.msg} {at}, at {rest!r}"


def is_deep(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether a JSON value is nested more than `depth` levels deep; takes linear time and no recursion."""
    level: list[Any] = [value]
    for _ in range(depth + 1):
        inside = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        if not inside:
            return False
        level = [each for values in inside for each in values]
    return True


def without_halves(value: Any) -> Any:
    """A JSON value with U+FFFD for every half of a surrogate pair."""
    if isinstance(value, str):
        return clean_unicode(value)
    if isinstance(value, dict):
        return {clean_unicode(key): without_halves(item) for key, item in value.items()}
    return [without_halves(item) for item in value] if isinstance(value, list) else value


def arguments_text(value: Any) -> str:
    """A call's arguments as the text of a JSON object, however the model or the endpoint wrote them.

    No arguments ("", blanks, null) are `{}`, and JSON inside a JSON string is taken out of it. A text that is no JSON
    object stays as it is, for the tool to refuse.

    Args:
        value: the text of the arguments, or the value that it was parsed into.
    """
    if value is None:
        return "{}"
    if not isinstance(value, str):
        if is_deep(value):
            return f"<arguments nested more than {MAX_DEPTH} levels deep>"
        return clean_unicode(json.dumps(value, ensure_ascii=False))
    text = value.strip()
    if not text:
        return "{}"
    if text[0] in '"n' or HALF.search(text):  # a string that holds the JSON, null, or half of a pair
        try:
            inner = read_json(text)
        except BadJSONError:
            return clean_unicode(value)
        return arguments_text(inner)
    return value
