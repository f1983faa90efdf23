"""Measure start-up time: `forge-env --help`, and `forge-env eval` until its first request reaches the endpoint.

python -m benchmarks start [--repeats 9] [--inspect PYTHON] [--verifiers PYTHON] [--record]

Wall and CPU seconds since the start of the process; CPU time because the machine may be shared. The floor is an
interpreter that does nothing. The peers run the trivial task of `benchmarks.evaluation`; `--inspect` and `--verifiers`
name interpreters with these packages. Everything runs in sequence, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.evaluation import PEERS
from benchmarks.frame import compiled, main, spread, table, take_turns

AIMS = {"forge-env --help": 0.3, "forge-env eval, first request": 1.0}
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


def begin(environ: dict[str, str], command: list[str]) -> subprocess.Popen[bytes]:
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, env=environ, stdout=quiet, stderr=quiet, start_new_session=True)


async def until_done(environ: dict[str, str], command: list[str]) -> tuple[float, float]:
    """Return wall and CPU seconds of a command."""
    started = time.perf_counter()
    status, cpu = await ended(begin(environ, command))
    assert status == 0, command
    return time.perf_counter() - started, cpu


async def until_asked(environ: dict[str, str], command: list[str], folder: str, number: count[int]) -> Any:
    """Return wall and CPU seconds until the first request of a command, which is then killed."""
    async with Endpoint() as endpoint:
        names = {"URL": endpoint.url, "OUT": f"{folder}/{next(number)}"}
        words = [names.get(word, word) for word in command]
        started = time.perf_counter()
        process = begin(environ, words)
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


async def measure(args: argparse.Namespace) -> list[str]:
    evaluation = [*CLI, "eval", "coding_rlvr", "--model", "m", "--base-url", "URL", "-n", "1", "--out", "OUT"]
    asking = {"forge-env eval": evaluation}
    for name, python in (("inspect_ai", args.inspect), ("verifiers", args.verifiers)):
        if python:
            asking[name] = [python, str(PEERS), name, "URL", "1", "1"]
    with tempfile.TemporaryDirectory() as folder:
        environ, numbers = compiled(Path(folder, "compiled")), count()
        ways: dict[str, Any] = {
            "python -c pass (floor)": partial(until_done, environ, [sys.executable, "-c", "pass"]),
            "forge-env --help": partial(until_done, environ, [*CLI, "--help"]),
        }
        for name, command in asking.items():
            ways[f"{name}, first request"] = partial(until_asked, environ, command, folder, numbers)
        taken = await take_turns(ways, args.repeats, warm_up=1)
    rows = [[name, *map(spread, zip(*runs, strict=True)), AIMS.get(name, "")] for name, runs in taken.items()]
    about = f"Median (smallest to largest) of {args.repeats}."
    return [*table(["seconds", "wall", "CPU", "aim (wall)"], rows), "", about]


if __name__ == "__main__":
    main("Start", measure, repeats=9, inspect="", verifiers="")
