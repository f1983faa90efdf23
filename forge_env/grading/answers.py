"""Small wrong versions of answers that aren't Python: numbers, lists, JSON, words, SQL, commands, files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from decimal import Context, Decimal
from typing import Any

from forge_env.grading.mutants import Mutant, evenly, python_mutants
from forge_env.grading.pieces import Piece

_OPPOSITES = {
    "yes": "no",
    "true": "false",
    "left": "right",
    "up": "down",
    "even": "odd",
    "above": "below",
    "win": "lose",
    "valid": "invalid",
    "positive": "negative",
    "more": "less",
    "first": "last",
    "increase": "decrease",
}
OPPOSITES = _OPPOSITES | {value: key for key, value in _OPPOSITES.items()}
_SQL = {
    "boundary": {"<=": "<", ">=": ">", "<": "<=", ">": ">="},
    "operator": {"=": "<>", "<>": "=", "!=": "=", "AND": "OR", "OR": "AND", "+": "-", "-": "+", "IN": "NOT IN"},
    "call": {"MIN": "MAX", "MAX": "MIN", "SUM": "AVG", "AVG": "SUM", "ASC": "DESC", "DESC": "ASC"},
}
_SHELL = {
    "operator": {"&&": "||", ">>": ">", "head": "tail", "tail": "head", "-gt": "-ge", "-lt": "-le"},
    "call": {"cp": "mv", "mv": "cp", "sort": "cat", "uniq": "cat"},
}
_INSIDE = {
    "boundary": {"<=": "<", ">=": ">", "<": "<=", ">": ">="},
    "operator": {"==": "!=", "!=": "==", "+": "-", "-": "+", "*": "+", "/": "*"},
}
"""Changes inside a quoted program, such as awk's."""
_SETUP = re.compile(r"\s*(#|set\s|mkdir -p\s|chmod \+x\s|cd\s|echo\s|exit\b)")
"""Lines of scripts that often have no effect on the result."""
_TOKEN = re.compile(r"'[^']*'|\"[^\"]*\"|<>|[<>!=]=|&&|\|\||>>|-?[A-Za-z_]\w*|\d+(?:\.\d+)?|\S")
_DIGITS = re.compile(r"\d[\d,]*(?:\.\d+)?")
_EXACT = Context(prec=100_000)
"""Arithmetic of numbers of any length; the operators of `Decimal` round to 28 digits."""


def mutants_of(piece: Piece, *, most: int, seed: str) -> list[Mutant]:
    """Draw wrong versions of a piece, evenly by kind; fewer if it has fewer."""
    if piece.kind == "python":
        return python_mutants(piece.text, most=most, seed=seed, first=piece.near)
    made = {mutant.text: mutant for mutant in _MAKERS[piece.kind](piece.text) if mutant.text != piece.text}
    return evenly(list(made.values()), seed)[:most]


def _swapped(text: str, start: int, end: int, made: str, kind: str) -> Mutant:
    was = text[start:end]
    line = text.count("\n", 0, start) + 1
    shown = [part if len(part) <= 60 else f"{part[:57]}..." for part in (was.strip() or was, made.strip() or "nothing")]
    return Mutant(kind, line, " -> ".join(shown), text[:start] + made + text[end:])


def _number(text: str) -> Iterator[Mutant]:
    """Other numbers instead of the text's last one."""
    hits = list(_DIGITS.finditer(text))
    if not hits:
        return
    start, end = hits[-1].span()
    digits = hits[-1][0]
    value = Decimal(digits.replace(",", ""))
    made = [("off by one", _EXACT.add(value, 1)), *([("magnitude", _EXACT.multiply(value, 10))] if value else [])]
    made += [("off by one", _EXACT.subtract(value, 1))] if value >= 1 else []
    for kind, other in made:
        yield _swapped(text, start, end, f"{other:,f}" if "," in digits else f"{other:f}", kind)
    if value:
        negative = text[:start].rstrip().endswith("-")
        where = (text.rindex("-", 0, start), start, "") if negative else (start, start, "-")
        yield _swapped(text, *where, "sign")


def _list(text: str) -> Iterator[Mutant]:
    """The list with an item dropped, changed or repeated."""
    spans = [hit.span() for hit in re.finditer(r"[^,\s][^,\n]*", text)]
    for index, (start, end) in enumerate(spans):
        cut_from, cut_to = (start, spans[1][0]) if index == 0 else (spans[index - 1][1], end)
        yield _swapped(text, cut_from, cut_to, "", "dropped item")
        item = text[start:end]
        for mutant in _number(item) if _DIGITS.search(item) else _text(item):
            yield _swapped(text, start, end, mutant.text, "changed item")


