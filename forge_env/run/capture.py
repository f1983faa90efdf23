"""All that any process of the run prints goes to run.log; the terminal shows the run and nothing else."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
OWN = ("forge_env", "environments", "sandboxes", "trainers", "apps")
"""Packages whose INFO lines are kept; of others only warnings."""


@contextmanager
def log_to(path: Path, *, debug: bool) -> Iterator[None]:
    """Write the log to `path` while the block runs; with `debug` to stderr too, and everything at DEBUG level."""
    handlers: list[logging.Handler] = [logging.FileHandler(path, encoding="utf-8")]
    if debug:
        handlers.append(logging.StreamHandler(sys.stderr))
    root = logging.getLogger()
    levels = {name: logging.getLogger(name).level for name in (*OWN, "")}
    for handler in handlers:
        handler.setFormatter(logging.Formatter(FORMAT))
        root.addHandler(handler)
    root.setLevel(logging.INFO if debug else logging.WARNING)
    for name in OWN:
        logging.getLogger(name).setLevel(logging.DEBUG if debug else logging.INFO)
    try:
        yield
    finally:
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def captured_output(path: Path) -> Iterator[TextIO]:
    """Send this process's and its children's stdout and stderr to `path`; yields a stream to the real stdout.

    The descriptors themselves are redirected, because actors and native code write past `sys.stdout`.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    saved = {number: os.dup(number) for number in (1, 2)}
    target = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    terminal = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace", buffering=1)
    try:
        for number in saved:
            os.dup2(target, number)
        faulthandler.enable(target)
        with (
            os.fdopen(os.dup(target), "a", encoding="utf-8", errors="replace", buffering=1) as log,
            redirect_stdout(log),
            redirect_stderr(log),
        ):
            yield terminal
    finally:
        faulthandler.disable()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        terminal.flush()
        for number, copy in saved.items():
            os.dup2(copy, number)
            os.close(copy)
        os.close(target)
        terminal.close()
