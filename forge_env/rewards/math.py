"""Rewards for answers that are a number, or another mathematical expression."""

from __future__ import annotations

import re
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import Any

from forge_env.rewards import equivalence
from forge_env.rewards.equivalence import MAX_CHARS, close
from forge_env.rewards.quantities import decimal, plain, quantity, spelled, split_unit
from forge_env.rewards.reasons import explain
from forge_env.rewards.spans import last_between, without
from forge_env.rewards.text import EMPTY_TARGET, NO_TARGET
from forge_env.tools.turns import split_thoughts
from forge_env.visible import shown

_TAG = ("<answer>", "</answer>")
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\?[{}]")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s*([-+]?[\d.]*\d[^\s{}$\\]*|[A-Za-z](?![^\s.,{}$\\]))")
"""A box without braces around a number or a letter: `\\boxed 5`."""
_MOST_BETWEEN = 40
"""Maximum characters between two boxes of a list."""
_BETWEEN_BOXES = re.compile(r"[\s$]*(?:[,;]|,?\s*(?:\\text\s*\{)?\s*(?:and|or)\s*\}?)[\s$]*")
_HASHES = re.compile(r"####\s*([^\n]+)")
_LEAD = re.compile(r"(?:the\s+)?(?:final\s+)?answer(?:\s+is\b|\s*:)[\s:]*", re.IGNORECASE)
_WRAPPERS = (("**", "**"), ("`", "`"), ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_MAX_WRAPPERS = 10
_NUMBER = re.compile(r"[-+]?\s?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?")
_THOUSANDS = re.compile(r"[-+]?\s?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?")
_BOXED = re.compile(r"\\(?:boxed|fbox)\{((?:[^{}]|\{[^{}]*\})*)\}")
_MINUS = re.compile("\u2212")
_CHOICE = re.compile(r"\(?([A-J])\)?[.:)]?")
_CHOSEN = re.compile(r"(?:\(([A-J])\)|([A-J])[).:])\s*(?=\S)")
_LITERAL = re.compile(r"-?\w+_\(?\{?\d+\}?\)?|\d+(?::\d+)+(?: ?[apAP]\.?[mM])?")
"""Numbers in another base, ratios and times: compared as text."""
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "sixteen": 16}
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}[\s,.]+[A-Za-z]{2,}")
_SIGNS = re.compile(r"[0-9A-Za-z]")
_SEVERAL = re.compile(r"(?<![\\A-Za-z])(?:or|and)(?![A-Za-z])")
_FORMULA = re.compile(r"[\\^=_+*/<>()\[\]{}|\d]")
_FUNCTIONS = {"and", "sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "infty", "inf", "infinity"}
_FUNCTIONS |= {"arcsin", "arccos", "arctan", "max", "min"}


def parse_number(text: str) -> float | None:
    """Parse a number: "1,234.5", "-3", "$5", "3/4", "50%", "2 \\frac{1}{2}", "x = 7". None: not exactly one number.

    A unit may follow: "18 apples", "5 cm^2", `18\\text{ m}`. A single letter is a variable: "4n" and "18 m" are not
    numbers.

    Args:
        text: a number in mathematical notation, LaTeX or money, of at most 1,000 characters.

    Examples:
        >>> import forge_env as fe
        >>> fe.rewards.parse_number("$1,234.5"), fe.rewards.parse_number("18 or 19")
        (1234.5, None)
    """
    number = None if len(text) > MAX_CHARS else quantity(text.rpartition("=")[2])
    try:
        return None if number is None else float(number.value)
    except OverflowError:
        return None


def marked_answer(response: str) -> str | None:
    """Extract the marked answer of a response: the last `<answer>` tag, `\\boxed{}` or `####` line.

    Boxes joined by a comma, "and" or "or" form one answer: a list.
    """
    if (tagged := last_between(response, *_TAG)) is not None:
        return tagged
    if (boxed := last_boxed(response)) is not None:
        return boxed
    lines = _HASHES.findall(response)
    return str(lines[-1]) if lines else _bare_boxed(response)


def last_boxed(text: str) -> str | None:
    """Return the content of the last closed `\\boxed{...}` or `\\fbox{...}`, or of all boxes if they form a list."""
    contents: dict[str, None] = {}  # in order, each once
    end = 0
    starts: list[re.Match[str] | None] = []  # openings of boxes; None for other braces
    for brace in _BRACE.finditer(text):
        kind = brace.group()
        if kind == "}":
            start = starts.pop() if starts else None
            if start is not None and (inside := text[start.end() : brace.start()]).strip():
                between = text[end : start.start()]
                if not (len(between) <= _MOST_BETWEEN and _BETWEEN_BOXES.fullmatch(between)):
                    contents = {}
                contents[inside] = None
                end = brace.end()
        elif kind not in (r"\{", r"\}"):
            starts.append(brace if kind != "{" else None)
    return ", ".join(contents) if contents else None


def _bare_boxed(text: str) -> str | None:
    """Content of the last box without braces."""
    bare = _BARE_BOX.findall(text)
    return str(bare[-1]).rstrip(".,") if bare else None


def opened(text: str) -> str:
    """Unwrap a marked answer: remove a box, bold, formula delimiters, "The answer is"."""
    for _ in range(_MAX_WRAPPERS):
        before = text
        boxed = last_boxed(text)
        text = (boxed if boxed is not None else _bare_boxed(text)) or text
        text = text.strip()
        text = text[:-1].rstrip() if text.endswith(".") and not text.endswith("..") else text
        if len(text) > MAX_CHARS:
            continue
        text = _LEAD.sub("", text, count=1) if _LEAD.match(text) else text
        for opening, closing in _WRAPPERS:
            inside = text[len(opening) : -len(closing)]
            if (
                text.startswith(opening)
                and text.endswith(closing)
                and inside
                and opening not in inside.replace(r"\$", "")
            ):
                text = inside
                break
        if text == before:
            break
    return text


@dataclass(eq=False)
class MathReward:
    """1 for the right answer marked as such, `partial_credit` for the right number elsewhere, else 0.

    Numbers are compared exactly, up to `tolerance`; words and letters of choices as text; everything else (fractions
    of roots, formulas, sets, intervals, matrices; LaTeX or plain) by math-verify in separate processes
    (`forge_env.rewards.equivalence`), in which case the call returns an awaitable. No response raises an exception.
    Reasoning (`<think>...</think>` at the beginning) is not part of the answer.

    Examples:
        >>> import forge_env as fe
        >>> reward = fe.rewards.MathReward()
        >>> reward("", "It is <answer>3/4</answer>.", "0.75"), reward("", "It may be 0.75.", "0.75")
        (1.0, 0.1)
    """

    tolerance: float = 1e-6
    """Maximum absolute difference of numbers; for targets below 0.01, a hundred times this, relative."""
    partial_credit: float = 0.1
    """Score of a response that contains the right number but doesn't mark it."""

    def __call__(self, prompt: str, response: str, target: str | float | None) -> float | Coroutine[Any, Any, float]:
        """Score one response.

        Raises:
            ValueError: there is no target.
        """
        wanted = _target(target)
        _, response = split_thoughts(response)
        marked = marked_answer(response)
        given = None if marked is None else opened(marked)
        if given is None or len(given) > MAX_CHARS:
            return self._unmarked(wanted, response)
        same = _same(wanted, given, self.tolerance)
        if same is None:
            return self._compared(wanted, given, response)
        return 1.0 if same else self._unmarked(wanted, response)

    def check_target(self, target: object) -> str | None:
        """Why no answer can equal `target`, or None if one can. Called when tasks are loaded.

        Args:
            target: the true answer of a task.
        """
        if target is None:
            return NO_TARGET
        if not isinstance(target, str | Real):
            return f"the target is a {type(target).__name__}, not a text or a number"
        wanted = _target(target)
        if not spelled(wanted[:MAX_CHARS]):
            return EMPTY_TARGET
        if len(wanted) > MAX_CHARS:
            return f"the target {shown(wanted)} has more than {MAX_CHARS} characters"
        return None if _balanced(wanted) else f"the target {shown(wanted)} is truncated: its brackets don't match"

    async def _compared(self, wanted: str, given: str, response: str) -> float:
        (one, unit), (two, other) = split_unit(plain(wanted)), split_unit(plain(given))
        alike = not unit or not other or unit == other
        if alike and await equivalence.equivalent(one, two, self.tolerance):
            return 1.0
        return self._unmarked(wanted, response)

    def _unmarked(self, wanted: str, response: str) -> float:
        marked = marked_answer(response)
        if marked is None:
            explain("no answer is marked" if response.strip() else "no answer", [f"expected {shown(wanted)}"])
        else:
            explain("wrong answer", [f"expected {shown(wanted)}, got {shown(opened(marked))}"])
        number = quantity(wanted)
        if number is None:
            return 0.0
        text = _MINUS.sub("-", _HASHES.sub(" ", _BOXED.sub(" ", without(response, *_TAG))))
        near = any(close(number.value, value, self.tolerance) for value in _numbers(text))
        return self.partial_credit if near else 0.0


def _target(target: object) -> str:
    if target is None:
        raise ValueError(NO_TARGET)
    is_plain = isinstance(target, str | Real) and not isinstance(target, int)  # an int may have any number of digits
    text = str(target) if is_plain else shown(target, 2 * MAX_CHARS)
    marked = marked_answer(text)
    return opened(text if marked is None else marked)


def _numbers(text: str) -> Iterator[Fraction]:
    for number in _NUMBER.findall(text):
        for part in [number] if _THOUSANDS.fullmatch(number) else number.split(","):
            if (value := decimal(part)) is not None:
                yield value


def _same(target: str, given: str, tolerance: float) -> bool | None:
    """Whether two answers are equal, compared as numbers or text; None if algebra must decide."""
    one, two = spelled(target), spelled(given)
    wanted, offered = quantity(target), quantity(given)
    if wanted and offered:
        alike = not wanted.unit or not offered.unit or wanted.unit == offered.unit
        return alike and close(wanted.value, offered.value, tolerance)
    if one == two and not wanted and not offered:
        return bool(one)
    if _LITERAL.fullmatch(one) or _LITERAL.fullmatch(two):
        return _as_literal(one) == _as_literal(two)
    if len(one) == len(two) == 1:
        return False  # different variables, or different case: E is not e
    if choice := _CHOICE.fullmatch(one):
        return choice.group(1) == _chosen(two)
    if (choice := _CHOICE.fullmatch(two)) and _CHOSEN.match(one):
        return choice.group(1) == _chosen(one)
    if not _SIGNS.search(one) or not _SIGNS.search(two):
        return False
    if _is_words(target) or _is_words(given):
        return one.casefold() == two.casefold()
    return False if wanted and _SEVERAL.search(two) else None


def _as_literal(text: str) -> str:
    """Normalize a time, a ratio or a number in another base.

    "2:30 p.m." becomes "2:30pm", "3 to 2" becomes "3:2", and `(101)_{\\text{two}}` becomes `101_2`.
    """
    text = re.sub(r"(?<=\d) to (?=\d)", ":", re.sub(r"\((\w+)\)(?=_)", r"\1", text))
    text = re.sub(r"_\{?\s*([a-z]+)\s*\}?", lambda base: f"_{_BASES.get(base[1], base[1])}", text)
    text = re.sub(r" |(?<=[ap])\.(?=m)|(?<=[ap]m)\.", "", text, flags=re.IGNORECASE)
    return text.casefold() if ":" in text else text


def _chosen(text: str) -> str | None:
    """Letter of a choice: "(B)", "B." and "B) 18" choose B."""
    if match := _CHOICE.fullmatch(text):
        return match.group(1)
    match = _CHOSEN.match(text)
    return match and (match.group(1) or match.group(2))


def _balanced(text: str) -> bool:
    """Whether brackets match; intervals such as `(0, 1]` and `]0, 1[` count as matching."""
    braces = re.sub(r"\\[{}]", "", text)
    if text.startswith("]") or text.endswith("["):
        text = f"[{text[1:-1]}]"
    rounded = text.count("(") + text.count("[") <= text.count(")") + text.count("]")
    return braces.count("{") == braces.count("}") and rounded


def _is_words(text: str) -> bool:
    """Whether a text is natural language, whose letters would be variables in mathematics."""
    text = spelled(split_unit(plain(text))[0])
    words = [word for word in _WORD.findall(text) if word.lower() not in _FUNCTIONS]
    return bool(words) and (_FORMULA.search(text) is None or _PROSE.search(text) is not None)
