"""Whether two mathematical expressions mean the same, as math-verify decides it.

An answer is text that a model wrote, and algebra on it may take any time and memory. So it is done in processes of
this file's own (`main`), each limited in memory, given short texts only, and ended when a comparison takes too long.
Texts are read by a grammar of LaTeX; nothing in them is evaluated as Python.
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
"""Longer answers are wrong."""
MAX_DEPTH = 40
"""Brackets in brackets; deeper answers are wrong."""
CPU_S = 4
"""CPU seconds for one comparison, so that a busy machine scores as a quiet one; slower ones count as different."""
WALL_S = 120.0
"""Wall-clock limit of one comparison, and of starting a process."""
MEMORY_MB = 2_048
_PROCESSES = 4


async def equivalent(target: str, given: str, tolerance: float) -> bool:
    """Whether `given`, which a model wrote, means the same as `target`. A comparison over its limits says no.

    Args:
        target: the right answer.
        given: the model's answer.
        tolerance: largest difference of two numbers (see `close`).
    """
    if any(len(text) > MAX_CHARS or _depth(text) > MAX_DEPTH for text in (target, given)):
        return False
    request = json.dumps([target, given, tolerance]).encode() + b"\n"
    return await asyncio.get_running_loop().run_in_executor(_threads(), _ask, request) == "same"


def close(one: Any, two: Any, tolerance: Any) -> bool:
    """Whether two numbers differ by `tolerance` at most; below 0.01 relative to `one`, by `100 * tolerance`."""
    return bool(abs(one - two) <= tolerance * min(1, 100 * abs(one)))


def _depth(text: str) -> int:
    return max(accumulate((sign in _OPENING) - (sign in _CLOSING) for sign in text), default=0)


# --- the calling side: one thread for each process


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_PROCESSES, os.cpu_count() or 1), thread_name_prefix="math")


class _Own(threading.local):
    process: subprocess.Popen[bytes] | None = None
    channel: socket.socket


_OWN = _Own()


def _ask(request: bytes) -> str | None:
    """The answer of this thread's process; None if it died or took too long, and was ended."""
    if _OWN.process is None:
        _OWN.channel, theirs = socket.socketpair()
        with theirs:  # -P: the modules beside this file are not the standard library's
            command = [sys.executable, "-P", __file__]
            _OWN.process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, start_new_session=True
            )
        _OWN.channel.settimeout(WALL_S)
        _answer(_OWN.channel)
    try:
        _OWN.channel.sendall(request)
        return _answer(_OWN.channel)
    except (OSError, EOFError):  # a time-out too
        _OWN.process.kill()
        _OWN.process.wait()
        _OWN.channel.close()
        _OWN.process = None
        return None


def _answer(channel: socket.socket) -> str:
    word = bytearray()
    while not word.endswith(b"\n"):
        if not (received := channel.recv(64)):
            raise EOFError
        word += received
    return word.decode().strip()


# --- the process


def main() -> None:
    """Answer requests until the other side hangs up."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MB << 20,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import logging

    logging.disable()  # it warns that it has no time limit: we have
    compare = _comparison()
    with contextlib.suppress(OSError), socket.socket(fileno=0) as channel, channel.makefile("r") as lines:
        channel.sendall(b"ready\n")
        for line in lines:
            limit_s = int(time.process_time()) + 1 + CPU_S  # then the kernel ends it, also when nobody waits any more
            resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))
            try:
                word = "same" if compare(*json.loads(line)) else "different"
            except (MemoryError, RecursionError):
                return
            except Exception:  # noqa: BLE001 - algebra raises all kinds on what a model wrote: not shown to be equal
                word = "different"
            channel.sendall(word.encode() + b"\n")


def _comparison() -> Callable[[str, str, float], bool]:
    from math_verify import verify

    read = lru_cache(maxsize=512)(_reader())

    def compare(target: str, given: str, tolerance: float) -> bool:
        if brackets(target) != brackets(given):
            return False
        wanted = read(target)
        offered = None if wanted is None else read(given)
        if wanted is None or offered is None or _repeats(wanted) != _repeats(offered):
            return False
        if not verify(wanted, offered, timeout_seconds=None):
            return False
        return not _far_apart(wanted, offered, tolerance)

    return compare


def _reader() -> Callable[[str], Any]:
    """A function from text to a SymPy object; None if not all of the text can be read."""
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    # Units are removed before: this library's list of them has `c`, `m` and `t`, which are variables too.
    spelling = NormalizationConfig(boxed="none", units=False, malformed_operators=True, nits=True)
    conversion = ConversionConfig(lowercase_symbols=False)

    def read(text: str) -> Any:
        latex = as_latex(text)
        if _MISREAD.search(latex):
            return None
        try:
            expression = latex2sympy(latex, None, True, False, spelling, conversion)
            return _interpreted(expression, has_imaginary=not _INDEXED.search(latex))
        except (MemoryError, RecursionError):
            raise
        except Exception:  # noqa: BLE001 - the parser raises bare Exceptions at texts that it can't read
            return None

    return read


def _interpreted(expression: Any, has_imaginary: bool) -> Any:
    """`expression` with `i` as the imaginary unit, and `2 + 3 = 5` as 5: math-verify calls any two such equal."""
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


def _repeats(expression: Any) -> Counter[str]:
    """What a list names more than once: sets drop it, and 1, 1, 2 is not 1, 2."""
    return Counter({text: n for text, n in Counter(map(str, _elements(expression))).items() if n > 1})


def _elements(expression: Any) -> Sequence[Any]:
    return getattr(expression, "_unsorted_args", ()) if type(expression).__name__ == "FiniteSet" else ()


def _far_apart(one: Any, two: Any, tolerance: float) -> bool:
    """Whether both are numbers, and not close: math-verify rounds to six places, where 1e-9 is 2e-9."""
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
_MISREAD = re.compile(r"\d\s*_|(?<!\\):|\d\s+\d|\\dots|\.\.\.")
"""What the parser takes for something else: `204_5` for 204, `2:1` for 2, `1 2` for 3, `1, \\ldots` for 1."""
_INDEXED = re.compile(r"\\(?:sum|prod|bigcup|bigcap)(?![a-z])")
"""What may count with `i`, which is the imaginary unit elsewhere."""
_MIXED = re.compile(r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])")
_TENS = re.compile(r"(?<=\d)[eE]([-+]?\d{1,3})(?![\d.A-Za-z])")
_PRIMES = re.compile(r"(?<=[A-Za-z])'+")
_OPENING, _CLOSING = "([{", ")]}"


def as_latex(text: str) -> str:
    """A formula as the parser takes it: `sqrt(2)`, `pi` and `x**2` become LaTeX, commas separate."""
    text = re.sub(r"\\?\$", "", text).replace("**", "^")
    text = _TENS.sub(r" \\cdot 10^{\1}", text)
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
            return ""  # several, or a union
    return text[0] + text[-1] if commas else ""


if __name__ == "__main__":
    main()
