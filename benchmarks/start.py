"""How long it takes to start: `forge-env --help`, and `forge-env eval` until its first request reaches the endpoint.

    python -m benchmarks.start [--repeats 9] [--inspect PYTHON] [--verifiers PYTHON] [--record]

Wall seconds from starting the process; the floor is an interpreter that does nothing. The peers play the trivial task
of `benchmarks.evaluation`; `--inspect` and `--verifiers` name interpreters that have them. One after another, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import record, spread, table

HERE = Path(__file__).parent
AIMS = {"forge-env --help": 0.3, "forge-env eval, first request": 1.0}
CLI = [sys.executable, "-c", "import sys; from forge_env.cli.main import main; sys.exit(main())"]


class Endpoint:
    """Notes when the first request for a completion comes in, and answers none."""

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


async def until_done(command: list[str]) -> float:
    started = time.perf_counter()
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    assert await process.wait() == 0, command
    return time.perf_counter() - started


async def until_asked(command: list[str]) -> float:
    """`URL` in the command is replaced by the endpoint's address."""
    quiet = asyncio.subprocess.DEVNULL
    async with Endpoint() as endpoint:
        words = [endpoint.url if word == "URL" else word for word in command]
        started = time.perf_counter()
        process = await asyncio.create_subprocess_exec(*words, stdout=quiet, stderr=quiet, start_new_session=True)
        ended = asyncio.ensure_future(process.wait())
        await asyncio.wait([endpoint.asked, ended], return_when=asyncio.FIRST_COMPLETED, timeout=120)
        if not endpoint.asked.done():
            raise SystemExit(f"{' '.join(words)} never asked")
        if process.returncode is None:
            os.killpg(process.pid, 9)
        await ended
        return endpoint.asked.result() - started


async def measure(peers: dict[str, str], repeats: int, folder: str) -> dict[str, list[float]]:
    evaluation = [*CLI, "eval", "coding_rlvr", "--model", "m", "--base-url", "URL", "-n", "1", "--out"]
    taken: dict[str, list[float]] = {}
    for number in range(repeats + 1):  # the first round fills the caches of the file system and does not count
        found = {
            "python -c pass (floor)": await until_done([sys.executable, "-c", "pass"]),
            "forge-env --help": await until_done([*CLI, "--help"]),
            "forge-env eval, first request": await until_asked([*evaluation, f"{folder}/{number}"]),
        }
        for name, python in peers.items():
            script = str(HERE / f"evaluation_{name}.py")
            found[f"{name}, first request"] = await until_asked([python, script, "URL", "1", "1"])
        for name, seconds in found.items() if number else ():
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
    rows = [[name, spread(seconds), AIMS.get(name, "")] for name, seconds in taken.items()]
    lines = table(["wall seconds", "median (smallest to largest)", "aim"], rows)
    print("\n".join(lines))
    medians = {name: round(statistics.median(seconds), 4) for name, seconds in taken.items()}
    print(json.dumps({"benchmark": "start", "repeats": args.repeats, "seconds": medians}))
    if args.record:
        record(
            "start",
            "Start",
            "make bench ARGS='start --inspect PYTHON --verifiers PYTHON --record'",
            [*lines, "", f"{args.repeats} repeats, in turns."],
        )


if __name__ == "__main__":
    main()
