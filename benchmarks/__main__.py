"""`python -m benchmarks NAME [ARGS...]`: run one benchmark; without a name, list them."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent
FILES = [*HERE.glob("[a-z]*.py"), *(path.parent for path in HERE.glob("*/__main__.py"))]
NAMES = sorted(path.stem for path in FILES if path.stem not in ("frame", "sandbox_peers", "evaluation_peers"))

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        print("usage: python -m benchmarks NAME [ARGS...]\nbenchmarks: " + ", ".join(NAMES))
        sys.exit(0 if len(sys.argv) < 2 else 2)
    del sys.argv[0]
    runpy.run_module(f"benchmarks.{sys.argv[0]}", run_name="__main__", alter_sys=True)
