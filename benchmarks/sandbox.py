"""Sandboxes side by side: this project's engines, docker exec, the docker SDK, peers that are installed, and the floor.

python -m benchmarks.sandbox [--rounds 5] [--json FILE]

Every way runs the same programs in turn, round after round, so that what else the machine does hits all alike; medians
over rounds are printed with their ratio to `docker exec`. The floor is a fork of an interpreter that has everything
loaded, without any isolation.
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
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from forge_env.sandbox import SandboxEngine, available_engines, open_engine

PRINT = "print(1 + 1)"
CASES = "".join(f"    def test_{n}(self): self.assertEqual({n} + 1, {n + 1})\n" for n in range(20))
UNITTEST = f"import unittest\nclass T(unittest.TestCase):\n{CASES}unittest.main()"
CALLS = [f"f({n})" for n in range(20)]
SOLUTION = "def f(x): return x + 1"
CONCURRENCY = 2 * len(os.sched_getaffinity(0))

Step = Callable[[], Awaitable[None]]


@dataclass
class Way:
    """One way of running a program: its steps, by what they run."""

    name: str
    steps: dict[str, Step]
    latency: dict[str, list[float]] = field(default_factory=dict)
    rate: dict[str, list[float]] = field(default_factory=dict)


def engine_way(engine: SandboxEngine) -> Way:
    async def program(source: str) -> None:
        async with engine.session() as sandbox:
            result = await sandbox.run_python(source)
            assert result.exit_code == 0, result

    async def judged() -> None:
        async with engine.session() as sandbox:
            result = await sandbox.run_calls(SOLUTION, CALLS)
            assert [outcome.value for outcome in result.outcomes] == list(range(1, 21)), result

    return Way(
        f"forge-env {engine.name}",
        {"print": lambda: program(PRINT), "unittest": lambda: program(UNITTEST), "judged calls": judged},
    )


def exec_ways(container: Any) -> list[Way]:
    async def command(source: str) -> None:
        argv = ["docker", "exec", container.id, "python3", "-I", "-c", source]
        process = await asyncio.create_subprocess_exec(*argv, stdout=-1, stderr=-1)
        await process.communicate()
        assert process.returncode == 0

    async def sdk(source: str) -> None:
        result = await asyncio.to_thread(container.exec_run, ["python3", "-I", "-c", source])
        assert result.exit_code == 0

    return [
        Way("docker exec", {"print": lambda: command(PRINT), "unittest": lambda: command(UNITTEST)}),
        Way("docker SDK exec_run", {"print": lambda: sdk(PRINT), "unittest": lambda: sdk(UNITTEST)}),
    ]


def unsafe_way() -> Way:
    async def command(source: str) -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-I", "-c", source, stdout=-1, stderr=-1)
        await process.communicate()
        assert process.returncode == 0

    return Way("subprocess, no isolation", {"print": lambda: command(PRINT), "unittest": lambda: command(UNITTEST)})


def floor_way() -> Way:
    """Fork, execute, collect the output, wait: nothing of it can be left out."""
    import unittest  # noqa: F401  loaded before the fork, as a zygote would

    async def forked(source: str) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(writing, 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            try:
                exec(compile(source, "main.py", "exec"), {"__name__": "__main__"})
            except SystemExit:
                pass
            finally:
                sys.stdout.flush()
                os._exit(0)
        os.close(writing)
        while os.read(reading, 65536):
            pass
        os.close(reading)
        os.waitpid(pid, 0)  # noqa: ASYNC222  the floor blocks: that is the least it can take

    return Way("floor: fork, no isolation", {"print": lambda: forked(PRINT)})


async def swerex_way(stack: contextlib.AsyncExitStack) -> Way | None:
    """SWE-ReX without a container (its fastest), where it is installed."""
    try:
        from swerex.deployment.local import LocalDeployment  # type: ignore[import-not-found]
        from swerex.runtime.abstract import Command  # type: ignore[import-not-found]
    except ImportError:
        return None
    deployment = LocalDeployment()
    await deployment.start()
    stack.push_async_callback(deployment.stop)

    async def command(source: str) -> None:
        result = await deployment.runtime.execute(Command(command=[sys.executable, "-I", "-c", source]))
        assert result.exit_code == 0

    return Way("swe-rex local execute", {"print": lambda: command(PRINT), "unittest": lambda: command(UNITTEST)})


async def inspect_way() -> Way | None:
    """inspect_ai's local sandbox (no isolation), where it is installed."""
    try:
        from inspect_ai.util._sandbox.local import LocalSandboxEnvironment  # type: ignore[import-not-found]
    except ImportError:
        return None
    sandbox = LocalSandboxEnvironment()

    async def command(source: str) -> None:
        result = await sandbox.exec([sys.executable, "-I", "-c", source])
        assert result.success

    return Way("inspect_ai local", {"print": lambda: command(PRINT), "unittest": lambda: command(UNITTEST)})


