"""E2B's API on this machine: the routes that its client calls for sandboxes, and the service of a sandbox's processes.

The service is the one that e2b's package generates from the protocol's definition (`process.proto`), and its REST
answers are read by the client's own models. A sandbox is a tree of processes in mount, pid, ipc, uts and network
namespaces of its own, with a writable root, as root of a virtual machine sees it. Needs root.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.process import process_pb
from e2b.envd.process.process_connect import Process, ProcessASGIApplication
from protobuf import Oneof
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from sandboxes.images import cache

KEY = "e2b_0123456789abcdef0123456789abcdef01234567"
STAGE = Path(__file__).with_name("machine_stage.py")
Event = process_pb.ProcessEvent


@dataclass
class Machine:
    """A virtual machine: its folder on this one, and its processes."""

    folder: Path
    body: dict[str, Any]
    token: str = field(default_factory=lambda: os.urandom(8).hex())
    processes: dict[int, asyncio.subprocess.Process] = field(default_factory=dict)
    timeouts: list[int] = field(default_factory=list)
    """Lifetimes in seconds that were asked for."""

    def end(self) -> None:
        for process in self.processes.values():
            if process.returncode is None:
                process.kill()


@dataclass
class FakeE2B(Process):
    """State of the cloud.

    Attributes:
        limit: most sandboxes at once.
    """

    root: Path
    limit: int = 20
    machines: dict[str, Machine] = field(default_factory=dict)
    created: list[dict[str, Any]] = field(default_factory=list)
    renewed: asyncio.Event = field(default_factory=asyncio.Event)

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v2/sandboxes", self._list),
                Route("/v2/sandboxes", self._create, methods=["POST"]),
                Route("/sandboxes/{id}", self._delete, methods=["DELETE"]),
                Route("/sandboxes/{id}/timeout", self._set_timeout, methods=["POST"]),
                Route("/health", lambda request: Response(status_code=204)),
                Route("/files", self._write, methods=["POST"]),
                Mount("/", ProcessASGIApplication(self)),
            ]
        )

    def _refusal(self, request: Request) -> Response | None:
        if request.headers.get("x-api-key") == KEY:
            return None
        return error(401, "Invalid API key")

    async def _list(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse([])

    async def _create(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        body = await request.json()
        if body["templateID"] not in ("base", "mine"):
            return error(404, f"template '{body['templateID']}' not found")
        if len(self.machines) >= self.limit:
            return error(429, "you have reached the maximum number of concurrent sandboxes")
        name = f"i{os.urandom(9).hex()}"
        machine = self.machines[name] = Machine(self.root / name, body, timeouts=[body["timeout"]])
        for part in ("upper", "work", "merged"):
            (machine.folder / part).mkdir(parents=True)
        self.created.append(body)
        names = {"templateID": body["templateID"], "sandboxID": name, "clientID": "here"}
        return JSONResponse({**names, "envdVersion": "0.6.4", "envdAccessToken": machine.token}, 201)

    async def _delete(self, request: Request) -> Response:
        machine = self.machines.pop(request.path_params["id"], None)
        if machine is None:
            return error(404, "sandbox not found")
        machine.end()
        return Response(status_code=204)

    async def _set_timeout(self, request: Request) -> Response:
        self.machines[request.path_params["id"]].timeouts.append((await request.json())["timeout"])
        self.renewed.set()
        return Response(status_code=204)

    def _machine(self, headers: Any) -> Machine | None:
        machine = self.machines.get(headers.get("e2b-sandbox-id"))
        return machine if machine and headers.get("x-access-token") == machine.token else None

    async def _write(self, request: Request) -> Response:
        machine = self._machine(request.headers)
        if machine is None:
            return error(502, "The sandbox was not found")
        assert request.query_params["username"] == "root"
        path = machine.folder / "upper" / request.query_params["path"].lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(await request.body())
        return JSONResponse([{"name": path.name, "type": "file", "path": request.query_params["path"]}])

    async def start(self, request: Any, ctx: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        """Run a command, and yield its output as it comes."""
        machine = self._machine(ctx.request_headers)
        if machine is None:
            raise ConnectError(Code.UNAVAILABLE, "The sandbox was not found")
        assert base64.b64decode(ctx.request_headers["authorization"].removeprefix("Basic ")) == b"root:"
        plan = {
            "root": str(cache.ensure_rootfs()),
            "folder": str(machine.folder),
            "argv": [request.process.cmd, *request.process.args],
            "env": {"PATH": "/usr/bin", "HOME": "/root", **request.process.envs},
        }
        apart = ["-m", "-p", "-i", "-u", "-f", "--kill-child"]
        refused = ["-n"] if machine.body.get("allow_internet_access") is False else []
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            "unshare", *apart, *refused, sys.executable, str(STAGE), json.dumps(plan), stdin=pipe, stdout=pipe,
            stderr=pipe,
        )  # fmt: skip
        machine.processes[process.pid] = process
        yield response("start", Event.StartEvent(pid=process.pid))
        chunks: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()

        async def forward(name: str, stream: asyncio.StreamReader) -> None:
            while data := await stream.read(1 << 15):
                chunks.put_nowait((name, data))
            chunks.put_nowait((name, b""))

        assert process.stdout
        assert process.stderr
        async with asyncio.TaskGroup() as group:
            group.create_task(forward("stdout", process.stdout))
            group.create_task(forward("stderr", process.stderr))
            ended = 0
            while ended < 2:
                name, data = await chunks.get()
                ended += not data
                if data:
                    yield response("data", Event.DataEvent(output=Oneof(name, data)))  # type: ignore[type-var]
        code = await process.wait()
        yield response("end", Event.EndEvent(exit_code=code, exited=True, status=f"exit status {code}"))

    async def send_input(self, request: Any, ctx: Any) -> Any:
        """Write to a command's standard input."""
        machine = self._machine(ctx.request_headers)
        process = machine and machine.processes.get(request.process.selector.value)
        if not process or process.returncode is not None or process.stdin is None:
            raise ConnectError(Code.NOT_FOUND, "process not found")
        process.stdin.write(request.input.input.value)
        with contextlib.suppress(ConnectionError):
            await process.stdin.drain()
        return process_pb.SendInputResponse()

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """The address of this server."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            config = uvicorn.Config(
                self.application(), log_level="warning", timeout_graceful_shutdown=1, lifespan="off"
            )
            server = uvicorn.Server(config)
            server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
            serving = asyncio.create_task(server._serve([listener]))
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                for machine in self.machines.values():
                    machine.end()
                server.should_exit = True
                await serving


def response(kind: str, event: Any) -> Any:
    return process_pb.StartResponse(event=Event(event=Oneof(kind, event)))  # type: ignore[type-var]


def error(code: int, message: str) -> JSONResponse:
    return JSONResponse({"code": code, "message": message}, code)
