"""Compare the gateway with agent-lightning's proxy: CPU and memory of each process, and the latency that it adds.

A separate process sends requests of 9 kB, 300 a second; answers are delayed so that the given number of requests is
open. `gateway alone` answers by itself. The others forward requests to a server that returns 2,250 prompt ids and 50
sampled tokens with log-probabilities, and keep all of it: ours with `EndpointPolicy`, agent-lightning as `python -m
agentlightning.server` without its log (`--peer-python` names an interpreter with `agentlightning`). Memory is resident
memory after a few requests, and its growth per request. agent-lightning's HTTP client opens at most 100 connections,
and other requests wait. Aims: at most 1 ms of CPU a request with 1,000 open, no growth with the number open, and less
than the peer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import psutil
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from benchmarks.frame import call, in_turns, main, running, spread, table
from forge_env.config.evaluation import EndpointOptions
from forge_env.endpoint.policy import EndpointPolicy
from forge_env.gateway.request import ModelRequest
from forge_env.gateway.server import Gateway
from forge_env.policy import Reply
from forge_env.types import Message

RATE = 300.0
"""Requests per second."""
PATH = "/v1/chat/completions"
MODEL, SECRET, FEW = "m", "secret", 10
PROMPT, SAMPLED = 2250, 50
"""Tokens of the prompt (one for every four bytes) and of the answer."""
REPAIRED = "I have repaired it."
CALL = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": '{"c": "ls"}'}}
TURN = [
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "a file\n" * 100},
]
MESSAGES = [
    {"role": "system", "content": "You repair programs. " * 40},
    {"role": "user", "content": "The test fails. " * 100},
    *TURN * 8,
]
BODY = json.dumps({"model": MODEL, "messages": MESSAGES}).encode()
CHOICE = {
    "index": 0,
    "message": {"role": "assistant", "content": REPAIRED},
    "finish_reason": "stop",
    "token_ids": list(range(SAMPLED)),
    "logprobs": {"content": [{"token": "a", "logprob": -0.5, "bytes": [97]}] * SAMPLED},
}
ANSWER = {
    "id": "chatcmpl-0",
    "object": "chat.completion",
    "created": 0,
    "model": MODEL,
    "prompt_token_ids": list(range(PROMPT)),
    "choices": [CHOICE],
    "usage": {"prompt_tokens": PROMPT, "completion_tokens": SAMPLED, "total_tokens": PROMPT + SAMPLED},
}


class Server(NamedTuple):
    """A process that serves chat completions."""

    port: int
    pid: int
    key: str = "none"
    path: str = PATH


class Figures(NamedTuple):
    """CPU milliseconds a request, MiB after a few, KiB kept a request, and the median milliseconds of a request."""

    cpu_ms: float
    started_mb: float
    kept_kb: float
    took_ms: float


# --- clients


def ask(server: Server, clients: int, requests: int, answers: Connection) -> None:
    """Run `clients` concurrent clients in this process, `requests` requests in all, and send the seconds of each."""
    head = (
        f"POST {server.path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {server.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
    ).encode()

    async def client(count: int) -> list[float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
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

    answers.send(asyncio.run(run()))


def figures(way: Callable[[str], Any], place: str, clients: int, requests: int) -> Figures:
    """Start a server and send it requests; `place` is a delay in milliseconds, or the address of an endpoint."""

    def asked(clients: int, requests: int) -> list[float]:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=ask, args=(server, clients, requests, theirs))
        process.start()
        theirs.close()  # so that recv fails if the client process dies
        took: list[float] = ours.recv()
        process.join()
        return took

    with way(place) as server:
        process = psutil.Process(server.pid)
        asked(FEW, FEW)  # the first requests trigger imports and allocations
        memory, cpu = process.memory_info().rss, sum(process.cpu_times()[:2])
        took = asked(clients, requests)
        cpu, grown = sum(process.cpu_times()[:2]) - cpu, process.memory_info().rss - memory
        return Figures(1e3 * cpu / requests, memory / 2**20, grown / 2**10 / requests, 1e3 * statistics.median(took))


# --- servers


async def serve_gateway(place: str) -> None:
    """Run the gateway in this process; print its port and key. It answers by itself, or asks the endpoint `place`."""
    exchanges: list[tuple[ModelRequest, Reply]] = []
    address = place if place.startswith("http") else "http://unused"
    async with EndpointPolicy(EndpointOptions(model=MODEL, base_url=address, start_concurrency=1000)) as policy:

        async def constant(request: ModelRequest) -> Message:
            await asyncio.sleep(int(place) / 1000)
            return Message(role="assistant", content=REPAIRED)

        async def forwarded(request: ModelRequest) -> Message:
            reply = await policy.session(request.tools).reply(request.messages)
            assert len(reply.token_ids) == SAMPLED
            exchanges.append((request, reply))
            return reply.message

        if address == place:
            await policy.check()
        async with Gateway() as gateway:
            with gateway.open(forwarded if address == place else constant, most_open=10_000) as access:
                print(gateway.port, access.key, flush=True)
                await asyncio.Event().wait()


def serve_model() -> None:
    """Serve a model; the path gives the delay of answers in milliseconds."""
    body = json.dumps(ANSWER).encode()

    async def answer(request: Request) -> Response:
        await request.body()
        await asyncio.sleep(int(request.path_params["delay_ms"]) / 1000)
        return Response(body, media_type="application/json")

    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "vllm"}]})

    path = "/{delay_ms:int}"
    routes = [Route(path + PATH, answer, methods=["POST"]), Route(f"{path}/v1/models", models)]
    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="error")).run([listening])


@contextmanager
def served(function: str, *place: str) -> Iterator[Server]:
    """Run one of the functions above in its own process."""
    with running(call(f"benchmarks.gateway:{function}", *place)) as process:
        port, *key = process.stdout.readline().split()  # type: ignore[union-attr]
        yield Server(int(port), process.pid, *key)


@contextmanager
def agent_lightning(python: str, endpoint: str) -> Iterator[Server]:
    """Run agent-lightning's proxy."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = int(listening.getsockname()[1])
    options = ("host=127.0.0.1", f"port={port}", f"key={SECRET}", f"default_proxy.model_name={MODEL}")
    silent, head = subprocess.DEVNULL, {"Content-Type": "application/json", "Authorization": f"Bearer {SECRET}"}

    def post(path: str, body: object) -> Any:
        url = f"http://127.0.0.1:{port}/api/{path}"
        request = urllib.request.Request(url, json.dumps(body).encode(), head)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    command = (python, "-m", "agentlightning.server", *options)
    with TemporaryDirectory() as folder, running(command, cwd=folder, stdout=silent, stderr=silent) as process:
        while True:  # it offers no ready event
            try:
                post("models", [{"model": MODEL, "endpoint": endpoint, "version": 0}])
                break
            except urllib.error.URLError:
                if process.poll() is not None:
                    raise
                time.sleep(0.1)
        name = post("rollouts", [{"input": {}}])[0]["rollout_id"]
        path = f"/proxy/rollout/{name}/attempt/0/mode/train/openai{PATH}"
        yield Server(port, process.pid, SECRET, path)


def measure(args: argparse.Namespace) -> list[str]:
    ways = {"gateway alone": partial(served, "serve_gateway"), "gateway": partial(served, "serve_gateway")}
    if args.peer_python:
        ways["agent-lightning"] = partial(agent_lightning, args.peer_python)
    rows: list[list[object]] = []
    with served("serve_model") as model:
        for clients in args.open:
            delay_ms, requests = round(1000 * clients / RATE), max(args.requests, 3 * clients)
            endpoint = f"http://127.0.0.1:{model.port}/{delay_ms}/v1"
            turns = {}
            for name, way in ways.items():
                place = f"{delay_ms}" if name == "gateway alone" else endpoint
                turns[name] = partial(asyncio.to_thread, figures, way, place, clients, requests)
            for name, taken in in_turns(turns, args.repeats).items():
                cells = [(*one[:3], one.took_ms - delay_ms) for one in taken]
                rows.append([f"{clients:,} open", name, *map(spread, zip(*cells, strict=True))])
    return table(["", "", "CPU, ms a request", "MiB after a few", "KiB kept a request", "ms added, median"], rows)


if __name__ == "__main__":
    main("The gateway", measure, peer_python="", open=[1, 100, 1000], requests=1000, repeats=3)
