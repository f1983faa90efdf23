"""Rewards for answers that are one number."""

from __future__ import annotations

import re

from forge_env.rewards.spans import last_between, without
from forge_env.rewards.text import NO_TARGET

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
_HASHES = re.compile(r"####\s*([^\n]+)")


def parse_number(text: str) -> float | None:
    """The number that `text` is: "1,234.5", "-3", "$5", "3/4", "50%", "\\frac{1}{2}", "x = 7". None: none, or two."""
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
    for pattern in (_BOXED, _HASHES):
        if found := pattern.findall(response):
            return str(found[-1])
    return None


class MathReward:
    """1 for the right number marked as the answer, `partial_credit` for the right number elsewhere, else 0.

    Args:
        tolerance: largest absolute difference that counts as right.
        partial_credit: for a response that holds the number but doesn't mark it.
    """

    def __init__(self, tolerance: float = 1e-6, partial_credit: float = 0.1) -> None:
        self.tolerance = tolerance
        self.partial_credit = partial_credit

    def __call__(self, prompt: str, response: str, target: str | float | None) -> float:
        """Score one response. `ValueError`: the target is not a number, which is the data's fault."""
        if target is None:
            raise ValueError(NO_TARGET)
        wanted = _number_of(target)
        if wanted is None:
            raise ValueError(f"the target {str(target)[:80]!r} is not a number")
        marked = marked_answer(response)
        given = None if marked is None else parse_number(marked)
        if given is not None and abs(given - wanted) <= self.tolerance:
            return 1.0
        unmarked = _HASHES.sub(" ", _BOXED.sub(" ", without(response, *_TAG))).translate(_MINUS)
        found = (_float(match) for match in re.findall(_NUMBER, unmarked))
        near = any(value is not None and abs(value - wanted) <= self.tolerance for value in found)
        return self.partial_credit if near else 0.0


def _number_of(target: str | float) -> float | None:
    if isinstance(target, int | float):
        return float(target)
    marked = marked_answer(target)
    return parse_number(target if marked is None else marked)


def _float(text: str) -> float | None:
    try:
        return float(text.replace(",", "").replace(" ", ""))
    except ValueError:
        return None


def _divide(above: str, below: str) -> float | None:
    numerator, denominator = _float(above), _float(below)
    return None if numerator is None or not denominator else numerator / denominator
