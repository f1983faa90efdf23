"""Warm-up: executes typical request code in the zygote while it is idle after its start.

The interpreter specialises its bytecode and fills caches as code runs. Work done before a fork is shared by every
child; otherwise each child repeats it, on pages that it must copy first.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import sys
import types

from . import child, values
from .wire import pack_inside

ROUNDS = 12
"""Rounds of about a millisecond each, enough for the interpreter to specialise the code."""
_PROGRAM = "import unittest, sys, json, math, re\nx = [n * n for n in range(3)]\nprint(sum(x), f'{x}')\n"
_TESTS = (
    "import unittest\nclass Case(unittest.TestCase):\n    def test_a(self): self.assertEqual(1 + 1, 2)\n"
    "    def test_b(self): self.assertTrue([1])\nunittest.main()\n"
)
_VALUE = {"a": [1, 2.5, "x", None, True], "b": (1, {2}), "c": b"x"}
_HEADER = {"kind": "python", "op": "run", "limits": {"wall_s": 10.0, "cpu_s": 10.0}, "code": 5, "files": [], "id": 1}


def rehearse() -> None:
    """Run one round of harmless programs in the way requests run. Only loaded modules stay in this process."""
    argv, main, streams = sys.argv, sys.modules["__main__"], (sys.stdout, sys.stderr)
    cached = dict(linecache.cache)
    try:
        sys.argv = ["main.py"]
        sys.stdout = sys.stderr = io.StringIO()
        _once()
    finally:
        sys.stdout, sys.stderr = streams
        sys.argv = argv
        sys.modules["__main__"] = main
        linecache.cache.clear()
        linecache.cache.update(cached)


def _once() -> None:
    child.parse(pack_inside(_HEADER, b"x = 1"))
    for source in (_PROGRAM, _TESTS):
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        with contextlib.suppress(SystemExit):
            exec(compile(source, "main.py", "exec"), module.__dict__)
    for frame in values.unpack_frames(values.pack_frame({"v": values.encode(_VALUE)})):
        values.decode(frame["v"])
    json.loads(json.dumps(_HEADER))
