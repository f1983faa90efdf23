"""Equivalence of mathematical expressions, decided by math-verify.

Algebra on a model's answer may take any amount of time and memory. Therefore it runs in separate processes (`main`)
that have a memory limit, receive only short texts, and are killed if a comparison takes too long. Texts are parsed by a
grammar of LaTeX; nothing in them is evaluated as Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

MAX_CHARS = 1_000
"""Maximum length of an answer; longer ones are wrong."""
MAX_DEPTH = 40
"""Maximum nesting of brackets; deeper answers are wrong."""
CPU_S = 4
"""Maximum CPU seconds of a comparison, independent of the machine's load; beyond it, answers count as different."""
WALL_S = 120.0
"""Maximum wall-clock seconds of a comparison, and of starting a process."""
MEMORY_MB = 2_048
_PROCESSES = 4


async def equivalent(target: str, given: str, tolerance: float) -> bool:
    """Whether a model's answer is equivalent to the right one; False if the comparison exceeds a limit.

    Numbers may differ by `tolerance` (see `close`).
    """
    if any(len(text) > MAX_CHARS or _depth(text) > MAX_DEPTH for text in (target, given)):
        return False
    request = json.dumps([target, given, tolerance]).encode() + b"\n"
    return await asyncio.get_running_loop().run_in_executor(_threads(), _ask, request) == "same"


def close(one: Any, two: Any, tolerance: Any) -> bool:
    """Whether two numbers differ by at most `tolerance`; below 0.01 relative to `one`, by `100 * tolerance`."""
    return bool(abs(one - two) <= tolerance * min(1, 100 * abs(one)))


def _depth(text: str) -> int:
    return max(accumulate((sign in _OPENING) - (sign in _CLOSING) for sign in text), default=0)


# --- the calling side: one thread for each process


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_PROCESSES, os.cpu_count() or 1), thread_name_prefix="math")


class _Thread(threading.local):
    process: subprocess.Popen[bytes] | None = None
    channel: socket.socket


_THREAD = _Thread()


def _ask(request: bytes) -> str | None:
    """Request a comparison from this thread's process; None if it died, or was killed because it took too long."""
    if _THREAD.process is None:
        _THREAD.channel, theirs = socket.socketpair()
        with theirs:  # -P: modules next to this file must not shadow the standard library
            command = [sys.executable, "-P", __file__]
            _THREAD.process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, start_new_session=True
            )
        _THREAD.channel.settimeout(WALL_S)
        _answer(_THREAD.channel)
    try:
        _THREAD.channel.sendall(request)
        return _answer(_THREAD.channel)
    except (OSError, EOFError):  # includes time-outs
        _THREAD.process.kill()
        _THREAD.process.wait()
        _THREAD.channel.close()
        _THREAD.process = None
        return None


def _answer(channel: socket.socket) -> str:
    word = bytearray()
    while not word.endswith(b"\n"):
        if not (received := channel.recv(64)):
            raise EOFError
        word += received
    return word.decode().strip()


# --- the worker process


def main() -> None:
    """Answer requests until the other side closes the channel."""
    if sys.platform == "linux":  # macOS can't limit it
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MB << 20,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import logging

    logging.disable()  # math-verify warns about a missing time limit, but this process has one
    compare = _comparison()
    with contextlib.suppress(OSError), socket.socket(fileno=0) as channel, channel.makefile("r") as lines:
        channel.sendall(b"ready\n")
        for line in lines:
            limit_s = int(time.process_time()) + 1 + CPU_S  # the kernel enforces it even if the caller has given up
            resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))
            try:
                word = "same" if compare(*json.loads(line)) else "different"
            except (MemoryError, RecursionError):
                return
            except Exception:  # noqa: BLE001 - algebra may raise anything on a model's text
                word = "different"
            channel.sendall(word.encode() + b"\n")


def _comparison() -> Callable[[str, str, float], bool]:
    from math_verify import verify

    read = lru_cache(maxsize=512)(_reader())

    def compare(target: str, given: str, tolerance: float) -> bool:
        target, given = _standard(target), _standard(given)
        target, given = _interval(target, given), _interval(given, target)
        target, given = _tuple(target, given), _tuple(given, target)
        if brackets(target) != brackets(given) and not (_INEQUALITY.search(target) or _INEQUALITY.search(given)):
            return False
        wanted = read(target)
        offered = None if wanted is None else read(given)
        if wanted is None or offered is None or _repeats(wanted) != _repeats(offered):
            return False
        if len(_equations(wanted, is_lone=False)) > len(_equations(offered)):
            return False
        if not verify(wanted, offered, timeout_seconds=None, allow_set_relation_comp=True):
            return False
        return not _far_apart(wanted, offered, tolerance)

    return compare


