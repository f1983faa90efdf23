"""Measure evaluation: CPU time per sample, and time until the first request, beside inspect_ai and verifiers.

The task is trivial (one turn, exact match) and the endpoint, a separate process, answers at once. Every harness runs in
its own process with the same number of requests in flight; CPU times leave out imports. The floor sends the same
requests through bare httpx2 transports, one connection each. `--inspect` and `--verifiers` name interpreters with these
packages (verifiers below 0.2: later versions start a program for each rollout). The second table has up to 10,000
requests in flight and four to each connection, so that opening connections does not dominate. The aim is 1 ms a sample
at any number in flight, everything included. The third table has seconds since the start of a process.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.frame import apart, call, compiled, in_turns, main, running, spread, table, timed

PEERS = Path(__file__).with_name("evaluation_peers.py")
IN_FLIGHT = 64
ROUNDS = 4
"""Requests to each connection with thousands in flight."""
AIMS = {"forge-env --help": 0.3, "forge-env, first request": 1.0}
CLI = [sys.executable, "-c", "import sys; from forge_env.cli.main import main; sys.exit(main())"]
QUESTION = "What is 2 + 2?"
ANSWER = {
    "id": "x",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "4"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12},
}
Way = Callable[[str, int, int], dict[str, Any]]
"""Takes the endpoint's URL, samples, and requests in flight; returns CPU seconds, score and samples."""


async def serve(delay_s: float) -> None:
    """Run the endpoint: print its port, then answer every request with the same body after `delay_s` seconds.

    A negative delay stands for no answer: it prints the time of the first request.
    """
    body = json.dumps(ANSWER).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                for line in request.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        await reader.readexactly(int(line.split(b":")[1]))
                if delay_s < 0 and request.startswith(b"POST"):
                    print(time.time(), flush=True)
                    return
                if delay_s > 0:
                    await asyncio.sleep(delay_s)
                writer.write(head + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0, backlog=16_384)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def endpoint(delay_s: float) -> Iterator[tuple[str, Any]]:
    """Run the endpoint in a process; yields its URL, and its further output."""
    with running(call("benchmarks.evaluation:serve", delay_s)) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}/v1", server.stdout


def run_forge_env(url: str, samples: int, in_flight: int) -> dict[str, Any]:
    import forge_env as fe
    from forge_env.endpoint.http import allow_many_connections

    allow_many_connections()

    class Question(fe.SingleTurnEnvironment):
        def task(self, split: str, index: int) -> fe.Task:
            return fe.Task(id=f"{split}-{index}", split=split, prompt=QUESTION, data={"answer": "4"})

        def reward(self, task: fe.Task, completion: str) -> float:
            return float(completion.strip() == task.data["answer"])

    with tempfile.TemporaryDirectory() as folder:
        evaluate = partial(fe.evaluate, Question, "m", base_url=url, start_concurrency=in_flight, concurrency=in_flight)
        evaluate(num_tasks=2, out=f"{folder}/warm")  # triggers imports
        results: list[Any] = []
        _, cpu = timed(lambda: results.append(evaluate(num_tasks=samples, out=f"{folder}/out")))
    summary = results[0].summary.environments["Question"]
    return {"cpu": cpu, "score": summary.score.value, "samples": summary.samples}


def run_floor(url: str, samples: int, in_flight: int) -> dict[str, Any]:
    from forge_env.endpoint.http import Connections
    from forge_env.evaluation.runner import collecting_seldom

    body = {"model": "m", "messages": [{"role": "user", "content": QUESTION}]}

    async def work() -> None:
        connections, gate = Connections(url), asyncio.Semaphore(in_flight)

        async def one() -> None:
            async with gate:
                await connections.exchange("POST", "chat/completions", body, timeout_s=600)

        await asyncio.gather(*(one() for _ in range(samples)))
        await connections.close()

    with collecting_seldom():
        _, cpu = timed(lambda: asyncio.run(work()))
    return {"cpu": cpu, "score": 1.0, "samples": samples}


