"""Measure start-up time: `forge-env --help`, and `forge-env eval` until its first request reaches the endpoint.

    python -m benchmarks.start [--repeats 9] [--inspect PYTHON] [--verifiers PYTHON] [--record]

Wall and CPU seconds since the start of the process; CPU time because the machine may be shared. The floor is an
interpreter that does nothing. The peers run the trivial task of `benchmarks.evaluation`; `--inspect` and `--verifiers`
name interpreters with these packages. Everything runs in sequence, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import record, spread, table

HERE = Path(__file__).parent
COMPILED = tempfile.TemporaryDirectory()
AIMS = {"forge-env --help": 0.3, "forge-env eval, first request": 1.0}
Taken = tuple[float, float]
"""Wall and CPU seconds."""
CLI = [sys.executable, "-c", "import sys; from forge_env.cli.main import main; sys.exit(main())"]


class Endpoint:
    """Endpoint that records when the first completion request arrives, and never answers it."""

    async def __aenter__(self) -> Endpoint:
        self.server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}/v1"
        self.asked: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"POST"):
                    if not self.asked.done():
                        self.asked.set_result(time.perf_counter())
                    return
                writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process with cached compiled modules, as for an installed package."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.Popen(command, env={**environ, "PYTHONPYCACHEPREFIX": COMPILED.name}, **options)


async def until_done(command: list[str]) -> Taken:
    started = time.perf_counter()
    process = start(command, stdout=subprocess.DEVNULL)
    status, cpu = await ended(process)
    assert status == 0, command
    return time.perf_counter() - started, cpu


async def until_asked(command: list[str]) -> Taken:
    """Run the command, with `URL` replaced by the endpoint's address, until its first request; then kill it."""
    async with Endpoint() as endpoint:
        words = [endpoint.url if word == "URL" else word for word in command]
        started = time.perf_counter()
        quiet = subprocess.DEVNULL
        process = start(words, stdout=quiet, stderr=quiet, start_new_session=True)
        end = asyncio.ensure_future(ended(process))
        await asyncio.wait([endpoint.asked, end], return_when=asyncio.FIRST_COMPLETED, timeout=120)
        if not end.done():
            os.killpg(process.pid, 9)
        _, cpu = await end
        if not endpoint.asked.done():
            raise SystemExit(f"{' '.join(words)} never asked")
        return endpoint.asked.result() - started, cpu


async def ended(process: subprocess.Popen[bytes]) -> tuple[int, float]:
    """Wait for a process to end; return its status and CPU seconds."""
    _, status, used = await asyncio.to_thread(os.wait4, process.pid, 0)
    process.returncode = status
    return status, used.ru_utime + used.ru_stime


async def measure(peers: dict[str, str], repeats: int, folder: str) -> dict[str, list[Taken]]:
    evaluation = [*CLI, "eval", "coding_rlvr", "--model", "m", "--base-url", "URL", "-n", "1", "--out"]
    taken: dict[str, list[Taken]] = {}
    for number in range(repeats + 1):  # the first round fills file system caches and is discarded
        round_times = {
            "python -c pass (floor)": await until_done([sys.executable, "-c", "pass"]),
            "forge-env --help": await until_done([*CLI, "--help"]),
            "forge-env eval, first request": await until_asked([*evaluation, f"{folder}/{number}"]),
        }
        for name, python in peers.items():
            script = str(HERE / f"evaluation_{name}.py")
            round_times[f"{name}, first request"] = await until_asked([python, script, "URL", "1", "1"])
        for name, seconds in round_times.items() if number else ():
            taken.setdefault(name, []).append(seconds)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--inspect", metavar="PYTHON", help="interpreter with inspect_ai and openai")
    parser.add_argument("--verifiers", metavar="PYTHON", help="interpreter with verifiers<0.2")
    parser.add_argument("--record", action="store_true", help="write docs/benchmarks.md")
    args = parser.parse_args()
    named = {"inspect_ai": args.inspect, "verifiers": args.verifiers}
    peers = {name: python for name, python in named.items() if python}
    with tempfile.TemporaryDirectory() as folder:
        taken = asyncio.run(measure(peers, args.repeats, folder))
    rows: list[list[object]] = []
    for name, runs in taken.items():
        wall, cpu = ([run[index] for run in runs] for index in (0, 1))
        rows.append([name, spread(wall), spread(cpu), AIMS.get(name, "")])
    lines = table(["seconds", "wall", "CPU", "aim (wall)"], rows)
    print("\n".join(lines))
    medians = {
        name: [round(statistics.median(part), 4) for part in zip(*runs, strict=True)] for name, runs in taken.items()
    }
    print(json.dumps({"benchmark": "start", "repeats": args.repeats, "seconds": medians}))
    if args.record:
        record(
            "start",
            "Start",
            "make bench ARGS='start --inspect PYTHON --verifiers PYTHON --record'",
            [*lines, "", f"Median (smallest to largest) of {args.repeats}."],
        )


if __name__ == "__main__":
    main()