def _text(text: str) -> Iterator[Mutant]:
    """The text with a word changed or dropped, or a number changed."""
    words = list(re.finditer(r"[^\W\d_]+", text))
    for word in words:
        lower = word[0].lower()
        made = OPPOSITES.get(lower) or f"{word[0][:-1]}{'x' if lower[-1] != 'x' else 'z'}"
        yield _swapped(text, *word.span(), made, "changed word")
    if len(words) > 1:
        for word in words:
            yield _swapped(text, *word.span(), "", "dropped word")
    for hit in _DIGITS.finditer(text):
        other = _EXACT.add(Decimal(hit[0].replace(",", "")), 1)
        yield _swapped(text, *hit.span(), f"{other:f}", "off by one")
    lines = [hit for hit in re.finditer(r"[^\n]*\n?", text) if hit[0].strip()]
    if len(lines) > 1:
        for hit in lines:
            yield _swapped(text, *hit.span(), "", "dropped line")


def _json(text: str) -> Iterator[Mutant]:
    """The value with an entry dropped or changed."""
    try:
        value = json.loads(text)
    except ValueError:
        return
    for kind, change, made in _values(value, ""):
        yield Mutant(kind, 1, change, json.dumps(made))


def _values(value: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    match value:
        case bool():
            yield "constant", f"{path} {value} -> {not value}".strip(), not value
        case int() | float():
            for made in (value + 1, value - 1):
                if json.dumps(made) != json.dumps(value):  # 1e16 + 1 is 1e16
                    yield "off by one", f"{path} {value} -> {made}".strip(), made
        case str():
            for mutant in _number(value) if _DIGITS.fullmatch(value) else _text(value):
                yield mutant.kind, f"{path} {mutant.change}".strip(), mutant.text
        case list() | dict():
            for key in range(len(value)) if isinstance(value, list) else list(value):
                rest = value.copy()
                del rest[key]
                yield "dropped item", f"{path}[{key!r}] dropped", rest
                for kind, change, made in _values(value[key], f"{path}[{key!r}]"):
                    changed = value.copy()
                    changed[key] = made
                    yield kind, change, changed


def _tokens(text: str, tables: dict[str, dict[str, str]]) -> Iterator[Mutant]:
    for hit in _TOKEN.finditer(text):
        token = hit[0]
        for kind, table in tables.items():
            if (made := table.get(token) or table.get(token.upper())) is not None:
                yield _swapped(text, *hit.span(), made, kind)
        if re.fullmatch(r"\d+(?:\.\d+)?", token):
            for step in (1, -1):
                yield _swapped(text, *hit.span(), f"{_EXACT.add(Decimal(token), step):f}", "off by one")
        elif token[0] in "'\"" and re.search(r"[{}()=<>]", token):
            for mutant in _tokens(token[1:-1], _INSIDE):
                start, end = hit.start() + 1, hit.end() - 1
                line = text.count("\n", 0, start) + mutant.line
                yield Mutant(mutant.kind, line, mutant.change, text[:start] + mutant.text + text[end:])
        elif token[0] in "'\"" and len(token) > 2:
            yield _swapped(text, *hit.span(), f"{token[:-1]}x{token[-1]}", "constant")


def _sql(text: str) -> Iterator[Mutant]:
    yield from _tokens(text, _SQL)
    for hit in re.finditer(r"\s+(?:AND|OR)\s+[^()]+?(?=\s+(?:AND|OR|GROUP|ORDER|LIMIT)\b|$)", text, re.IGNORECASE):
        yield _swapped(text, *hit.span(), "", "dropped condition")
    for pattern in (r"\s+WHERE\s+[^()]+?(?=\s+(?:GROUP|ORDER|LIMIT)\b|$)", r"\bDISTINCT\s+"):
        for hit in re.finditer(pattern, text, re.IGNORECASE):
            yield _swapped(text, *hit.span(), "", "dropped condition")


def _shell(text: str) -> Iterator[Mutant]:
    yield from _tokens(text, _SHELL)
    for hit in re.finditer(r"\s*\|\s*(?!\|)[^|;&\n'\"]+(?=$|[|>;\n])", text):
        yield _swapped(text, *hit.span(), " ", "dropped stage")
    parts: Sequence[re.Match[str]] = [hit for hit in re.finditer(r"[^\n]*\n?", text) if hit[0].strip()]
    for hit in parts if len(parts) > 1 else ():
        if not _SETUP.match(hit[0]):
            yield _swapped(text, *hit.span(), "", "dropped line")


_MAKERS = {
    "number": _number, "list": _list, "text": _text, "json": _json, "sql": _sql, "shell": _shell,
}  # fmt: skip
