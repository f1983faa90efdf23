"""Compare the gateway with agent-lightning's proxy: CPU and memory of each, in front of the same model server.

python -m benchmarks gateway_peers --peer-python PYTHON [--open 100 1000] [--requests 1000] [--repeats 3] [--record]

PYTHON is an interpreter (3.12 or newer) with agentlightning installed. Each gateway runs in its own process, requests
token ids and log-probabilities from the server and stores them; the two are measured in turns. The server always
returns the same answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import psutil
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from benchmarks.frame import call, main, running, spread, table
from benchmarks.gateway import RATE, measured
from forge_env.config.evaluation import EndpointOptions
from forge_env.endpoint.policy import EndpointPolicy
from forge_env.gateway.request import ModelRequest
from forge_env.gateway.server import Gateway
from forge_env.policy import Reply
from forge_env.types import Message

MODEL = "m"
SECRET = "secret"
FEW = 10
"""Warm-up requests, not measured: the first ones trigger imports and allocations."""
PROMPT, SAMPLED = 2250, 50
"""Tokens of the prompt (one for every four bytes) and of the answer."""
ANSWER = json.dumps(
    {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "prompt_token_ids": list(range(PROMPT)),
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "I have repaired it."},
                "finish_reason": "stop",
                "token_ids": list(range(SAMPLED)),
                "logprobs": {"content": [{"token": "a", "logprob": -0.5, "bytes": [97]}] * SAMPLED},
            }
        ],
        "usage": {"prompt_tokens": PROMPT, "completion_tokens": SAMPLED, "total_tokens": PROMPT + SAMPLED},
    }
).encode()
ABOUT = (
    "Median (smallest to largest) of the repeats. Each gateway is a process that forwards requests of 9 kB to a "
    f"server, which returns {PROMPT} prompt ids and {SAMPLED} sampled tokens with log-probabilities; both keep all of "
    "it. agent-lightning runs as `python -m agentlightning.server` without its log. Ours is the gateway with "
    "`EndpointPolicy`. Memory is resident: after a few requests, and its growth per request. The server's latency sets "
    "300 requests a second; agent-lightning's HTTP client opens at most 100 connections, and other requests "
    "wait. On busy cores, CPU and memory are more reliable than latency."
)


class Figures(NamedTuple):
    """Measurements of one process."""

    cpu_ms: float
    """CPU milliseconds per request."""
    started_mb: float
    """Resident memory after the warm-up requests, in MiB."""
    kept_kb: float
    """Growth of resident memory per request, in KiB."""
    added_ms: float
    """Median latency added to the server's delay, in milliseconds."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def serve_model(port: int) -> None:
    """Run the model server (in its own process); the path gives the delay of answers in milliseconds."""

    async def answer(request: Request) -> Response:
        await request.body()
        await asyncio.sleep(int(request.path_params["delay_ms"]) / 1000)
        return Response(ANSWER, media_type="application/json")

    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "vllm"}]})

    path = "/{delay_ms:int}/v1"
    app = Starlette(
        routes=[Route(f"{path}/chat/completions", answer, methods=["POST"]), Route(f"{path}/models", models)]
    )
    uvicorn.run(app, port=port, log_level="error", backlog=4096)


async def serve_ours(endpoint: str) -> None:
    """Run the gateway (in its own process) in front of the model server; print its port and key."""
    exchanges: list[tuple[ModelRequest, Reply]] = []
    async with EndpointPolicy(EndpointOptions(model=MODEL, base_url=endpoint, start_concurrency=1000)) as policy:
        await policy.check()

        async def answer(request: ModelRequest) -> Message:
            reply = await policy.session(request.tools).reply(request.messages)
            assert len(reply.token_ids) == SAMPLED
            exchanges.append((request, reply))
            return reply.message

        async with Gateway() as gateway:
            with gateway.open(answer, most_open=10_000) as access:
                print(gateway.port, access.key, flush=True)
                await asyncio.Event().wait()


