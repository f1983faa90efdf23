"""Compare sandboxes: this project's engines, docker exec, the docker SDK, peers, and a floor.

The program `print` is `print(1 + 1)`; `unittest` is a file of 20 cases. Each of our runs acquires a sandbox, runs the
program and releases the sandbox, so every program finds one that was wiped and checked. `judged calls` are 20 calls
whose values are compared together, outside the sandbox. `split tests` are 20 unittest cases in a process that the
judged code can't reach. No peer has either. Latencies are of one run at a time, rates of two callers a core. The peers
and `docker exec` start an interpreter for each program. Ours fork one that has the standard library loaded; the floor
does that without isolation. A cold start is the time until a new sandbox answers. `--peers-python` names an interpreter
with `swe-rex`, `aiohttp` and `inspect_ai`, which run unchanged; inspect_ai's Docker sandbox refuses this daemon's
version.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.frame import FORGE_ENV, main, ratio, spread, table, take_turns
from benchmarks.sandbox_peers import measure as measure_runs
from forge_env.sandbox import SandboxEngine, available_engines, open_engine
from forge_env.sandbox.spec import SandboxSpec

CALLERS = 2 * len(os.sched_getaffinity(0))
COLD_STARTS = 3
SINGLES = 20
CASES = "".join(f"    def test_{n}(self): self.assertEqual({n} + 1, {n + 1})\n" for n in range(20))
PROGRAMS = {
    "print": "print(1 + 1)",
    "unittest": f"import unittest\nclass T(unittest.TestCase):\n{CASES}unittest.main()",
}
SPLIT_CASES = "".join(f"    def test_{n}(self): self.assertEqual(f({n}), {n + 1})\n" for n in range(20))
SPLIT_TESTS = f"import unittest\nfrom solution import f\nclass T(unittest.TestCase):\n{SPLIT_CASES}"
SOLUTION = "def f(x): return x + 1"
Measure = Callable[[float], Awaitable[dict[str, Any]]]
"""Takes seconds of throughput; returns milliseconds of single runs in `latency`, and runs per second in `rate`."""
Ways = dict[tuple[str, str], Measure]
"""Measurements by way and program."""


def way(name: str, run: Callable[[str], Awaitable[None]]) -> Ways:
    """Measure the programs with a function that runs a source."""
    return {(name, program): runs(partial(run, source)) for program, source in PROGRAMS.items()}


def runs(step: Callable[[], Awaitable[None]]) -> Measure:
    return lambda seconds: measure_runs(step, seconds, CALLERS, SINGLES)


def engine_ways(engine: SandboxEngine) -> Ways:
    """Run through an engine: acquire, run, release, so that every run has a clean sandbox."""

    async def program(source: str) -> None:
        async with engine.session() as sandbox:
            result = await sandbox.run_python(source)
            assert result.exit_code == 0, result

    async def judged() -> None:
        async with engine.session() as sandbox:
            result = await sandbox.run_calls(SOLUTION, [f"f({n})" for n in range(20)])
            assert [outcome.value for outcome in result.outcomes] == list(range(1, 21)), result

    async def split() -> None:
        async with engine.session() as sandbox:
            result = await sandbox.run_tests(SOLUTION, SPLIT_TESTS)
            assert result.passed, result

    async def acquire() -> None:
        async with engine.session():
            pass

    name = f"forge-env {engine.name}"
    others = {"judged calls": judged, "split tests": split, "acquire": acquire}
    return way(name, program) | {(name, label): runs(step) for label, step in others.items()}


async def child(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-1)
    await process.communicate()
    assert process.returncode == 0


def exec_ways(container: Any) -> Ways:
    """Run `docker exec`, by command line and SDK, in a running container."""

    async def sdk(source: str) -> None:
        result = await asyncio.to_thread(container.exec_run, ["python3", "-I", "-c", source])
        assert result.exit_code == 0

    command = ("docker", "exec", container.id, "python3", "-I", "-c")
    return way("docker exec", partial(child, *command)) | way("docker SDK exec_run", sdk)


async def fork(source: str) -> None:
    """Fork, execute, collect the output and wait: the minimum that every way does."""
    import unittest  # noqa: F401  loaded before the fork, as a zygote would

    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writing, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.argv = ["main.py"]
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            exec(compile(source, "main.py", "exec"), module.__dict__)
        except SystemExit:
            pass
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.close(writing)
    while os.read(reading, 65536):
        pass
    os.close(reading)
    os.waitpid(pid, 0)  # noqa: ASYNC222  blocking is intended: it is the cheapest


def docker_image() -> str:
    """Return the bundled image, built if missing."""
    build = [*FORGE_ENV, "sandbox", "build", "--engine", "docker"]
    return subprocess.run(build, capture_output=True, text=True, check=True).stdout.split()[0]


@contextlib.contextmanager
def plain_container(image: str) -> Iterator[Any]:
    """Run a hardened container that stays idle for `docker exec`."""
    import docker

    client = docker.from_env()
    container = client.containers.run(
        image, ["sleep", "100000"], detach=True, network_mode="none", read_only=True, cap_drop=["ALL"], init=True,
        security_opt=["no-new-privileges"], mem_limit="512m", pids_limit=256, auto_remove=True, user="65534:65534",
    )  # fmt: skip
    try:
        yield container
    finally:
        container.kill()
        client.close()


@contextlib.asynccontextmanager
async def peer_ways(python: str, image: str) -> AsyncIterator[Ways]:
    """Measure the peers installed for the interpreter `python`, in a process that runs `sandbox_peers.py`."""
    script = Path(__file__).with_name("sandbox_peers.py")
    process = await asyncio.create_subprocess_exec(python, str(script), image, stdin=-1, stdout=-1)
    assert process.stdin is not None
    assert process.stdout is not None
    requests, answers = process.stdin, process.stdout

    async def ask(name: str, program: str, seconds: float) -> dict[str, Any]:
        requests.write(json.dumps([name, PROGRAMS[program], seconds, CALLERS, SINGLES]).encode() + b"\n")
        result: dict[str, Any] = json.loads(await answers.readline())
        return result

    try:
        names = json.loads(await answers.readline())
        yield {(name, program): partial(ask, name, program) for name in names for program in PROGRAMS}
    finally:
        requests.close()
        await process.wait()


@contextlib.asynccontextmanager
async def all_ways(peers_python: str) -> AsyncIterator[Ways]:
    async with contextlib.AsyncExitStack() as stack:
        ways: Ways = {}
        engines = [name for name, reason in available_engines().items() if reason is None]
        for name in engines:
            ways |= engine_ways(await stack.enter_async_context(open_engine(name, concurrency=CALLERS, warm=CALLERS)))
        image = ""
        if "docker" in engines:
            image = docker_image()
            ways |= exec_ways(stack.enter_context(plain_container(image)))
        if peers_python:
            ways |= await stack.enter_async_context(peer_ways(peers_python, image))
        yield ways | way("floor: fork, no isolation", fork)


async def cold_starts() -> list[list[object]]:
    """Return rows with the milliseconds until a new sandbox answers, by engine."""
    rows: list[list[object]] = []
    for name in (name for name, reason in available_engines().items() if reason is None):
        times: list[float] = []
        async with open_engine(name, concurrency=COLD_STARTS, warm=0) as engine:
            for _ in range(COLD_STARTS):
                start = time.perf_counter()
                sandbox = await engine.acquire(SandboxSpec(disk_mb=32 + len(times)))  # new spec, so none is idle
                times.append((time.perf_counter() - start) * 1e3)
                await engine.release(sandbox)
        rows.append([f"forge-env {name}", spread(times)])
    return rows


def rows_of(taken: dict[tuple[str, str], list[dict[str, Any]]]) -> list[list[object]]:
    """Return results by way and program, with ratios to `docker exec` and to the floor on the same program."""
    rates = {key: [each["rate"] for each in rounds] for key, rounds in taken.items()}
    middles = {key: [statistics.median(each["latency"]) for each in rounds] for key, rounds in taken.items()}
    rows: list[list[object]] = []
    for (name, program), rounds in taken.items():
        times = sorted(one for each in rounds for one in each["latency"])
        key, command, floor = (name, program), ("docker exec", program), ("floor: fork, no isolation", program)
        of_command = ratio(rates[key], rates[command]) if command in rates else ""
        of_floor = ratio(middles[key], middles[floor]) if floor in middles else ""
        tail = times[int(len(times) * 0.99)]
        rows.append([name, program, spread(middles[key]), tail, spread(rates[key]), of_command, of_floor])
    return rows


async def measure(args: argparse.Namespace) -> list[str]:
    cold = await cold_starts()
    async with all_ways(args.peers_python) as ways:
        taken: Any = await take_turns({key: partial(one, args.seconds) for key, one in ways.items()}, args.rounds)
    columns = ["way", "program", "p50 ms (rounds)", "p99 ms", "per s (rounds)", "rate, x docker exec", "p50, x floor"]
    return [*table(columns, rows_of(taken)), "", *table(["way", "cold start, ms"], cold)]


if __name__ == "__main__":
    main("Sandboxes", measure, rounds=5, seconds=1.0, peers_python="")
