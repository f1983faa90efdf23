"""Parse JSON written by models and programs, with limits and with errors that explain the mistake."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from forge_env.types import clean_unicode

MAX_DEPTH = 64
"""Maximum nesting depth. Deeper values would overflow the stack of later recursive code."""
HALF = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
"""Half of a surrogate pair, escaped or not; also matches the escape of a complete pair."""
_SHOWN = 24
"""Maximum length of text quoted in an error."""


class BadJSONError(ValueError):
    """The text is not readable JSON; the message names the mistake and its position."""


def read_json(text: str, *, finite: bool = True) -> Any:
    """Parse JSON, replacing unpaired surrogates, which can't be encoded, with U+FFFD. Raises `BadJSONError`.

    `finite` rejects `NaN` and infinite numbers, which Python's parser accepts although they aren't JSON.
    """
    numbers: dict[str, Any] = {"parse_constant": _refuse, "parse_float": _finite} if finite else {}
    try:
        value = json.loads(text, **numbers)
    except json.JSONDecodeError as error:
        raise BadJSONError(_explained(text, error)) from error
    except BadJSONError:
        raise
    except ValueError as error:  # Python's limit on the digits of an integer
        raise BadJSONError("a number in it has more than 4,300 digits") from error
    except RecursionError:
        value = None
        deep = True
    else:
        deep = text.count("{") + text.count("[") > MAX_DEPTH and is_deep(value)
    if deep:
        raise BadJSONError(f"it is nested more than {MAX_DEPTH} levels deep")
    return without_halves(value) if HALF.search(text) else value


def _refuse(constant: str) -> Any:
    raise BadJSONError(f"{constant} is not a JSON value")


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise BadJSONError(f"the number {number[:_SHOWN]} is too large")
    return value


def _explained(text: str, error: json.JSONDecodeError) -> str:
    at = f"at line {error.lineno}, column {error.colno}"
    rest = text[error.pos : error.pos + _SHOWN]
    if not rest.strip():
        return f"it ends too early, {at}: {error.msg}"
    return f"{error.msg} {at}, at {rest!r}"


def is_deep(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether a JSON value is nested more than `depth` levels deep; takes linear time, without recursion."""
    level: list[Any] = [value]
    for _ in range(depth + 1):
        inside = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        if not inside:
            return False
        level = [each for values in inside for each in values]
    return True


def without_halves(value: Any) -> Any:
    """A JSON value with U+FFFD in place of unpaired surrogates."""
    if isinstance(value, str):
        return clean_unicode(value)
    if isinstance(value, dict):
        return {clean_unicode(key): without_halves(item) for key, item in value.items()}
    return [without_halves(item) for item in value] if isinstance(value, list) else value


def arguments_text(value: Any) -> str:
    """A call's arguments, as text or as a parsed value, as the text of a JSON object.

    Missing arguments ("", spaces, null) become `{}`, and JSON inside a JSON string is unwrapped. A text that isn't a
    JSON object is returned unchanged, for the tool to reject.
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
    if text[0] in '"n' or HALF.search(text):  # a string that contains JSON, null, or an unpaired surrogate
        try:
            inner = read_json(text)
        except BadJSONError:
            return clean_unicode(value)
        return arguments_text(inner)
    return value