def _reader() -> Callable[[str], Any]:
    """A function that parses text into a SymPy object, or None if it can't parse all of it."""
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    # Units are already removed: the library's list of units contains `c`, `m` and `t`, which may be variables.
    spelling = NormalizationConfig(boxed="none", units=False, malformed_operators=True, nits=True)
    conversion = ConversionConfig(lowercase_symbols=False)

    def read(text: str) -> Any:
        exact, *approximate = _APPROXIMATELY.split(text)
        if exact.strip() and approximate:
            value = read(exact)
            return value if value is not None and all(_approximates(value, each) for each in approximate) else None
        latex = as_latex(text)
        if _MISREAD.search(latex):
            return None
        try:
            expression = latex2sympy(latex, None, True, False, spelling, conversion)
            return _interpreted(expression, has_imaginary=not _INDEXED.search(latex))
        except (MemoryError, RecursionError):
            raise
        except Exception:  # noqa: BLE001 - the parser raises bare Exceptions for invalid text
            return None

    return read


def _interpreted(expression: Any, has_imaginary: bool) -> Any:
    """`expression` with `i` as the imaginary unit, and `2 + 3 = 5` as 5: math-verify equates all such equations."""
    from latex2sympy2_extended.sets import FiniteSet
    from sympy import Eq, Expr, I, MatrixBase, Symbol

    if isinstance(expression, FiniteSet):
        return FiniteSet(*(_interpreted(element, has_imaginary) for element in expression._unsorted_args))
    if isinstance(expression, Eq):
        left, right = (_interpreted(side, has_imaginary) for side in expression.args)
        return Eq(left, right, evaluate=False) if expression.free_symbols else right
    if has_imaginary and isinstance(expression, Expr | MatrixBase):
        letter = Symbol("i", real=True)
        return expression.subs(letter, I) if letter in expression.free_symbols else expression
    return expression


def _equations(expression: Any, is_lone: bool | None = None) -> list[Any]:
    """Equations in an expression; with `is_lone`, only those with (or without) a lone name on the left.

    A lone name is a single variable or function. math-verify takes the right side of an equation for the answer, even
    of `x + y = 2`.
    """
    from sympy import Derivative, Eq, Pow, Symbol
    from sympy.core.function import AppliedUndef

    def named(side: Any) -> bool:
        if isinstance(side, Pow):  # f', or the inverse of f
            base, power = side.args
            return named(base) and ("prime" in str(power) or (power == -1 and isinstance(base, AppliedUndef)))
        return isinstance(side, Symbol | AppliedUndef | Derivative)

    equations = [each for each in (expression, *_elements(expression)) if isinstance(each, Eq)]
    if is_lone is None:
        return equations
    return [each for each in equations if named(each.lhs) == is_lone]


def _approximates(value: Any, text: str) -> bool:
    """Whether a decimal number equals `value` to its last digit; in `5 \\approx 6` it doesn't."""
    from sympy import Expr, Rational

    match = _DECIMAL.fullmatch(re.sub(r"\\text\s*\{[^{}\d]*\}$", "", text.strip()).rstrip(" .").strip())
    if match is None or not isinstance(value, Expr) or value.free_symbols:
        return False
    scale = Rational(10) ** (int((match["ten"] or "0").strip("{} ")) - 2 * bool(match["percent"]))
    digits = match["number"].replace(",", "")
    places = len(digits.partition(".")[2])
    last = scale * Rational(10) ** -places
    exact, rounded = value.evalf(30), Rational(digits) * scale
    is_cut = places > 0 and abs(rounded) <= abs(exact)
    return bool(abs(exact - rounded) < last * (1 if is_cut else Rational(51, 100)))


def _standard(text: str) -> str:
    """Rewrite notations that the parser doesn't know.

    `\\{x \\mid x > 2\\}` becomes `x > 2`, `]0; 1]` becomes `(0, 1]`, `(x, y) = (1, 2)` becomes `(1, 2)`, and
    `1 \\pm 2` becomes `1+2, 1-2`.
    """
    text = _NAMED_TUPLE.sub("", _BUILDER.sub(r"\g<condition>", text).replace(";", ","))
    text = _UNION.sub(r"\1\\cup ", _INFINITY.sub(r"\\infty ", text))
    if _PLUS_MINUS.search(text) and not _LEADING_PLUS_MINUS.match(text) and "," not in text:
        above, below = (_MINUS_PLUS.sub(two, _PLUS_MINUS.sub(one, text)) for one, two in ("+-", "-+"))
        text = f"{above}, {below}"
    return _TURNED.sub(lambda match: f"{_LEFT[match[1]]}{match[2]}{_RIGHT[match[3]]}", text)


