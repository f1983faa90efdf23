"""Ways of running a program that `benchmarks.sandbox` compares, and how they are measured."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_env.sandbox import SandboxEngine

PRINT = "print(1 + 1)"
CASES = "".join(f"    def test_{n}(self): self.assertEqual({n} + 1, {n + 1})\n" for n in range(20))
UNITTEST = f"import unittest\nclass T(unittest.TestCase):\n{CASES}unittest.main()"
SPLIT_CASES = "".join(f"    def test_{n}(self): self.assertEqual(f({n}), {n + 1})\n" for n in range(20))
SPLIT_TESTS = f"import unittest\nfrom solution import f\nclass T(unittest.TestCase):\n{SPLIT_CASES}"
CALLS = [f"f({n})" for n in range(20)]
SOLUTION = "def f(x): return x + 1"
SINGLES = 20

Step = Callable[[], Awaitable[None]]


@dataclass
class Measured:
    """One round of one program: milliseconds of single runs, and runs per second with several callers."""

    latency: list[float]
    rate: float


@dataclass
class Way:
    """One way of running programs, with its measurements."""

    name: str
    measure: Callable[[str, float, int], Awaitable[Measured]]
    programs: list[str]
    rounds: dict[str, list[Measured]] = field(default_factory=dict)


async def measure_steps(step: Step, seconds: float, callers: int) -> Measured:
    """Measure the latency of single runs in sequence, then the throughput with `callers`."""
    await step()
    latency = []
    for _ in range(SINGLES):
        start = time.perf_counter()
        await step()
        latency.append((time.perf_counter() - start) * 1e3)
    start = time.perf_counter()

    async def caller() -> int:
        count = 0
        while time.perf_counter() - start < seconds:
            await step()
            count += 1
        return count

    done = sum(await asyncio.gather(*(caller() for _ in range(callers))))
    return Measured(latency, done / (time.perf_counter() - start))


def way_of(name: str, steps: dict[str, Step]) -> Way:
    """Make a way whose steps run in this process."""
    return Way(name, lambda program, seconds, callers: measure_steps(steps[program], seconds, callers), list(steps))


def engine_way(engine: SandboxEngine) -> Way:
    """Run through an engine: acquire, run, release, so that every run has a clean sandbox."""

    async def program(source: str) -> None:
        async with engine.session() as sandbox:
            result = await sandbox.run_python(source)
            assert result.exit_code == 0, result

    async def judged() -> None:
        async with engine.session() as sandbox:
            result = await sandbox.run_calls(SOLUTION, CALLS)
            assert [outcome.value for outcome in result.outcomes] == list(range(1, 21)), result

    async def split() -> None:
        async with engine.session() as sandbox:
            result = await sandbox.run_tests(SOLUTION, SPLIT_TESTS)
            assert result.passed, result

    async def acquire() -> None:
        async with engine.session():
            pass

    return way_of(
        f"forge-env {engine.name}",
        {
            "print": lambda: program(PRINT),
            "unittest": lambda: program(UNITTEST),
            "judged calls": judged,
            "split tests": split,
            "acquire": acquire,
        },
    )


def exec_ways(container: Any) -> list[Way]:
    """Run `docker exec`, by command line and SDK, in a running container."""

    async def command(source: str) -> None:
        argv = ["docker", "exec", container.id, "python3", "-I", "-c", source]
        process = await asyncio.create_subprocess_exec(*argv, stdout=-1, stderr=-1)
        await process.communicate()
        assert process.returncode == 0

    async def sdk(source: str) -> None:
        result = await asyncio.to_thread(container.exec_run, ["python3", "-I", "-c", source])
        assert result.exit_code == 0

    return [
        way_of("docker exec", {"print": lambda: command(PRINT), "unittest": lambda: command(UNITTEST)}),
        way_of("docker SDK exec_run", {"print": lambda: sdk(PRINT), "unittest": lambda: sdk(UNITTEST)}),
    ]


def unsafe_way() -> Way:
    """Run in a plain child process."""

    async def command(source: str) -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-I", "-c", source, stdout=-1, stderr=-1)
        await process.communicate()
        assert process.returncode == 0

    return way_of("subprocess, no isolation", {"print": lambda: command(PRINT), "unittest": lambda: command(UNITTEST)})


def floor_way() -> Way:
    """Fork, execute, collect the output and wait: the minimum that every way does."""
    import unittest  # noqa: F401  loaded before the fork, as a zygote would

    async def forked(source: str) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(writing, 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            sys.argv = ["main.py"]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            try:
                exec(compile(source, "main.py", "exec"), main.__dict__)
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

    return way_of("floor: fork, no isolation", {"print": lambda: forked(PRINT), "unittest": lambda: forked(UNITTEST)})


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


def docker_image() -> str:
    """Return the bundled image, built if missing."""
    build = [sys.executable, "-m", "forge_env", "sandbox", "build", "--engine", "docker"]
    return subprocess.run(build, capture_output=True, text=True, check=True).stdout.split()[0]


@contextlib.asynccontextmanager
async def peer_ways(python: str, image: str) -> AsyncIterator[list[Way]]:
    """Measure the peers installed for the interpreter `python`, in a process that runs `sandbox_peers.py`."""
    script = Path(__file__).with_name("sandbox_peers.py")
    process = await asyncio.create_subprocess_exec(python, str(script), image, stdin=-1, stdout=-1)
    assert process.stdin is not None
    assert process.stdout is not None
    requests, answers = process.stdin, process.stdout

    async def ask(name: str, program: str, seconds: float, callers: int) -> Measured:
        source = {"print": PRINT, "unittest": UNITTEST}[program]
        line = json.dumps({"way": name, "source": source, "seconds": seconds, "callers": callers, "singles": SINGLES})
        requests.write(line.encode() + b"\n")
        return Measured(**json.loads(await answers.readline()))

    def way(name: str) -> Way:
        return Way(name, lambda *arguments: ask(name, *arguments), ["print", "unittest"])

    try:
        yield [way(name) for name in json.loads(await answers.readline())]
    finally:
        requests.close()
        await process.wait()
