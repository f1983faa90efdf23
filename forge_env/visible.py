"""Safe display of untrusted text on a terminal: control and hidden characters are escaped.

All text written by an agent, a tool or an external model passes through `visible` before it is printed. A terminal
interprets its input: an escape sequence can rewrite earlier lines, set the title or fill the clipboard; a right-to-left
override turns "live" into "evil"; a carriage return hides the text before it. `forge_env.view.text` shows the same
characters in boxes on web pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from forge_env.redaction import redact

HIDDEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0e\ufeff\uffa0\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]|\r(?!\n)"
)
"""Characters that are invisible or that move the surrounding text, except line feeds and tabs."""
MARKS = 4
"""Maximum combining marks on one character; more would overlap neighbouring lines."""
PILED = re.compile(
    rf"(?<=[\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]{{{MARKS}}})"
    r"[\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]+"
)


def visible(text: str) -> str:
    """Make a text safe for a terminal.

    Secrets are redacted, hidden characters are written as Python escapes (`\\x1b`, `\\u202e`), and excessive combining
    marks are removed. Lines are preserved, each ended by a single line feed.
    """
    text = HIDDEN.sub(lambda found: ascii(found[0])[1:-1], redact(text).replace("\r\n", "\n")).replace("\r", "\\r")
    return text if text.isascii() else PILED.sub("", text)


def one_line(text: str, most: int = 200) -> str:
    """Beginning of a text, made `visible`, in one line of at most `most` characters."""
    line = visible(" ".join(redact(text)[: 4 * most].split()))
    return line if len(line) <= most else f"{line[: most - 1]}…"


SAFE_BITS = 2_048
"""Maximum bits of an integer that is written in full (617 digits). Python's limit is 4,300 digits, or down to 640."""


def shown(value: object, most: int = 80) -> str:
    """Return the `repr` of a value in at most `most` characters; never raises.

    An agent's values may be huge, long or deeply nested, so only the beginning is formatted.

    >>> shown([1, "two"]), shown("x" * 100, 8), shown(10**5000)
    ("[1, 'two']", "'xxxx...", '<an integer of about 5001 digits>')
    """
    written = ""
    try:
        for piece in _pieces(value, most):
            written += piece
            if len(written) > most:
                break
    except RecursionError:
        written += "." * most
    return written if len(written) <= most else f"{written[: most - 3]}..."


def _pieces(value: Any, most: int) -> Iterator[str]:
    """Yield `repr(value)` in pieces of at most about `most` characters."""
    if type(value) is int and value.bit_length() > SAFE_BITS:
        yield f"<an integer of about {int(value.bit_length() * 0.30103) + 1} digits>"
    elif type(value) is str and len(value) > most:
        yield repr(redact(value)[: most + 1])
    elif type(value) in (bytes, bytearray) and len(value) > most:
        yield repr(value[: most + 1])
    elif type(value) is list:
        yield from _enclosed("[", value, "]", most)
    elif type(value) is tuple:
        yield from _enclosed("(", value, ",)" if len(value) == 1 else ")", most)
    elif type(value) is set and value:
        yield from _enclosed("{", value, "}", most)
    elif type(value) is frozenset and value:
        yield from _enclosed("frozenset({", value, "})", most)
    elif type(value) is dict:
        yield "{"
        for number, (key, item) in enumerate(value.items()):
            yield ", " if number else ""
            yield from _pieces(key, most)
            yield ": "
            yield from _pieces(item, most)
        yield "}"
    else:
        try:
            text = repr(value)
        except Exception:  # noqa: BLE001 - a third-party class may raise anything
            text = f"<{type(value).__name__}>"
        yield text


def _enclosed(start: str, items: Iterable[object], end: str, most: int) -> Iterator[str]:
    yield start
    for number, item in enumerate(items):
        yield ", " if number else ""
        yield from _pieces(item, most)
    yield end