@contextlib.asynccontextmanager
async def all_ways() -> AsyncIterator[list[Way]]:
    async with contextlib.AsyncExitStack() as stack:
        ways: list[Way] = []
        for name, reason in available_engines().items():
            if reason is None:
                engine = open_engine(name, concurrency=CONCURRENCY, warm=CONCURRENCY)
                ways.append(engine_way(await stack.enter_async_context(engine)))
        if available_engines().get("docker", "none") is None:
            ways += exec_ways(stack.enter_context(_plain_container()))
        ways += [way for way in (await swerex_way(stack), await inspect_way()) if way]
        yield [*ways, unsafe_way(), floor_way()]


@contextlib.contextmanager
def _plain_container() -> Any:
    """A hardened container that only waits to be exec'ed into."""
    import docker

    client = docker.from_env()
    build = [sys.executable, "-m", "forge_env", "sandbox", "build", "--engine", "docker"]
    image = subprocess.run(build, capture_output=True, text=True, check=True).stdout.split()[0]
    container = client.containers.run(
        image, ["sleep", "100000"], detach=True, network_mode="none", read_only=True, cap_drop=["ALL"], init=True,
        security_opt=["no-new-privileges"], mem_limit="512m", pids_limit=256, auto_remove=True, user="65534:65534",
    )  # fmt: skip
    try:
        yield container
    finally:
        container.kill()
        client.close()


async def measure(way: Way, seconds: float) -> None:
    """One round: latency of single runs, then throughput with several callers."""
    for what, step in way.steps.items():
        await step()
        times = []
        for _ in range(20):
            start = time.perf_counter()
            await step()
            times.append((time.perf_counter() - start) * 1e3)
        way.latency.setdefault(what, []).extend(times)
        start = time.perf_counter()

        async def caller(step: Step = step, start: float = start) -> int:
            count = 0
            while time.perf_counter() - start < seconds:
                await step()
                count += 1
            return count

        done = sum(await asyncio.gather(*(caller() for _ in range(CONCURRENCY))))
        way.rate.setdefault(what, []).append(done / (time.perf_counter() - start))


def report(ways: list[Way]) -> list[dict[str, Any]]:
    rows = []
    base = {way.name: way for way in ways}.get("docker exec")
    for way in ways:
        for what in way.steps:
            times = sorted(way.latency[what])
            row: dict[str, Any] = {
                "way": way.name,
                "what": what,
                "p50_ms": statistics.median(times),
                "p99_ms": times[int(len(times) * 0.99)],
                "per_s": statistics.median(way.rate[what]),
            }
            if base is not None and what in base.rate:
                row["times_docker_exec"] = row["per_s"] / statistics.median(base.rate[what])
            rows.append(row)
    return rows


async def run(rounds: int, seconds: float) -> list[dict[str, Any]]:
    async with all_ways() as ways:
        for number in range(rounds):
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                await measure(way, seconds)
        return report(ways)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of throughput per way, program and round")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    rows = asyncio.run(run(args.rounds, args.seconds))
    print(f"{'way':<28} {'program':<14} {'p50 ms':>8} {'p99 ms':>8} {'per s':>8} {'x docker exec':>14}")
    for row in rows:
        ratio = f"{row['times_docker_exec']:.1f}" if "times_docker_exec" in row else ""
        figures = f"{row['p50_ms']:8.2f} {row['p99_ms']:8.2f} {row['per_s']:8.1f} {ratio:>14}"
        print(f"{row['way']:<28} {row['what']:<14} {figures}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"load": os.getloadavg(), "cpus": os.cpu_count(), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