def _interval(text: str, other: str) -> str:
    """Convert inequalities joined by "or" to a union of intervals, and all reals to an interval, unless `other` is one.

    Other texts are returned unchanged.
    """
    if _REALS.fullmatch(text):
        return r"(-\infty,\infty)"
    parts = _ALTERNATIVE.split(text)
    matches = [_RAY.fullmatch(part) for part in parts]
    if len(parts) == 1 or _INEQUALITY.search(other) or len({match and match["name"] for match in matches}) > 1:
        return text
    rays = []
    for match in matches:
        if match is None:
            return text
        end = match["end"].strip()
        closed = (match["sign"].startswith("\\") and match["sign"][2] == "e") or match["sign"] in "\u2264\u2265"
        below = match["sign"] in ("<", "\u2264") or match["sign"].startswith("\\l")
        rays.append(rf"(-\infty,{end}{']' if closed else ')'}" if below else rf"{'[' if closed else '('}{end},\infty)")
    return r"\cup ".join(rays)


def _tuple(text: str, other: str) -> str:
    """Convert `x = 1, y = 2` to `(1, 2)` if `other` is a tuple; other texts are returned unchanged."""
    pairs = [_MEMBER_VALUE.fullmatch(part) for part in _ALSO.split(text)]
    values = {pair["name"]: pair["value"].strip() for pair in pairs if pair}
    if brackets(other) != "()" or len(values) < len(pairs) or len(values) < 2 or list(values) != sorted(values):
        return text
    return f"({', '.join(values.values())})"


def _repeats(expression: Any) -> Counter[str]:
    """Count the repeated elements of a list, which sets drop: 1, 1, 2 is not 1, 2."""
    return Counter({text: n for text, n in Counter(map(str, _elements(expression))).items() if n > 1})


def _elements(expression: Any) -> Sequence[Any]:
    return getattr(expression, "_unsorted_args", ()) if type(expression).__name__ == "FiniteSet" else ()


def _far_apart(one: Any, two: Any, tolerance: float) -> bool:
    """Whether both are numbers that are not close: math-verify rounds to six decimals and equates 1e-9 and 2e-9."""
    from sympy import Expr

    if not (isinstance(one, Expr) and isinstance(two, Expr)) or one.free_symbols or two.free_symbols:
        return False
    first, second = one.doit().evalf(30), two.doit().evalf(30)
    if not (first.is_number and second.is_number and first.is_finite and second.is_finite):
        return False
    return not close(first, second, tolerance)


