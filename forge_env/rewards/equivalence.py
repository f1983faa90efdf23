"""Whether two mathematical expressions mean the same, as math-verify decides it (`pip install 'forge-env[math]'`).

An answer is text that a model wrote, and algebra on it may take any time and memory. So it is done in processes of
this file's own (`main`), each limited in memory, given short texts only, and ended when a comparison takes too long.
Texts are read by a grammar of LaTeX; nothing in them is evaluated as Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

MAX_CHARS = 1_000
"""Longer answers are wrong."""
CPU_S = 4
"""CPU seconds for one comparison, so that a busy machine scores as a quiet one; what takes longer is different."""
WALL_S = 120.0
"""For one that waits instead, and for a process to start."""
MEMORY_MB = 2_048
_PROCESSES = 4
_WORDS = re.compile(r"(?<![\\A-Za-z])(sqrt|sin|cos|tan|log|ln|exp|pi)(?![A-Za-z])")
_OR = re.compile(r"\\text\{\s*(?:or|and)\s*\}|\b(?:or|and)\b")
_ROOT = re.compile(r"\\sqrt\s*\(([^()]*)\)")
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


class UnreadableError(Exception):
    """The target is not an expression that can be read."""


def available() -> bool:
    """Whether math-verify is installed."""
    return importlib.util.find_spec("math_verify") is not None


async def equivalent(target: str, given: str) -> bool:
    """Whether `given`, which a model wrote, means the same as `target`.

    Raises:
        UnreadableError: `target` is not an expression, or can't be compared in time with itself.
    """
    if len(given) > MAX_CHARS:
        return False
    loop = asyncio.get_running_loop()
    answer = await loop.run_in_executor(_threads(), _ask, target, given)
    if answer is None:  # too slow, or too large: whose fault is it?
        again = await loop.run_in_executor(_threads(), _ask, target, target)
        answer = "different" if again == "same" else "unreadable"
    if answer == "unreadable":
        raise UnreadableError(target)
    return answer == "same"


# --- the calling side: one thread for each process


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_PROCESSES, os.cpu_count() or 1), thread_name_prefix="math")


class _Own(threading.local):
    process: subprocess.Popen[bytes] | None = None
    channel: socket.socket


_OWN = _Own()


def _ask(target: str, given: str) -> str | None:
    """What this thread's process says; None when it did not answer, and is gone now."""
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
        _OWN.channel.sendall(json.dumps([target, given]).encode() + b"\n")
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
                said = compare(*json.loads(line))
            except (MemoryError, RecursionError):
                return
            channel.sendall(said.encode() + b"\n")


def _comparison() -> Any:
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig()]

    def read(text: str) -> Any:
        return parse(f"${as_latex(text)}$", config, fallback_mode="no_fallback", parsing_timeout=None)

    def compare(target: str, given: str) -> str:
        wanted = read(target)
        if not wanted:
            return "unreadable"
        return "same" if verify(wanted, read(given), timeout_seconds=None) else "different"

    return compare


def as_latex(text: str) -> str:
    """One formula without its delimiters; `sqrt(2)`, `pi` and `x**2` as LaTeX writes them."""
    text = text.strip()
    for opening, closing in _DELIMITERS:
        if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
            text = text[len(opening) : -len(closing)]
            break
    text = _WORDS.sub(r"\\\1", _OR.sub(",", text.replace("**", "^")))
    return _ROOT.sub(r"\\sqrt{\1}", text).replace("$", "")


if __name__ == "__main__":
    main()
