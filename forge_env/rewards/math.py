"""Rewards for answers that are a number, or another mathematical expression."""

from __future__ import annotations

import re
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from forge_env.errors import UsageError
from forge_env.rewards import equivalence
from forge_env.rewards.spans import last_between, without
from forge_env.rewards.text import NO_TARGET
from forge_env.visible import shown

_NUMBER = r"[-+]?\s?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?"
_PLAIN = re.compile(rf"({_NUMBER})(?:\s*/\s*({_NUMBER}))?\s*(%?)")
_FRACTION = re.compile(rf"([-+]?)\\d?frac\{{({_NUMBER})\}}\{{({_NUMBER})\}}")
_DECORATION = re.compile(r"[$\u20ac\u00a3\\{}]")
_WORDS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}")
_GOES_ON = re.compile(r"\s*[-+*/^\u00d7\u00b7]\s*[\d(]|.*(?<![\w^.])\d", re.DOTALL)
"""After a number: a calculation, or a second number ("18 or 19"), not the 2 of "18 m^2"."""
_MINUS = str.maketrans({"\u2212": "-"})
_TAG = ("<answer>", "</answer>")
_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
_BRACE = re.compile(r"\\boxed\s*\{|\\?[{}]")
_FORMULA = re.compile(r"[\\^=<>()\[\]{},+*/]")
_SYMBOL = re.compile(
    r"\\(?:pi|sqrt|infty|cup|cap|pm|mp|in|leq?|geq?|ne|log|ln|sin|cos|tan|cdot|times|binom)\b|\d\s?[xyz]\b|\b(?:or|pi|sqrt)\b"
)
"""What `parse_number` would take for a number with a unit."""
_HASHES = re.compile(r"####\s*([^\n]+)")


def parse_number(text: str) -> float | None:
    """The number that `text` is: "1,234.5", "-3", "$5", "3/4", "50%", "\\frac{1}{2}", "x = 7". None: none, or two.

    Args:
        text: a number in words of mathematics, LaTeX or money; the first 200 characters are read.

    Examples:
        >>> import forge_env as fe
        >>> fe.rewards.parse_number("$1,234.5"), fe.rewards.parse_number("18 or 19")
        (1234.5, None)
    """
    text = text.strip()[:200].translate(_MINUS)
    bare = _WORDS.sub(" ", text)  # units, unless the number itself is in there
    text = (bare if any(map(str.isdigit, bare)) else _WORDS.sub(r"\1", text)).rpartition("=")[2].strip()
    if match := _FRACTION.fullmatch(text):
        sign, above, below = match.groups()
        value = _divide(above, below)
        return None if value is None else (-value if sign == "-" else value)
    text = _DECORATION.sub("", text).strip()
    match = _PLAIN.match(text)
    if match is None or len(match.group(1).strip("+- ")) == 0 or _GOES_ON.match(text, match.end()):
        return None
    value = _divide(match.group(1), match.group(2)) if match.group(2) else _float(match.group(1))
    return value / 100 if value is not None and match.group(3) else value


def marked_answer(response: str) -> str | None:
    """What the response marks as its answer: the last `<answer>` tag, `\\boxed{}` or `####` line."""
    if (tagged := last_between(response, *_TAG)) is not None:
        return tagged
    if (boxed := last_boxed(response)) is not None:
        return boxed
    found = _HASHES.findall(response)
    return str(found[-1]) if found else None


def last_boxed(text: str) -> str | None:
    """What the `\\boxed{...}` that ends last holds, braces in it included."""
    found = None
    starts: list[int | None] = []  # of the braces that are open; None where they are not of a box
    for brace in _BRACE.finditer(text):
        kind = brace.group()
        if kind == "}":
            start = starts.pop() if starts else None
            found = found if start is None else text[start : brace.start()]
        elif kind not in (r"\{", r"\}"):
            starts.append(brace.end() if kind != "{" else None)
    return found


def is_expression(target: str) -> bool:
    """Whether a target is more than a number: `\\frac{\\pi}{2}`, `x^2 - 1`, `(0, 1]`, `\\{1, 2\\}`."""
    return (parse_number(target) is None and bool(_FORMULA.search(target))) or bool(_SYMBOL.search(target))


@dataclass(eq=False)
class MathReward:
    """1 for the right answer marked as such, `partial_credit` for the right number elsewhere, else 0.

    The target decides how answers are compared: with a number, as numbers; with another expression (fractions of
    roots, formulas, sets, intervals, matrices; LaTeX or plain), as math-verify does, which the extra `math` installs.
    That runs in processes beside this one (`forge_env.rewards.equivalence`), and the call returns an awaitable then.

    Examples:
        >>> import forge_env as fe
        >>> reward = fe.rewards.MathReward()
        >>> reward("", "It is <answer>3/4</answer>.", "0.75"), reward("", "It may be 0.75.", "0.75")
        (1.0, 0.1)
    """

    tolerance: float = 1e-6
    """Largest absolute difference of numbers that counts as right."""
    partial_credit: float = 0.1
    """For a response that holds the number but doesn't mark it."""

    def __call__(self, prompt: str, response: str, target: str | float | None) -> float | Coroutine[Any, Any, float]:
        """Score one response.

        Raises:
            ValueError: the target is neither a number nor an expression, which is the data's fault.
            UsageError: the target is an expression, and math-verify isn't installed.
        """
        if target is None:
            raise ValueError(NO_TARGET)
        if isinstance(target, str):
            marked = marked_answer(target)
            bare = target if marked is None else marked
            if is_expression(bare):
                return self._compared(bare, response)
            wanted = parse_number(bare)
        else:
            wanted = float(target)
        if wanted is None:
            raise ValueError(f"the target {shown(target)} is not a number")
        marked = marked_answer(response)
        given = None if marked is None else parse_number(marked)
        if given is not None and abs(given - wanted) <= self.tolerance:
            return 1.0
        unmarked = _HASHES.sub(" ", _BOXED.sub(" ", without(response, *_TAG))).translate(_MINUS)
        found = (_float(match) for match in re.findall(_NUMBER, unmarked))
        near = any(value is not None and abs(value - wanted) <= self.tolerance for value in found)
        return self.partial_credit if near else 0.0

    async def _compared(self, target: str, response: str) -> float:
        if not equivalence.available():
            raise UsageError(
                f"the target {target[:80]!r} is more than a number: comparing it needs math-verify",
                fix="pip install 'forge-env[math]'",
            )
        given = marked_answer(response)
        try:
            return float(given is not None and await equivalence.equivalent(target, given))
        except equivalence.UnreadableError:
            raise ValueError(f"the target {target[:80]!r} is not an expression that can be compared") from None


def _float(text: str) -> float | None:
    try:
        return float(text.replace(",", "").replace(" ", ""))
    except ValueError:
        return None


def _divide(above: str, below: str) -> float | None:
    numerator, denominator = _float(above), _float(below)
    return None if numerator is None or not denominator else numerator / denominator
