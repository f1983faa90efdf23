"""What judging a software task costs beside its tests' own time, and what cached packages cost to acquire.

    python -m benchmarks.software_tasks [docker|local]

The tests sleep for a known time; all else is judging: a fresh sandbox, files in, both processes, the verdict. Rounds of
everything take turns, so that what else the machine does falls on all of them.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable

from forge_env.sandbox import Limits, SandboxEngine, SandboxSpec, open_engine

OWN_S = 0.2
ROUNDS = 15
FILES = {f"pkg/module_{n}.py": f"def f_{n}(x):\n    return x + {n}\n" for n in range(20)} | {"pkg/__init__.py": ""}
FILES["pkg/module_0.py"] += (
    "class Point:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == o.x\n"
)
_IMPORTS = "import time\nfrom pkg.module_0 import f_0\nfrom pkg.module_7 import f_7\n"
_SLEEP = f"time.sleep({OWN_S})"
UNITTEST = f"import unittest\n{_IMPORTS}class T(unittest.TestCase):\n    def test_sleep(self): {_SLEEP}\n" + "".join(
    f"    def test_{n}(self): self.assertEqual(f_7({n}), {n + 7})\n" for n in range(10)
)
PYTEST = (
    f"import pytest\n{_IMPORTS}def test_sleep(): {_SLEEP}\n"
    "@pytest.mark.parametrize('n', range(10))\ndef test_n(n): assert f_7(n) == n + 7\n"
)
DEEP = "from pkg.module_0 import Point\ndef test_point(): assert Point(1) == Point(1)\n"
PLAIN, PACKED = SandboxSpec(), SandboxSpec(packages=("pytest",))
LIMITS = Limits(wall_s=30, memory_mb=1024)
Step = Callable[[], Awaitable[float]]
"""Returns milliseconds."""


async def main(name: str) -> None:
    """Measure and print one line for each."""
    steps: dict[str, Step] = {}
    async with (
        open_engine(name, concurrency=4, warm=2) as engine,
        open_engine(name, concurrency=2, warm=0, max_uses=1) as once,
    ):
        for label, spec, tests in (
            ("unittest, apart", PLAIN, UNITTEST),
            ("unittest, counted", PLAIN, UNITTEST + DEEP),
            ("pytest, apart", PACKED, PYTEST),
            ("pytest, counted", PACKED, PYTEST + DEEP),
        ):
            steps[f"judging, {label}"] = _judging(engine, spec, tests)
        command = ["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
        steps["for comparison: python -m pytest in a sandbox that is there"] = _exec(engine, command)
        steps["for comparison: print(1 + 1)"] = _print(engine)
        steps["acquire a new sandbox"] = _acquire(once, PLAIN)
        steps["acquire a new sandbox, packages cached"] = _acquire(once, PACKED)
        times: defaultdict[str, list[float]] = defaultdict(list)
        for round_number in range(ROUNDS + 2):
            for label, step in steps.items():
                took = await step()
                if round_number >= 2:  # the first ones install and fill caches
                    times[label].append(took)
    for label, values in times.items():
        low, *_, high = statistics.quantiles(values, n=10)
        print(f"{label:62} median {statistics.median(values):7.1f} ms   10 % {low:7.1f}   90 % {high:7.1f}")


def _judging(engine: SandboxEngine, spec: SandboxSpec, tests: str) -> Step:
    async def step() -> float:
        start = time.perf_counter()
        async with engine.session(spec) as sandbox:
            result = await sandbox.run_tests(files=FILES, tests={"test_it.py": tests}, limits=LIMITS)
            took = time.perf_counter() - start
        assert result.passed, result
        return (took - OWN_S) * 1e3

    return step


def _exec(engine: SandboxEngine, command: list[str]) -> Step:
    async def step() -> float:
        async with engine.session(PACKED) as sandbox:
            await sandbox.write_files({**FILES, "test_it.py": PYTEST})
            start = time.perf_counter()
            result = await sandbox.exec(command, limits=LIMITS)
            took = time.perf_counter() - start
        assert result.ok, result
        return (took - OWN_S) * 1e3

    return step


def _print(engine: SandboxEngine) -> Step:
    async def step() -> float:
        async with engine.session() as sandbox:
            start = time.perf_counter()
            await sandbox.run_python("print(1 + 1)")
            return (time.perf_counter() - start) * 1e3

    return step


def _acquire(engine: SandboxEngine, spec: SandboxSpec) -> Step:
    async def step() -> float:
        start = time.perf_counter()
        sandbox = await engine.acquire(spec)
        took = time.perf_counter() - start
        await engine.release(sandbox)
        return took * 1e3

    return step


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "local"))
