"""Measure evaluation overhead: CPU time per sample, compared with inspect_ai and verifiers on one mock endpoint.

    python -m benchmarks.evaluation [--samples 500] [--repeats 3] [--inspect PYTHON] [--verifiers PYTHON] [--record]
    python -m benchmarks.evaluation --only growth --record

The task is trivial (one turn, exact match) and the endpoint, a separate process, answers at once. Every harness runs in
its own process, in turns, with the same number of requests in flight. The floor sends the same requests through bare
httpx2 transports, one connection each. `--inspect` and `--verifiers` name interpreters with these packages (verifiers
below 0.2: later versions start a program for each rollout). CPU time is compared, because the machine may be shared;
imports are excluded. A second part measures the floor and forge-env with up to 10,000 requests in flight, and four
requests to each connection, so that opening connections does not dominate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.report import record, spread, table

HERE = Path(__file__).parent
ANSWER = {
    "id": "x",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "4"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12},
}
AIM_MS = 1.0
ROUNDS = 4
"""Requests to each connection with thousands in flight."""
COMMANDS = {
    "evaluation": "make bench ARGS='evaluation --inspect PYTHON --verifiers PYTHON --record'",
    "evaluation_growth": "make bench ARGS='evaluation --only growth --record'",
}


async def serve(delay_s: float) -> None:
    """Run the endpoint: print its port, then answer every request with the same body after `delay_s` seconds."""
    body = json.dumps(ANSWER).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                for line in request.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        await reader.readexactly(int(line.split(b":")[1]))
                if delay_s:
                    await asyncio.sleep(delay_s)
                writer.write(head + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0, backlog=16_384)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def endpoint(delay_s: float) -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.evaluation", "--serve", str(delay_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield f"http://127.0.0.1:{int(server.stdout.readline())}/v1"
        finally:
            server.kill()


def run_forge_env(url: str, samples: int, in_flight: int) -> dict[str, Any]:
    import forge_env as fe
    from forge_env.endpoint.http import allow_many_connections

    allow_many_connections()

    class Question(fe.SingleTurnEnvironment):
        def task(self, split: str, index: int) -> fe.Task:
            return fe.Task(id=f"{split}-{index}", split=split, prompt="What is 2 + 2?", data={"answer": "4"})

        def reward(self, task: fe.Task, completion: str) -> float:
            return float(completion.strip() == task.data["answer"])

    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"concurrency": in_flight, "start_concurrency": in_flight, "out": f"{folder}/out"}
        fe.evaluate(Question, "m", base_url=url, num_tasks=2, out=f"{folder}/warm")  # triggers imports
        cpu, wall = time.process_time(), time.perf_counter()
        result = fe.evaluate(Question, "m", base_url=url, num_tasks=samples, **settings)
        measured = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
    summary = result.summary.environments["Question"]
    assert summary.score is not None
    return {**measured, "score": summary.score.value, "samples": summary.samples}


def run_floor(url: str, samples: int, in_flight: int) -> dict[str, Any]:
    from forge_env.endpoint.http import Connections
    from forge_env.evaluation.runner import collecting_seldom

    async def work() -> None:
        connections, gate = Connections(url), asyncio.Semaphore(in_flight)

        async def one() -> None:
            async with gate:
                message = {"role": "user", "content": "What is 2 + 2?"}
                await connections.exchange(
                    "POST", "chat/completions", {"model": "m", "messages": [message]}, timeout_s=600
                )

        await asyncio.gather(*(one() for _ in range(samples)))
        await connections.close()

    cpu, wall = time.process_time(), time.perf_counter()
    with collecting_seldom():
        asyncio.run(work())
    measured = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
    return {**measured, "score": 1.0, "samples": samples}


def measure(command: list[str], url: str, samples: int, in_flight: int) -> dict[str, Any]:
    done = subprocess.run([*command, url, str(samples), str(in_flight)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    assert (result["score"], result["samples"]) == (1.0, samples), result
    return result


def measure_all(
    ways: dict[str, list[str]], samples: int, in_flight: int, repeats: int, delay_s: float
) -> list[dict[str, Any]]:
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    with endpoint(delay_s) as url:
        for _ in range(repeats):  # interleaved, so that a load spike affects all harnesses alike
            for name, command in ways.items():
                taken[name].append(measure(command, url, samples, in_flight))
                cost = 1000 * taken[name][-1]["cpu"] / samples
                print(f"{name}, {samples} samples, {in_flight} in flight: {cost:.3g} ms each", file=sys.stderr)
    rows = []
    for name, runs in taken.items():
        costs = [1000 * run["cpu"] / samples for run in runs]
        row = {"what": name, "samples": samples, "in_flight": in_flight, "cpu_ms": statistics.median(costs)}
        rows.append({**row, "costs": costs})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--growth", type=int, nargs="*", default=[64, 1000, 10_000], help="requests in flight")
    parser.add_argument("--growth-repeats", type=int, default=3)
    parser.add_argument("--inspect", metavar="PYTHON", help="interpreter with inspect_ai and openai")
    parser.add_argument("--verifiers", metavar="PYTHON", help="interpreter with verifiers<0.2")
    parser.add_argument("--only", choices=["peers", "growth"], help="one of the two parts")
    parser.add_argument("--record", action="store_true", help="write docs/benchmarks.md")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--way", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        asyncio.run(serve(args.serve))
        return
    if args.way:
        way = {"forge-env": run_forge_env, "floor": run_floor}[args.way[0]]
        print(json.dumps(way(args.way[1], int(args.way[2]), int(args.way[3]))))
        return
    command = [sys.executable, "-m", "benchmarks.evaluation", "--way"]
    ways = {"floor": [*command, "floor"], "forge-env": [*command, "forge-env"]}
    for name, python in (("inspect_ai", args.inspect), ("verifiers", args.verifiers)):
        if python:
            ways[name] = [python, str(HERE / f"evaluation_{name}.py")]
    if args.only != "growth":
        rows = measure_all(ways, args.samples, args.in_flight, args.repeats, 0.0)
        report("evaluation", "Evaluation: what it costs beside the model", rows, args.record, "One turn, exact match.")
    if args.only != "peers":
        rows = []
        for size in args.growth:  # the delay keeps all requests in flight at once
            both = {name: ways[name] for name in ("floor", "forge-env")}
            rows += measure_all(both, max(ROUNDS * size, 2000), size, args.growth_repeats, 0.5 + size / 1000)
        notes = f"The aim is {AIM_MS:g} ms a sample at any number in flight, everything included."
        report("evaluation_growth", "Evaluation: with the requests in flight", rows, args.record, notes)


def report(section: str, title: str, rows: list[dict[str, Any]], recorded: bool, notes: str) -> None:
    """Print a table and, if `recorded`, write it to docs/benchmarks.md."""
    columns = ["CPU ms a sample", "in flight", "samples", "median (smallest to largest)", "times forge-env"]
    lines = table(columns, [_cells(row, rows) for row in rows])
    print("\n".join(lines))
    print(json.dumps({"benchmark": section, "rows": rows}))
    if recorded:
        record(section, title, COMMANDS[section], [*lines, "", notes])


def _cells(row: dict[str, Any], rows: list[dict[str, Any]]) -> list[object]:
    """Return a row of the table; its last cell is the cost relative to forge-env with as many requests in flight."""
    same = (row["samples"], row["in_flight"])
    reference = next(r for r in rows if r["what"] == "forge-env" and (r["samples"], r["in_flight"]) == same)
    return [row["what"], *same[::-1], spread(row["costs"]), f"{row['cpu_ms'] / reference['cpu_ms']:.2f}"]


if __name__ == "__main__":
    main()