def run_peer(python: str, name: str, url: str, samples: int, in_flight: int) -> dict[str, Any]:
    command = [python, str(PEERS), name, url, str(samples), str(in_flight)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


OURS: dict[str, Way] = {
    "floor": partial(apart, "benchmarks.evaluation:run_floor"),
    "forge-env": partial(apart, "benchmarks.evaluation:run_forge_env"),
}


def rows_of(ways: dict[str, Way], samples: int, in_flight: int, repeats: int, delay_s: float) -> list[list[object]]:
    """Return a row of the table for each way."""
    with endpoint(delay_s) as (url, _):
        taken = in_turns({name: partial(way, url, samples, in_flight) for name, way in ways.items()}, repeats)
    for result in (each for results in taken.values() for each in results):
        assert (result["score"], result["samples"]) == (1.0, samples), result
    costs = {name: [1000 * result["cpu"] / samples for result in results] for name, results in taken.items()}
    ours = statistics.median(costs["forge-env"])
    return [
        [name, in_flight, samples, spread(values), f"{statistics.median(values) / ours:.2f}"]
        for name, values in costs.items()
    ]


def until_done(environ: dict[str, str], command: Sequence[str]) -> tuple[float, float]:
    """Return wall and CPU seconds of a command."""
    started = time.time()
    with running(command, env=environ, stdout=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert status == 0, command
        return time.time() - started, used.ru_utime + used.ru_stime


def until_asked(environ: dict[str, str], command: Sequence[str], out: Iterator[str]) -> tuple[float, float]:
    """Return wall and CPU seconds until the first request of a command, which is then killed."""
    with endpoint(-1) as (url, output):
        names = {"URL": url, "OUT": next(out)}
        silent, started = subprocess.DEVNULL, time.time()
        with running([names.get(word, word) for word in command], env=environ, stdout=silent, stderr=silent) as process:
            seconds = float(output.readline()) - started
            process.kill()
            _, _, used = os.wait4(process.pid, 0)
            process.returncode = -9
        return seconds, used.ru_utime + used.ru_stime


def starts(peers: dict[str, str], repeats: int) -> list[str]:
    """A table of start-up times."""
    asking = {
        "forge-env": [*CLI, "eval", "coding_rlvr", "--model", "m", "--base-url", "URL", "-n", "1", "--out", "OUT"]
    }
    asking |= {name: [python, str(PEERS), name, "URL", "1", "1"] for name, python in peers.items()}
    with tempfile.TemporaryDirectory() as folder:
        environ, out = compiled(Path(folder, "compiled")), (f"{folder}/{number}" for number in count())
        ways: dict[str, Callable[[], Any]] = {
            "python -c pass (floor)": partial(until_done, environ, [sys.executable, "-c", "pass"]),
            "forge-env --help": partial(until_done, environ, [*CLI, "--help"]),
        }
        for name, command in asking.items():
            ways[f"{name}, first request"] = partial(until_asked, environ, command, out)
        taken = in_turns(ways, repeats, warm_up=1)
    rows = [[name, *map(spread, zip(*runs, strict=True)), AIMS.get(name, "")] for name, runs in taken.items()]
    return table(["seconds", "wall", "CPU", "aim (wall)"], rows)


def measure(args: argparse.Namespace) -> list[str]:
    peers = {name: python for name in ("inspect_ai", "verifiers") if (python := vars(args)[name.partition("_")[0]])}
    ways = OURS | {name: partial(run_peer, python, name) for name, python in peers.items()}
    columns = ["CPU ms a sample", "in flight", "samples", "median (smallest to largest)", "times forge-env"]
    rows = rows_of(ways, args.samples, IN_FLIGHT, args.repeats, 0.0)
    growth: list[list[object]] = []
    for size in args.growth:  # the delay keeps all requests in flight at once
        growth += rows_of(OURS, max(ROUNDS * size, 2000), size, args.repeats, 0.5 + size / 1000)
    return [*table(columns, rows), "", *table(columns, growth), "", *starts(peers, 3 * args.repeats)]


if __name__ == "__main__":
    growth = [64, 1000, 10_000]
    main("Evaluation", measure, samples=500, repeats=3, growth=growth, inspect="", verifiers="")
