"""Texts of agents as HTML that shows them exactly: escaped, with invisible characters drawn as boxes.

Nothing that an agent wrote becomes a link, an image or markup. Control, bidirectional and zero-width characters and
unpaired surrogates are drawn as small boxes with their names, so that no text can look like another.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from forge_env.visible import HIDDEN, PILED

if TYPE_CHECKING:
    from pygments.lexer import Lexer

SHOWN = 20_000
"""Maximum characters of one text on a page; the rest is shown on further pages."""
RUNS = re.compile(rf"(?P<one>{HIDDEN.pattern})(?P=one)*", re.DOTALL)
SHORT = {
    0x00: "NUL", 0x07: "BEL", 0x08: "BS", 0x0D: "CR", 0x1B: "ESC", 0x7F: "DEL", 0xAD: "SHY", 0x061C: "ALM",
    0x200B: "ZWSP", 0x200C: "ZWNJ", 0x200D: "ZWJ", 0x200E: "LRM", 0x200F: "RLM", 0x2028: "LSEP", 0x2029: "PSEP",
    0x202A: "LRE", 0x202B: "RLE", 0x202C: "PDF", 0x202D: "LRO", 0x202E: "RLO", 0x2060: "WJ",
    0x2066: "LRI", 0x2067: "RLI", 0x2068: "FSI", 0x2069: "PDI", 0xFEFF: "BOM",
}  # fmt: skip
"""Common names of characters; the others are shown as U+XXXX."""


def plain(text: str) -> str:
    """Replace invisible characters by U+FFFD, for attributes and files, which can't contain boxes."""
    return HIDDEN.sub("\ufffd", text)


def _box(found: re.Match[str]) -> str:
    number, code = len(found[0]), ord(found["one"])
    about = unicodedata.name(found["one"], "control character")
    times = f"\u00d7{number}" if number > 1 else ""
    return f'<span class="box" title="{escape(about)}">{SHORT.get(code, f"U+{code:04X}")}{times}</span>'


def shown(text: str) -> Markup:
    """Render a text as HTML: escaped, with boxes."""
    html = str(escape(text))
    if not html.isascii():
        html = PILED.sub('<span class="box">combining marks</span>', html)
    return Markup(RUNS.sub(_box, html))


# ---
# Code

LANGUAGES = {
    "python": "python", "py": "python", "python3": "python", "json": "json", "bash": "bash", "sh": "bash",
    "shell": "bash", "diff": "diff", "patch": "diff",
}  # fmt: skip
"""Languages that are highlighted; none is guessed, since some lexers take minutes on a hostile kilobyte."""
CODE_ARGUMENTS = {"code": "python", "command": "bash", "cmd": "bash", "script": "bash", "patch": "diff"}
"""Arguments of tools that contain code, and its language."""
CLASSES = {
    "Keyword": "hk", "Literal.String": "hs", "Literal.Number": "hn", "Comment": "hc", "Name.Function": "hf",
    "Name.Class": "hf", "Name.Builtin": "hb", "Name.Tag": "hb", "Generic.Inserted": "hi", "Generic.Deleted": "hd",
    "Generic.Subheading": "hb",
}  # fmt: skip


@cache
def _lexer(language: str) -> Lexer:
    from pygments.lexers import get_lexer_by_name

    return get_lexer_by_name(language, stripnl=False, ensurenl=False)


def code(text: str, language: str) -> Markup:
    """Render code as HTML, highlighted if its language is known and it isn't too long."""
    known = LANGUAGES.get(language.lower())
    if known is None or len(text) > SHOWN:
        return shown(text)
    parts = []
    for kind, piece in _lexer(known).get_tokens(text):
        name = str(kind).removeprefix("Token.")
        css = next((css for prefix, css in CLASSES.items() if name.startswith(prefix)), None)
        parts.append(shown(piece) if css is None else Markup('<span class="{}">{}</span>').format(css, shown(piece)))
    return Markup("").join(parts)


FENCE = re.compile(r"^```([\w+-]*)[^\n`]*\n(.*?)(?:^```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a message: prose, or a code block with its language."""

    text: Markup
    language: str | None = None
    name: str = ""


def pieces(text: str) -> list[Piece]:
    """Split a message's text into prose and fenced code blocks."""
    result, done = [], 0
    for fence in FENCE.finditer(text):
        if before := text[done : fence.start()].strip("\n"):
            result.append(Piece(shown(before)))
        result.append(Piece(code(fence[2].rstrip("\n"), fence[1]), fence[1] or "text"))
        done = fence.end()
    if rest := text[done:].strip("\n"):
        result.append(Piece(shown(rest)))
    return result


def arguments(text: str, longest: int = SHOWN) -> list[Piece]:
    """Split the arguments of a call into one piece each; text that is not a JSON object is shown unchanged."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        return [Piece(shown(text[:longest]), "text", "not a JSON object")]
    result = []
    for name, value in values.items():
        if isinstance(value, str):
            language = CODE_ARGUMENTS.get(name, "text")
            result.append(Piece(code(value[:longest], language), language, name))
        else:
            result.append(Piece(code(json.dumps(value, ensure_ascii=False)[:longest], "json"), "json", name))
    return result


# ---
# Figures

GLUE = re.compile(r"(?<=\d) (?=%|→)|(?<=%) (?=→)|(?<=[±→]) (?=[\d\u2212])|(?<=\d) (?=±)")


def glued(text: str) -> str:
    """Keep line breaks out of the figures in one of the pages' sentences: 0.5 ± 0.1, 4 %, 0.2 → 0.6."""
    return GLUE.sub("\u00a0", text)


# ---
# Tokens


def _bytes_of_characters() -> dict[str, int]:
    """Map each character of a byte-level vocabulary to its byte (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTES = _bytes_of_characters()
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Vocabulary:
    """Texts of token ids, from a `tokenizer.json` that is byte-level or uses `▁` for a space."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        model = data.get("model") or {}
        words = model.get("vocab") or {}
        pairs: Iterable[tuple[str, int]] = (
            words.items() if isinstance(words, dict) else ((word, token) for token, (word, _) in enumerate(words))
        )
        level = "ByteLevel" in json.dumps([data.get("decoder"), data.get("pre_tokenizer")])
        self._bytes = {token: self._of(word, level) for word, token in pairs}
        added = data.get("added_tokens") or []
        self._bytes |= {item["id"]: item["content"].encode("utf-8", "replace") for item in added}

    @staticmethod
    def _of(word: str, level: bool) -> bytes:
        if level and all(character in BYTES for character in word):
            return bytes(BYTES[character] for character in word)
        if match := BYTE_TOKEN.fullmatch(word):
            return bytes([int(match[1], 16)])
        return word.replace("\u2581", " ").encode("utf-8", "replace")

    def texts(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield the text that each token adds; a character of several tokens is added by its last one."""
        left = b""
        for token in ids:
            left += self._bytes.get(token, f"<{token}>".encode())
            try:
                text, left = left.decode(), b""
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data" and len(left) - error.start < 4:
                    text, left = left[: error.start].decode(errors="replace"), left[error.start :]
                else:
                    text, left = left.decode(errors="replace"), b""
            yield text
