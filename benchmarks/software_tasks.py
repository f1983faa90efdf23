"""Measure what judging a software task costs beyond running its tests.

The repository has 21 files and about ten tests. `judged` includes a fresh sandbox, the files, one or two processes, and
the verdict. `in a loaded interpreter` has the same tests without a judge, in a sandbox that already has the files and
an interpreter that has loaded the framework, as the judge's has. `judging beside it` is their difference in each round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.frame import main, spread, table, take_turns
from forge_env.sandbox import Limits, SandboxEngine, SandboxSpec, open_engine

FILES = {f"pkg/module_{n}.py": f"def f_{n}(x):\n    return x + {n}\n" for n in range(20)} | {"pkg/__init__.py": ""}
FILES["pkg/module_0.py"] += (
    "class Point:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == o.x\n"
)
_IMPORTS = "from pkg.module_0 import f_0\nfrom pkg.module_7 import f_7\n"
UNITTEST = f"import unittest\n{_IMPORTS}class T(unittest.TestCase):\n" + "".join(
    f"    def test_{n}(self): self.assertEqual(f_7({n}), {n + 7})\n" for n in range(10)
)
PYTEST = (
    f"import pytest\n{_IMPORTS}def test_one(): assert f_0(1) == 1\n"
    "@pytest.mark.parametrize('n', range(10))\ndef test_n(n): assert f_7(n) == n + 7\n"
)
DEEP = "from pkg.module_0 import Point\nclass Further(Point): pass\ndef test_point(): assert Further(1) == Further(1)\n"
LIMITS = Limits(wall_s=30, memory_mb=1024)
LOADED = {
    "unittest": "import unittest\nunittest.main(module='test_it')\n",
    "pytest": "import pytest, sys\nsys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', 'test_it.py']))\n",
}
Measure = Callable[[], Awaitable[float]]
"""Runs once and returns milliseconds."""


@dataclass(frozen=True)
class Case:
    """Tests, and the judging mode expected for them."""

    framework: str
    how: str
    tests: str

    @property
    def spec(self) -> SandboxSpec:
        """Spec of the case's sandboxes."""
        return SandboxSpec(packages=("pytest",) if self.framework == "pytest" else ())

    def measures(self, engine: SandboxEngine) -> Mapping[str, Measure]:
        """Return the measurements of the case by name."""

        async def judged() -> float:
            start = time.perf_counter()
            async with engine.session(self.spec) as sandbox:
                result = await sandbox.run_tests(files=FILES, tests={"test_it.py": self.tests}, limits=LIMITS)
                took = time.perf_counter() - start
            assert result.passed, result
            assert result.how == self.how, result
            return took * 1e3

        async def loaded() -> float:
            async with engine.session(self.spec) as sandbox:
                await sandbox.write_files({**FILES, "test_it.py": self.tests})
                start = time.perf_counter()
                result = await sandbox.run_python(LOADED[self.framework], limits=LIMITS)
                took = time.perf_counter() - start
            assert result.ok, result
            return took * 1e3

        return {"judged": judged, "loaded": loaded}


CASES = [
    Case("unittest", "apart", UNITTEST),
    Case("unittest", "counted", UNITTEST + DEEP),
    Case("pytest", "apart", PYTEST),
    Case("pytest", "counted", PYTEST + DEEP),
]


async def judging(engine: SandboxEngine, rounds: int) -> list[list[Any]]:
    """Return a row for each case; the first two rounds install packages and fill caches."""
    rows = []
    for case in CASES:
        taken = await take_turns(case.measures(engine), rounds, warm_up=2)
        judged, loaded = taken.values()
        beside = spread([one - other for one, other in zip(judged, loaded, strict=True)])
        rows.append([f"{engine.name}: {case.framework}, {case.how}", spread(judged), spread(loaded), beside, 60])
    return rows


async def measure(args: argparse.Namespace) -> list[str]:
    judged: list[list[Any]] = []
    for name in args.engines:
        async with open_engine(name, concurrency=4, warm=2) as engine:
            judged += await judging(engine, args.rounds)
    return table(["ms", "judged", "in a loaded interpreter", "judging beside it", "aim beside"], judged)


if __name__ == "__main__":
    main("Judging software tasks", measure, engines=["local", "docker"], rounds=15)
