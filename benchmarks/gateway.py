"""Measure the gateway's overhead: CPU per request with few and many requests open, and latency under saturation.

python -m benchmarks gateway [--requests 1000] [--repeats 3] [--record]

The client is a separate process; the model's delay keeps the given number of requests open at 300 requests per second.
The floor is a Starlette application that reads the same body and returns a constant, served by the same uvicorn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from benchmarks.frame import main, spread, table, take_turns
from forge_env.gateway.request import ModelRequest
from forge_env.gateway.server import Gateway
from forge_env.http.server import serve
from forge_env.types import Message

RATE = 300.0
"""Requests per second."""
OPEN = (1, 100, 1000)
SATURATING = 32
"""Clients that send the next request as soon as the previous one is answered."""
ABOUT = (
    "Median (smallest to largest) of the repeats. CPU is of the gateway's process alone, at 300 requests a second. "
    "Aims: 1 ms of CPU a request with 1,000 open, no growth with their number, 50 ms at the 99th percentile added "
    "where two cores are saturated (the client needs one of them)."
)
MESSAGES = [
    {"role": "system", "content": "You repair programs. " * 40},
    {"role": "user", "content": "The test fails. " * 100},
    *(
        message
        for number in range(8)
        for message in (
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [
                    {"id": f"c{number}", "type": "function", "function": {"name": "bash", "arguments": '{"c": "ls"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": f"c{number}", "content": "a file\n" * 100},
        )
    ),
]
BODY = json.dumps({"model": "m", "messages": MESSAGES}).encode()
"""A request of 17 messages, 9 kB."""


def ask(port: int, key: str, path: str, clients: int, requests: int, told: Connection) -> None:
    """Run `clients` concurrent clients in this process, `requests` requests in all, and send the seconds of each."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
    ).encode()

    async def client(count: int) -> list[float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        took = []
        for _ in range(count):
            began = time.perf_counter()
            writer.write(head + BODY)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer
            length = next(line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length"))
            await reader.readexactly(int(length.split(b":")[1]))
            took.append(time.perf_counter() - began)
        writer.close()
        return took

    async def run() -> list[float]:
        shares = [requests // clients + (number < requests % clients) for number in range(clients)]
        return [each for took in await asyncio.gather(*map(client, shares)) for each in took]

    told.send(asyncio.run(run()))


async def measured(
    port: int,
    key: str,
    clients: int,
    requests: int,
    path: str = "/v1/chat/completions",
    cpu_s: Callable[[], float] = time.process_time,
) -> tuple[float, list[float]]:
    """Run the client process; return `(CPU seconds, seconds of each request)`.

    `cpu_s` reads a CPU clock, that of this process by default.
    """
    ours, theirs = multiprocessing.Pipe()
    arguments = (port, key, path, clients, requests, theirs)
    process = multiprocessing.get_context("spawn").Process(target=ask, args=arguments)
    process.start()
    theirs.close()  # so that recv fails if the client process dies
    began = cpu_s()
    took = await asyncio.to_thread(ours.recv)
    cpu = cpu_s() - began
    await asyncio.to_thread(process.join)
    return cpu, took


def answering(delay_s: float) -> Callable[[ModelRequest], Awaitable[Message]]:
    async def answer(request: ModelRequest) -> Message:
        await asyncio.sleep(delay_s)
        return Message(role="assistant", content="I have repaired it.")

    return answer


def floor(delay_s: float) -> Starlette:
    async def constant(request: Request) -> JSONResponse:
        await request.json()
        await asyncio.sleep(delay_s)
        return JSONResponse({"choices": [{"message": {"content": "I have repaired it."}}]})

    return Starlette(routes=[Route("/v1/chat/completions", constant, methods=["POST"])])


async def through_gateway(clients: int, requests: int, delay_s: float) -> tuple[float, float]:
    async with Gateway() as gateway:
        with gateway.open(answering(delay_s), most_open=clients) as access:
            return figures(*await measured(gateway.port, access.key, clients, requests))


async def through_floor(clients: int, requests: int, delay_s: float) -> tuple[float, float]:
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with AsyncExitStack() as stack:
        serving = asyncio.create_task(serve(floor(delay_s), "127.0.0.1", 0, ready=ready.set_result, lifespan=False))
        stack.callback(serving.cancel)
        return figures(*await measured(await ready, "none", clients, requests))


def figures(cpu_s: float, took: list[float]) -> tuple[float, float]:
    """Return CPU milliseconds a request, and the 99th percentile of latency in milliseconds."""
    return 1e3 * cpu_s / len(took), 1e3 * sorted(took)[min(len(took) - 1, int(0.99 * len(took)))]


async def compare(clients: int, requests: int, delay_s: float, repeats: int) -> list[list[tuple[float, float]]]:
    """Return the figures of the gateway and of the floor."""
    ways = {"gateway": through_gateway, "floor": through_floor}
    taken = await take_turns({name: partial(way, clients, requests, delay_s) for name, way in ways.items()}, repeats)
    return [list(zip(*each, strict=True)) for each in taken.values()]


async def measure(args: argparse.Namespace) -> list[str]:
    rows: list[list[Any]] = []
    for clients in OPEN:
        requests = max(args.requests, 3 * clients)
        (ours, _), (floors, _) = await compare(clients, requests, clients / RATE, args.repeats)
        times = statistics.median(ours) / statistics.median(floors)
        rows.append([f"{clients:,} open", spread(ours), spread(floors), f"{times:.1f}x"])
    (_, ours), (_, floors) = await compare(SATURATING, args.requests, 0.0, args.repeats)
    added = statistics.median(ours) - statistics.median(floors)
    rows.append([f"p99 of {SATURATING} clients, ms", spread(ours), spread(floors), f"+{added:.0f} ms"])
    return [*table(["CPU, ms a request", "gateway", "Starlette alone", "gateway / floor"], rows), "", ABOUT]


if __name__ == "__main__":
    main("The gateway", measure, requests=1000, repeats=3)
