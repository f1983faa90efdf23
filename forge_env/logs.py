"""The file run.log: the platform's log and the output of every process of a run, which thus stay off the terminal.

On a full disk, lines of the log are lost, but the run continues.
"""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TextIO

from forge_env.redaction import learn_environment, redact, redacting

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
OWN = ("forge_env", "environments", "sandboxes", "trainers", "apps")
"""Packages to which `level` applies; other packages log warnings only."""


class _Formatter(logging.Formatter):
    """Formats a record with secrets redacted, also in its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


@contextmanager
def log_to(path: Path, *, level: int = logging.INFO, debug: bool = False) -> Iterator[None]:
    """Write the log to `path` while the block runs; the file is created with its first line."""
    learn_environment()
    handlers: list[logging.Handler] = [logging.FileHandler(path, encoding="utf-8", delay=True)]
    if debug:
        level = logging.DEBUG
        handlers.append(logging.StreamHandler(sys.stderr))
    root = logging.getLogger()
    levels = {name: logging.getLogger(name).level for name in (*OWN, "")}
    for handler in handlers:
        handler.setFormatter(_Formatter(FORMAT))
        handler.setLevel(level)
        root.addHandler(handler)
    for name, wanted in (("", logging.INFO if debug else logging.WARNING), *((name, level) for name in OWN)):
        named = logging.getLogger(name)  # a more verbose level that is already set is kept
        named.setLevel(min(wanted, named.getEffectiveLevel()))
    try:
        yield
    finally:
        for handler in handlers:
            root.removeHandler(handler)
            with suppress(OSError):  # full disk: buffered text is lost
                handler.close()
        for name, previous in levels.items():
            logging.getLogger(name).setLevel(previous)


_captured: list[int] = []
"""File descriptors of this process that `captured_output` redirected to the log."""


def move_log(old: Path, new: Path) -> None:
    """Move the log of `log_to` and `captured_output`: copy the content of `old` to `new`, and continue there."""
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.FileHandler) and handler.baseFilename == str(old)
    ]
    descriptors = [*_captured, *(handler.stream.fileno() for handler in handlers if handler.stream is not None)]
    target = os.open(new, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if descriptors:  # the file may have been deleted
            written_to = f"/proc/self/fd/{descriptors[0]}" if sys.platform == "linux" else old
            with open(written_to, "rb") as written, open(target, "ab", closefd=False) as copy:
                shutil.copyfileobj(written, copy)
        for descriptor in descriptors:
            os.dup2(target, descriptor, inheritable=os.get_inheritable(descriptor))
    finally:
        os.close(target)
    for handler in handlers:
        handler.baseFilename = str(new)


class _Lenient(io.TextIOWrapper):
    """A stream that redacts secrets and drops text that can't be written."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(redact(text))
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


@contextmanager
def captured_output(path: Path) -> Iterator[TextIO]:
    """Redirect stdout and stderr of this process and its children to `path`; yield a stream to the real stdout.

    The file descriptors are redirected, because actors and native code bypass `sys.stdout`.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    saved = {number: os.dup(number) for number in (1, 2)}
    target = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    terminal = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace", buffering=1)
    log = _Lenient(os.fdopen(os.dup(target), "ab"), encoding="utf-8", errors="replace", line_buffering=True)
    try:
        for number in saved:
            os.dup2(target, number)
        faulthandler.enable(target)
        _captured.extend((*saved, target, log.fileno()))
        with redirect_stdout(log), redirect_stderr(log):
            yield redacting(terminal)
    finally:
        faulthandler.disable()
        _captured.clear()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, copy in saved.items():
            os.dup2(copy, number)
            os.close(copy)
        os.close(target)
        for stream in (log, terminal):
            with suppress(OSError):  # full disk or closed terminal: buffered text is lost
                stream.close()
