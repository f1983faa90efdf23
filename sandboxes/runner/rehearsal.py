"""Running what requests will run, in the zygote, while nothing is to do after its start.

The interpreter adapts its bytecode to how it is used and fills caches as it goes. What has happened before a fork is
shared by every child; what has not, each child does anew, on pages that it must copy first.
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
"""Of about a millisecond each. Enough for the interpreter to specialise the code on the way."""
_PROGRAM = "import unittest, sys, json, math, re\nx = [n * n for n in range(3)]\nprint(sum(x), f'{x}')\n"
_TESTS = (
    "import unittest\nclass Case(unittest.TestCase):\n    def test_a(self): self.assertEqual(1 + 1, 2)\n"
    "    def test_b(self): self.assertTrue([1])\nunittest.main()\n"
)
_VALUE = {"a": [1, 2.5, "x", None, True], "b": (1, {2}), "c": b"x"}
_HEADER = {"kind": "python", "op": "run", "limits": {"wall_s": 10.0, "cpu_s": 10.0}, "code": 5, "files": [], "id": 1}


def rehearse() -> None:
    """One round of harmless programs, run as requests are; all they leave in this process are loaded modules."""
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
