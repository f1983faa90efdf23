"""Compare sandboxes: this project's engines, docker exec, the docker SDK, peers, and a floor.

    python -m benchmarks.sandbox [--rounds 5] [--seconds 1] [--peers-python PYTHON] [--json FILE] [--record]

All ways run the same programs in turns, round after round, so that other load on the machine affects all alike. The
floor forks an interpreter with everything loaded, without any isolation. `--peers-python` names an interpreter with
`swe-rex`, `aiohttp` and `inspect_ai` (from PyPI); peers that can't run here are reported and skipped. `--record` writes
the section of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import operator
import os
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

from benchmarks.report import record, spread, table
from benchmarks.sandbox_ways import Way, docker_image, engine_way, exec_ways, floor_way, peer_ways, plain_container
from benchmarks.sandbox_ways import unsafe_way as subprocess_way
from forge_env.sandbox import available_engines, open_engine
from forge_env.sandbox.spec import SandboxSpec

CALLERS = 2 * len(os.sched_getaffinity(0))
COLD_STARTS = 3
FLOOR = "floor: fork, no isolation"
NOTES = """
Print is `print(1 + 1)`, unittest a file of 20 cases; each of our runs is acquire, run, release, so every program finds
a sandbox that was wiped and checked. Judged calls are 20 calls whose values are compared outside in one go, split
tests 20 unittest cases in a process that the judged code can't reach: no peer has either. Latency is of single runs,
rates with {callers} callers. The peers and `docker exec` start an interpreter for each program, ours forks one that has
the standard library loaded; the floor does that without any isolation. Cold start is the time of a new sandbox until
it answers. SWE-ReX and inspect_ai run as their packages are; inspect_ai's Docker sandbox refuses this daemon's version.
"""


@contextlib.asynccontextmanager
async def all_ways(peers_python: str | None) -> AsyncIterator[list[Way]]:
    async with contextlib.AsyncExitStack() as stack:
        ways: list[Way] = []
        reasons = available_engines()
        for name, reason in reasons.items():
            if reason is None:
                engine = open_engine(name, concurrency=CALLERS, warm=CALLERS)
                ways.append(engine_way(await stack.enter_async_context(engine)))
        image = ""
        if reasons.get("docker", "none") is None:
            image = docker_image()
            ways += exec_ways(stack.enter_context(plain_container(image)))
        if peers_python:
            ways += await stack.enter_async_context(peer_ways(peers_python, image))
        yield [*ways, subprocess_way(), floor_way()]


async def cold_starts() -> dict[str, list[float]]:
    """Return the milliseconds until a new sandbox answers, by engine."""
    result = {}
    for name, reason in available_engines().items():
        if reason is None:
            times: list[float] = []
            async with open_engine(name, concurrency=COLD_STARTS, warm=0) as engine:
                for _ in range(COLD_STARTS):
                    start = time.perf_counter()
                    sandbox = await engine.acquire(SandboxSpec(disk_mb=32 + len(times)))  # new spec, so none is idle
                    times.append((time.perf_counter() - start) * 1e3)
                    await engine.release(sandbox)
            result[f"forge-env {name}"] = times
    return result


def rows_of(ways: list[Way]) -> list[dict[str, Any]]:
    """Return results by way and program, with ratios to `docker exec` and to the floor on the same program."""
    by_name = {way.name: way for way in ways}
    rows = []
    for way in ways:
        for program in way.programs:
            rounds = way.rounds[program]
            times = sorted(time for measured in rounds for time in measured.latency)
            row: dict[str, Any] = {
                "way": way.name,
                "program": program,
                "p50_ms": statistics.median(times),
                "p99_ms": times[int(len(times) * 0.99)],
                "rates": [measured.rate for measured in rounds],
                "p50s": [statistics.median(measured.latency) for measured in rounds],
            }
            if program in (by_name["docker exec"].rounds if "docker exec" in by_name else {}):
                others = by_name["docker exec"].rounds[program]
                pairs = zip(rounds, others, strict=True)
                row["times_docker_exec"] = statistics.median(mine.rate / theirs.rate for mine, theirs in pairs)
            if program in by_name[FLOOR].rounds:
                floor = [statistics.median(measured.latency) for measured in by_name[FLOOR].rounds[program]]
                row["times_floor"] = statistics.median(map(operator.truediv, row["p50s"], floor))
            rows.append(row)
    return rows


def markdown(rows: list[dict[str, Any]], cold: dict[str, list[float]]) -> list[str]:
    """Format the section of docs/benchmarks.md."""
    columns = ["way", "program", "p50 ms (rounds)", "p99 ms", "per s (rounds)", "rate, x docker exec", "p50, x floor"]
    body = [
        [
            row["way"], row["program"], spread(row["p50s"]), row["p99_ms"], spread(row["rates"]),
            row.get("times_docker_exec", ""), row.get("times_floor", ""),
        ]
        for row in rows
    ]  # fmt: skip
    starts = [[name, spread(times)] for name, times in cold.items()]
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    note = " ".join(NOTES.format(callers=CALLERS).split())
    return [
        *table(columns, body),
        "",
        *table(["way", "cold start, ms"], starts),
        "",
        f"{note} Median (smallest to largest) of the rounds; load of the machine at the end {load}.",
    ]


async def run(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    cold = await cold_starts()
    async with all_ways(args.peers_python) as ways:
        for number in range(args.rounds):
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                for program in way.programs:
                    measured = await way.measure(program, args.seconds, CALLERS)
                    way.rounds.setdefault(program, []).append(measured)
        return rows_of(ways), cold


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of throughput per way, program and round")
    parser.add_argument("--peers-python", metavar="PYTHON", help="interpreter with swe-rex, aiohttp and inspect_ai")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--record", action="store_true", help="write the section of docs/benchmarks.md")
    args = parser.parse_args()
    rows, cold = asyncio.run(run(args))
    lines = markdown(rows, cold)
    print("\n".join(lines))
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"load": os.getloadavg(), "cpus": os.cpu_count(), "rows": rows, "cold": cold}, file, indent=1)
    if args.record:
        record("sandbox", "Sandboxes", "make bench ARGS='sandbox --record --peers-python PYTHON'", lines)


if __name__ == "__main__":
    main()
