"""A cluster of one machine: an API server that answers as Kubernetes does, and runs its pods as local processes.

It has the parts that sandboxes need, built to the behaviour that https://kubernetes.io/docs/reference/kubernetes-api
describes: TLS and bearer tokens, `Status` objects for what is refused, access reviews, watches, NetworkPolicies, the
`attach` subresource over websockets with the channels of `v5.channel.k8s.io`, and the controller of agent-sandbox.

A pod is a process in mount, pid, network, ipc and uts namespaces of its own with the read-only root of its image, its
in-memory volumes, and no capability but those it adds. Needs root.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from sandboxes.images import cache
from tests.sandboxes.remote import certificates

IMAGE = "python:3.12-slim"
TOKEN = "secret-0123456789"
PODS = "/api/v1/namespaces/{namespace}/pods"
SANDBOXES = "/apis/agents.x-k8s.io/v1beta1/namespaces/{namespace}/sandboxes"
STAGE = Path(__file__).with_name("pod_stage.py")


@dataclass
class Pod:
    """A pod and its process."""

    object: dict[str, Any]
    process: asyncio.subprocess.Process | None = None
    attached: WebSocket | None = None
    watcher: asyncio.Task[None] | None = None


@dataclass
class FakeCluster:
    """State of the cluster, and what is wrong with it.

    Attributes:
        agent_sandbox: its controller is installed.
        enforces: the network plugin knows NetworkPolicies.
        denied: `VERB RESOURCE` that the user may not.
    """

    agent_sandbox: bool = False
    enforces: bool = True
    denied: set[str] = field(default_factory=set)
    pods: dict[str, Pod] = field(default_factory=dict)
    policies: dict[str, dict[str, Any]] = field(default_factory=dict)
    requests: list[tuple[str, str, Any]] = field(default_factory=list)
    watches: set[asyncio.Queue[dict[str, Any] | None]] = field(default_factory=set)
    port: int = 0

    def application(self) -> Starlette:
        routes = [
            Route("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", self._review, methods=["POST"]),
            Route("/apis/agents.x-k8s.io", self._agent_group),
            Route("/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies", self._policy, methods=["POST"]),
            Route(PODS, self._list),
            Route(PODS, self._create, methods=["POST"]),
            Route(PODS + "/{name}", self._delete, methods=["DELETE"]),
            WebSocketRoute(PODS + "/{name}/attach", self._attach),
            Route(SANDBOXES, self._list),
            Route(SANDBOXES, self._create, methods=["POST"]),
            Route(SANDBOXES + "/{name}", self._delete, methods=["DELETE"]),
        ]
        return Starlette(routes=routes)

    async def _review(self, request: Request) -> Response:
        if refusal := self._unauthorized(request):
            return refusal
        review = await request.json()
        wanted = review["spec"]["resourceAttributes"]
        resource = wanted["resource"] + (f"/{wanted['subresource']}" if wanted["subresource"] else "")
        review["status"] = {"allowed": f"{wanted['verb']} {resource}" not in self.denied}
        return JSONResponse(review, 201)

    async def _agent_group(self, request: Request) -> Response:
        if not self.agent_sandbox:
            return status(404, "NotFound", "the server could not find the requested resource")
        return JSONResponse({"kind": "APIGroup", "preferredVersion": {"groupVersion": "agents.x-k8s.io/v1beta1"}})

    async def _policy(self, request: Request) -> Response:
        body = await request.json()
        if body["metadata"]["name"] in self.policies:
            return status(409, "AlreadyExists", "networkpolicies already exists")
        self.policies[body["metadata"]["name"]] = body
        return JSONResponse(body, 201)

    async def _list(self, request: Request) -> Response:
        if refusal := self._unauthorized(request):
            return refusal
        if request.query_params.get("watch"):
            name = request.query_params["fieldSelector"].removeprefix("metadata.name=")
            return StreamingResponse(self._watch(name), media_type="application/json")
        label = request.query_params["labelSelector"]
        items = [pod.object for pod in self.pods.values() if label in pod.object["metadata"].get("labels", {})]
        return JSONResponse({"kind": "PodList", "metadata": {}, "items": items})

    async def _watch(self, name: str) -> AsyncIterator[bytes]:
        """Without a resourceVersion: what is there as ADDED, then what happens."""
        events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.watches.add(events)
        try:
            if name in self.pods:
                yield json.dumps({"type": "ADDED", "object": self.pods[name].object}).encode() + b"\n"
            while (event := await events.get()) is not None:
                if event["object"]["metadata"]["name"] == name:
                    yield json.dumps(event).encode() + b"\n"
        finally:
            self.watches.discard(events)

    def _tell(self, kind: str, pod: Pod, **changes: Any) -> None:
        pod.object["status"].update(changes)
        for events in self.watches:
            events.put_nowait(json.loads(json.dumps({"type": kind, "object": pod.object})))

    async def _create(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(("POST", request.url.path, body))
        if refusal := self._unauthorized(request):
            return refusal
        if request.path_params["namespace"] != "boxes":
            return status(404, "NotFound", f'namespaces "{request.path_params["namespace"]}" not found')
        if body["kind"] == "Sandbox":  # its controller makes a pod of its name
            template = body["spec"]["podTemplate"]
            body = {"metadata": {"name": body["metadata"]["name"], **template["metadata"]}, "spec": template["spec"]}
        if body["metadata"]["name"] in self.pods:
            return status(409, "AlreadyExists", "pods already exists")
        pod = Pod({"kind": "Pod", **body, "status": {"phase": "Pending"}})
        self.pods[body["metadata"]["name"]] = pod
        self._tell("ADDED", pod)
        pod.watcher = asyncio.create_task(self._kubelet(pod))
        return JSONResponse(pod.object, 201)

    async def _kubelet(self, pod: Pod) -> None:
        """Run the pod's container to its end."""
        spec, labels = pod.object["spec"], pod.object["metadata"]["labels"]
        (container,) = spec["containers"]
        if container["image"] != IMAGE:
            waiting = {"reason": "ErrImagePull", "message": f"failed to pull {container['image']}: not found"}
            self._tell("MODIFIED", pod, containerStatuses=[{"state": {"waiting": waiting}}])
            return
        refused = self.enforces and any(
            policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items() for policy in self.policies.values()
        )
        plan = {"root": str(cache.ensure_rootfs()), "spec": spec, "api": ["127.0.0.1", self.port]}
        apart = ["unshare", "-m", "-p", "-i", "-u", "-f", "--kill-child", *(["-n"] if refused else [])]
        pipe = asyncio.subprocess.PIPE
        pod.process = await asyncio.create_subprocess_exec(
            *apart, sys.executable, str(STAGE), json.dumps(plan), stdin=pipe, stdout=pipe, stderr=pipe,
        )  # fmt: skip
        self._tell("MODIFIED", pod, phase="Running", containerStatuses=[{"state": {"running": {}}}])
        assert pod.process.stdout
        assert pod.process.stderr
        async with asyncio.TaskGroup() as streams:
            streams.create_task(self._forward(pod, 1, pod.process.stdout))
            streams.create_task(self._forward(pod, 2, pod.process.stderr))
        code = await pod.process.wait()
        if pod.attached is not None:
            with contextlib.suppress(RuntimeError, WebSocketDisconnect):
                await pod.attached.close()
        if pod.object["metadata"]["name"] in self.pods:
            self._tell("MODIFIED", pod, phase="Failed" if code else "Succeeded", containerStatuses=[])

    async def _forward(self, pod: Pod, channel: int, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(1 << 16):
            if pod.attached is not None:
                with contextlib.suppress(RuntimeError, WebSocketDisconnect):
                    await pod.attached.send_bytes(bytes([channel]) + data)

    async def _attach(self, websocket: WebSocket) -> None:
        pod = self.pods.get(websocket.path_params["name"])
        if pod is None or pod.process is None or websocket.headers.get("authorization") != f"Bearer {TOKEN}":
            await websocket.close(4003)
            return
        assert "v5.channel.k8s.io" in websocket.scope["subprotocols"]
        assert pod.process.stdin
        await websocket.accept("v5.channel.k8s.io")
        for channel in (1, 2, 3):  # a server opens every channel with an empty message
            await websocket.send_bytes(bytes([channel]))
        pod.attached = websocket
        try:
            while True:
                message = await websocket.receive_bytes()
                assert message[0] == 0
                pod.process.stdin.write(message[1:])
                await pod.process.stdin.drain()
        except (WebSocketDisconnect, ConnectionError):
            pod.process.stdin.close()  # stdinOnce

    async def _delete(self, request: Request) -> Response:
        if refusal := self._unauthorized(request):
            return refusal
        pod = self.pods.pop(request.path_params["name"], None)
        if pod is None:
            return status(404, "NotFound", f'pods "{request.path_params["name"]}" not found')
        await self._end(pod)
        self._tell("DELETED", pod)
        return JSONResponse(pod.object)

    async def _end(self, pod: Pod) -> None:
        if pod.process is not None and pod.process.returncode is None:
            pod.process.kill()
        if pod.watcher is not None:
            await asyncio.wait([pod.watcher])

    def _unauthorized(self, request: Request) -> Response | None:
        if request.headers.get("authorization") == f"Bearer {TOKEN}":
            return None
        return status(401, "Unauthorized", "Unauthorized")

    @contextlib.asynccontextmanager
    async def serve(self, folder: Path) -> AsyncIterator[Path]:
        """The path of a kubeconfig that leads here."""
        certificates(folder)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
            config = uvicorn.Config(
                self.application(),
                log_level="warning",
                ssl_certfile=folder / "server" / "cert.pem",
                ssl_keyfile=folder / "server" / "key.pem",
                timeout_graceful_shutdown=1,
                lifespan="off",
            )
            server = uvicorn.Server(config)
            server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
            serving = asyncio.create_task(server._serve([listener]))
            try:
                yield self.write_config(folder)
            finally:
                for pod in list(self.pods.values()):
                    await self._end(pod)
                for events in list(self.watches):
                    events.put_nowait(None)
                server.should_exit = True
                await serving

    def write_config(self, folder: Path, **user: Any) -> Path:
        """A kubeconfig (https://kubernetes.io/docs/reference/config-api/kubeconfig.v1)."""
        authority = base64.b64encode((folder / "client" / "ca.pem").read_bytes()).decode()
        cluster = {"server": f"https://127.0.0.1:{self.port}", "certificate-authority-data": authority}
        context = {"cluster": "here", "user": "me", "namespace": "boxes"}
        path = folder / "config"
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "test",
                    "clusters": [{"name": "here", "cluster": cluster}],
                    "users": [{"name": "me", "user": user or {"token": TOKEN}}],
                    "contexts": [{"name": "test", "context": context}],
                }
            )
        )
        return path


def status(code: int, reason: str, message: str) -> JSONResponse:
    """https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/status"""
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
    return JSONResponse({**body, "message": message}, code)