_WORDS = re.compile(r"(?<![\\A-Za-z])(sqrt|sin|cos|tan|log|ln|exp|pi|infty)(?![A-Za-z])")
_OR = re.compile(r"\s*,?\s*(?:\\(?:text|mbox|mathrm)\{\s*(?:or|and)\s*\}|(?<![A-Za-z\\])(?:or|and)(?![A-Za-z]))\s*")
_ROOT = re.compile(r"\\sqrt\s*\(([^()]*)\)")
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
_MEMBER = re.compile(r"^\s*(?:[A-Za-z]|\([A-Za-z](?:\s*,\s*[A-Za-z])*\))\s*(?:=|\\in\b|\u2208)\s*")
_NAMED_TUPLE = re.compile(r"^\s*\([A-Za-z](?:_\d)?(?:\s*,\s*[A-Za-z](?:_\d)?)+\)\s*=\s*(?=\()")
_PLUS_MINUS = re.compile(r"\\pm(?![a-z])")
_MINUS_PLUS = re.compile(r"\\mp(?![a-z])")
_LEADING_PLUS_MINUS = re.compile(r"\s*(?:[A-Za-z]\s*=\s*)?\\pm")
"""math-verify reads these itself."""
_INFINITY = re.compile(r"(?<![A-Za-z\\])oo(?![A-Za-z])")
_UNION = re.compile(r"([\])]\s*)U(?=\s*[(\[])")
_BUILDER = re.compile(
    r"^\s*\\?\{\s*[A-Za-z]\s*(?:\\in\s*\\(?:mathbb\s*\{\s*R\s*\}|R)\s*)?(?:\\mid(?![a-z])|[|:])(?P<condition>.*?)\\?\}\s*$"
)
_TURNED = re.compile(r"([\[\](])\s*([^\[\](),]+,[^\[\](),]+?)\s*([\[\])])")
"""An interval in which a turned bracket may mark an excluded end, as in France: `]0, 1[`."""
_LEFT = {"]": "(", "[": "[", "(": "("}
_RIGHT = {"[": ")", "]": "]", ")": ")"}
_MISREAD = re.compile(r"\d\s*_|(?<!\\):|\d\s+\d|\\[a-z]?dots|\.\.\.|\\(?:text|math)[a-z]*\s*\{[^{}]*\d")
"""Text that the parser misreads: `204_5` as 204, `2:1` as 2, `1 2` as 3, `1, \\ldots` and `1\\text{2}` as 1."""
_ANGLE = re.compile(r"(?:m\s*)?\\angle\s*([A-Z]+)")
_APPROXIMATELY = re.compile(r"\\approx(?:eq)?(?![a-z])|\u2248")
_DECIMAL = re.compile(
    r"(?P<number>-?(?:\d[\d,]*\.?\d*|\.\d+))(?:\s*(?:\\times|\\cdot)\s*10\s*\^\s*(?P<ten>\{\s*-?\d{1,3}\s*\}|\d))?"
    r"\s*(?P<percent>%)?"
)
_MEMBER_VALUE = re.compile(r"\s*(?P<name>[A-Za-z](?:_\d)?)\s*=(?P<value>[^=,]+)")
_ALSO = re.compile(r"\s*,?\s*(?:\\text\s*\{\s*and\s*\}|(?<![A-Za-z\\])and(?![A-Za-z]))\s*|,")
_REALS = re.compile(r"\s*(?:[A-Za-z]\s*\\in\s*)?\\(?:mathbb\s*(?:\{\s*R\s*\}|R)|R)\s*")
_ALTERNATIVE = re.compile(r"\s*,?\s*(?:\\text\s*\{\s*or\s*\}|(?<![A-Za-z\\])or(?![A-Za-z]))\s*")
_RAY = re.compile(r"\s*(?P<name>[A-Za-z])\s*(?P<sign><|>|\u2264|\u2265|\\[lg](?:eq?|t)(?![a-z]))(?P<end>[^<>=,]+)")
_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\s*\^\s*(?:\d|\{\d\}))?)\s*(\()?\s*(\d+(?:\.\d+)?)\s*\^\\circ\s*(?(2)\))"
)
"""A trigonometric function with an argument in degrees."""
_INEQUALITY = re.compile(r"[<>\u2264\u2265]|\\(?:le|ge|lt|gt)q?(?![a-z])")
"""Inequalities, which may equal intervals: `x > 1` is `(1, \\infty)`."""
_INDEXED = re.compile(r"\\(?:sum|prod|bigcup|bigcap)(?![a-z])")
"""Operators whose index may be `i`, which is otherwise the imaginary unit."""
_MIXED = re.compile(r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])")
_TENS = re.compile(r"(?<=\d)[eE]([-+]?\d{1,3})(?![\d.A-Za-z])")
_BASE = re.compile(r"\\log_\s*(\d+)\s+(?=[\d\\(])")
"""A logarithm whose base has no braces: `\\log_2 3`."""
_PRIMES = re.compile(r"(?<=[A-Za-z])'+")
_OPENING, _CLOSING = "([{", ")]}"


def as_latex(text: str) -> str:
    """Convert a formula to the parser's syntax: `sqrt(2)`, `pi`, `x**2` become LaTeX, commas become separators."""
    text = re.sub(r"\\?\$", "", text).replace("**", "^")
    text = _ANGLE.sub(r"\\text{angle\1}", text)
    text = re.sub(r"\\lg(?![a-z])", r"\\log_{10}", _DEGREES.sub(r"\1(\\frac{\3\\pi}{180})", text))
    text = _TENS.sub(r" \\cdot 10^{\1}", _BASE.sub(r"\\log_{\1} ", text))
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _PRIMES.sub(lambda primes: "^{" + r"\prime " * len(primes.group()) + "}", text)
    text = _WORDS.sub(r"\\\1 ", _OR.sub(", ", text))
    text = text.replace(r"\langle", "(").replace(r"\rangle", ")")
    if not any(bracket in text for bracket in "()[]"):
        text = _THOUSANDS.sub(lambda number: number.group().replace(",", ""), text)
    return _ROOT.sub(r"\\sqrt{\1}", text).replace(",", ", ")


def brackets(text: str) -> str:
    """The brackets around a tuple, an interval or a vector: "()", "[)"; "" for a list, a set or anything else."""
    text = re.sub(r"\\(?:left|right)(?![a-z])|[\s$]", "", text)
    text = text.replace(r"\langle", "(").replace(r"\rangle", ")").replace(r"\{", "{").replace(r"\}", "}")
    text = _MEMBER.sub("", text)
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]":
        return ""
    depth, commas = 0, 0
    for position, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        commas += depth == 1 and character == ","
        if depth == 0 and position < len(text) - 1:
            return ""  # several pairs of brackets, or a union
    return text[0] + text[-1] if commas else ""


if __name__ == "__main__":
    main()