def told(url: str, body: object) -> Any:
    head = {"Content-Type": "application/json", "Authorization": f"Bearer {SECRET}"}
    sent = urllib.request.Request(url, json.dumps(body).encode(), head)
    with urllib.request.urlopen(sent, timeout=60) as answer:
        return json.load(answer)


def wait_for(port: int, process: subprocess.Popen[Any]) -> None:
    """Poll until the port accepts connections; the server offers no ready event."""
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise SystemExit(f"it ended with {process.returncode} before it served: {process.args!r}")


@contextmanager
def ours(endpoint: str, peer_python: str) -> Iterator[tuple[int, str, str, int]]:
    """Run forge-env's gateway; yields `(port, key, path, process id)`."""
    with running(call("benchmarks.gateway_peers:serve_ours", endpoint)) as process:
        port, key = process.stdout.readline().split()  # type: ignore[union-attr]
        yield int(port), key, "/v1/chat/completions", process.pid


@contextmanager
def agent_lightning(endpoint: str, peer_python: str) -> Iterator[tuple[int, str, str, int]]:
    """Run agent-lightning's proxy; yields `(port, key, path, process id)`."""
    port = free_port()
    options = ("host=127.0.0.1", f"port={port}", f"key={SECRET}", f"default_proxy.model_name={MODEL}")
    command = (peer_python, "-m", "agentlightning.server", *options)
    silent = subprocess.DEVNULL
    with TemporaryDirectory() as folder, running(command, cwd=folder, stdout=silent, stderr=silent) as process:
        wait_for(port, process)
        api = f"http://127.0.0.1:{port}/api"
        told(f"{api}/models", [{"model": MODEL, "endpoint": endpoint, "version": 0}])
        name = told(f"{api}/rollouts", [{"input": {}}])[0]["rollout_id"]
        yield port, SECRET, f"/proxy/rollout/{name}/attempt/0/mode/train/openai/v1/chat/completions", process.pid


WAYS = {"gateway": ours, "agent-lightning": agent_lightning}


def figures(way: str, model_port: int, clients: int, requests: int, peer_python: str) -> Figures:
    delay_ms = round(1000 * clients / RATE)
    endpoint = f"http://127.0.0.1:{model_port}/{delay_ms}/v1"
    with WAYS[way](endpoint, peer_python) as (port, key, path, pid):
        process = psutil.Process(pid)
        asyncio.run(measured(port, key, FEW, FEW, path))
        started = process.memory_info().rss

        def cpu_s() -> float:
            used = process.cpu_times()
            return used.user + used.system

        cpu, took = asyncio.run(measured(port, key, clients, requests, path, cpu_s))
        grown, added_ms = process.memory_info().rss - started, 1e3 * statistics.median(took) - delay_ms
        return Figures(1e3 * cpu / len(took), started / 2**20, grown / 2**10 / len(took), added_ms)


def measure(args: argparse.Namespace) -> list[str]:
    if not args.peer_python:
        raise SystemExit("--peer-python: name an interpreter that has agentlightning")
    ask = "from importlib.metadata import version; print(version('agentlightning'))"
    version = subprocess.run([args.peer_python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    port, rows = free_port(), []
    with running(call("benchmarks.gateway_peers:serve_model", port)) as model:
        wait_for(port, model)
        for clients in args.open:
            requests = max(args.requests, clients)
            results: dict[str, list[Figures]] = {way: [] for way in WAYS}
            for way in [*WAYS] * args.repeats:
                results[way].append(figures(way, port, clients, requests, args.peer_python))
            rows += [[f"{clients:,} open", way, *map(spread, zip(*each, strict=True))] for way, each in results.items()]
    columns = ["", "", "CPU, ms a request", "MiB after a few", "KiB kept a request", "ms added, median"]
    return [*table(columns, rows), "", f"agent-lightning {version}. {ABOUT}"]


if __name__ == "__main__":
    main("The gateway beside agent-lightning's", measure, peer_python="", open=[100, 1000], requests=1000, repeats=3)
