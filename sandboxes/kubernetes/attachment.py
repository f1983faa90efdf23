"""A runner's channel through the Kubernetes API: a container's streams over a websocket.

Each message is a channel number followed by bytes: 0 stdin, 1 stdout, 2 stderr, 3 exit status
(https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1, "connect GET requests to attach of Pod";
the subprotocols are those of k8s.io/apimachinery/pkg/util/remotecommand).
"""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from forge_env.errors import SandboxError
from sandboxes.connection import Connection
from sandboxes.kubernetes.cluster import Cluster
from sandboxes.kubernetes.pods import CONTAINER

SUBPROTOCOLS = [Subprotocol("v5.channel.k8s.io"), Subprotocol("v4.channel.k8s.io")]
_STDIN, _STDOUT, _STDERR = 0, 1, 2
_CHUNK = 1 << 15
"""Maximum bytes per message, the same as kubectl's."""
_PING_S = 20.0
"""Seconds between pings, since proxies may close a connection that is idle for a minute."""
_MAX_BODY = 2000


async def attach(cluster: Cluster, pod: str, connection: Connection) -> None:
    """Attach `connection` to the standard streams of a running pod. `SandboxError`: the API refuses, or is lost."""
    loop = asyncio.get_running_loop()
    attached: asyncio.Future[None] = loop.create_future()
    address = urlsplit(cluster.server)
    path = f"{address.path}/api/v1/namespaces/{cluster.namespace}/pods/{pod}/attach"
    uri = f"ws{'s' if cluster.tls else ''}://{address.netloc}{path}?container={CONTAINER}&stdin=true&stdout=true&stderr=true"
    headers = await asyncio.to_thread(lambda: cluster.headers)  # may run a credential plug-in
    port = address.port or (443 if cluster.tls else 80)
    try:
        transport, _ = await loop.create_connection(
            lambda: _Attachment(uri, headers, connection, attached), address.hostname or "", port, ssl=cluster.tls
        )
    except OSError as error:
        raise SandboxError(f"the connection to the cluster was lost: {error}") from error
    try:
        await attached
    except BaseException:  # also when cancelled
        transport.abort()
        raise


class _Stdin(asyncio.WriteTransport):
    """Transport that `Connection` writes to: the pod's standard input."""

    def __init__(self, attachment: _Attachment) -> None:
        super().__init__()
        self._attachment = attachment

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._attachment.send(memoryview(data))

    def abort(self) -> None:
        self._attachment.abort()


class _Attachment(asyncio.Protocol):
    """One websocket. Stdout goes to `connection`; the end of stderr is kept for error messages."""

    def __init__(
        self, uri: str, headers: dict[str, str], connection: Connection, attached: asyncio.Future[None]
    ) -> None:
        self._socket = ClientProtocol(parse_uri(uri), subprotocols=SUBPROTOCOLS, max_size=None)
        self._headers = headers
        self._connection = connection
        self._attached = attached
        self._channel = -1
        self._transport: asyncio.Transport | None = None
        self._ping: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        request = self._socket.connect()
        for name, value in self._headers.items():
            request.headers[name] = value
        self._socket.send_request(request)
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._socket.receive_data(data)
        for event in self._socket.events_received():
            if isinstance(event, Response):
                self._answered(event)
            elif isinstance(event, Frame):
                self._heard(event)
        self._flush()

    def _answered(self, response: Response) -> None:
        if self._socket.handshake_exc is not None:
            body = (response.body or b"").decode("utf-8", "replace")[:_MAX_BODY]
            text = f"{response.status_code} {response.reason_phrase} {body}".strip()
            self._attached.set_exception(SandboxError(f"the cluster refused to attach to a pod: {text}"))
            self.abort()
            return
        self._connection.connection_made(_Stdin(self))
        self._attached.set_result(None)
        self._keep_alive()

    def _heard(self, frame: Frame) -> None:
        data = bytes(frame.data)
        if frame.opcode is Opcode.BINARY:
            self._channel, data = (data[0], data[1:]) if data else (-1, b"")
        elif frame.opcode is Opcode.CLOSE:
            self.abort()
            return
        elif frame.opcode is not Opcode.CONT:
            return
        if self._channel == _STDOUT:
            self._connection.data_received(data)
        elif self._channel == _STDERR:
            self._connection.stderr_received(data)

    def _keep_alive(self) -> None:
        self._socket.send_ping(b"")
        self._flush()
        self._ping = asyncio.get_running_loop().call_later(_PING_S, self._keep_alive)

    def send(self, data: memoryview) -> None:
        """Write to standard input."""
        for start in range(0, len(data), _CHUNK):
            self._socket.send_binary(bytes([_STDIN]) + bytes(data[start : start + _CHUNK]))
        self._flush()

    def abort(self) -> None:
        """Close the connection; the kubelet then closes the pod's standard input."""
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            for data in self._socket.data_to_send():
                if data:
                    self._transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ping is not None:
            self._ping.cancel()
        if not self._attached.done():
            self._attached.set_exception(SandboxError(f"the cluster closed the connection: {exc or 'no reason given'}"))
        self._connection.connection_lost(exc)
