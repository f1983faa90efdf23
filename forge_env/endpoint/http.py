"""HTTP exchanges with a model endpoint, and their errors.

httpx2's connection pool checks every connection for every request, which costs tens of milliseconds per request with
thousands in flight. Here each connection is a separate `httpx2.AsyncHTTPTransport`, and idle ones form a stack, so the
work per request is constant.
"""

from __future__ import annotations

import asyncio
import json
import resource
import ssl
import urllib.request
from contextlib import suppress
from functools import cache
from typing import Any

import httpx2

from forge_env.config.evaluation import endpoint_url
from forge_env.endpoint.errors import (
    AnswerTooLargeError,
    EndpointError,
    EndpointTimeoutError,
    EndpointUnreachableError,
    MalformedAnswerError,
    TruncatedAnswerError,
    UntrustedEndpointError,
    excerpt,
    redirected,
    refusal,
)

CONNECT_S = 15.0
MAX_ANSWER_BYTES = 64 * 2**20
_ONE = httpx2.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=30.0)


class Connections:
    """Connections to one origin, for use from one event loop."""

    def __init__(self, base_url: str, *, api_key: str = "", uds: str | None = None) -> None:
        self.base_url = endpoint_url(base_url)
        self._url = cache(self.base_url.join)
        headers = {
            "host": self.base_url.netloc.decode(),
            "content-type": "application/json",
            "accept-encoding": "gzip, deflate",
            "user-agent": "forge-env",
            **({"authorization": f"Bearer {api_key}"} if api_key else {}),
        }
        self._headers = httpx2.Headers(headers)
        self._uds = uds
        self._proxy = None if uds else _proxy(self.base_url)
        tls = self.base_url.scheme == "https" or self._proxy is not None
        self._verify = ssl.create_default_context() if tls else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._idle: list[httpx2.AsyncHTTPTransport] = []
        self._busy: set[httpx2.AsyncHTTPTransport] = set()
        allow_many_connections()

    async def exchange(self, method: str, path: str, body: Any = None, *, timeout_s: float) -> Any:
        """Send JSON and return the JSON of a 2xx answer; the raw bytes of an event stream."""
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                response = await self._send(method, path, body)
        except TimeoutError:
            raise EndpointTimeoutError(f"no complete answer within {timeout_s:g} s") from None
        except httpx2.ConnectTimeout:
            raise EndpointUnreachableError(f"no connection to {self.base_url.host} within {CONNECT_S:g} s") from None
        except httpx2.TransportError as error:
            raise self._broken(error) from error
        status, headers, content = response
        if status // 100 != 2:
            refused = redirected(status, headers, self._url(path), path) or refusal(status, headers, content)
            refused.status = status
            raise refused
        return content if "text/event-stream" in headers.get("content-type", "") else parse_json(content)

    async def _send(self, method: str, path: str, body: Any) -> tuple[int, httpx2.Headers, bytes]:
        request = httpx2.Request(
            method,
            self._url(path),
            content=None if body is None else json.dumps(body, separators=(",", ":")).encode(),
            headers=self._headers,
            extensions={"timeout": {"connect": CONNECT_S, "read": None, "write": None, "pool": None}},
        )
        transport = self._idle.pop() if self._idle else self._open()
        self._busy.add(transport)
        try:
            response = await transport.handle_async_request(request)
            try:
                content = await _read(response)
            finally:
                await response.aclose()
        finally:
            self._busy.discard(transport)
            self._idle.append(transport)  # the transport reopens a broken connection
        return response.status_code, response.headers, content

    def _open(self) -> httpx2.AsyncHTTPTransport:
        return httpx2.AsyncHTTPTransport(
            verify=self._verify, limits=_ONE, uds=self._uds, proxy=self._proxy, trust_env=False
        )

    def _broken(self, error: httpx2.TransportError) -> EndpointError:
        if isinstance(error, httpx2.ConnectError):
            return _no_connection(self.base_url, error)
        if "complete message body" in str(error) or "incomplete" in str(error) or isinstance(error, _Interrupted):
            return TruncatedAnswerError("the connection ended in the middle of the answer")
        if isinstance(error, httpx2.RemoteProtocolError) and "disconnected" not in str(error):
            return MalformedAnswerError(f"the answer is not HTTP: {error}")
        return EndpointUnreachableError(f"the connection was lost: {error or type(error).__name__}")

    async def close(self) -> None:
        """Close every connection."""
        for transport in [*self._idle, *self._busy]:
            await transport.aclose()
        self._idle.clear()


def _no_connection(url: httpx2.URL, error: httpx2.ConnectError) -> EndpointError:
    """The error for a failed connection, as specific as its causes allow."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return UntrustedEndpointError(
            f"the certificate of {url.host} is not trusted: {cause.verify_message}",
            fix="renew it; if your own authority issued it, set SSL_CERT_FILE to that authority's certificate",
        )
    fix = "is it http:// instead of https://?" if cause is not None else None
    return EndpointUnreachableError(f"no connection to {url}: {error}", fix=fix)


class _Interrupted(httpx2.ReadError):
    """The connection was lost after the answer had begun."""


async def _read(response: httpx2.Response) -> bytes:
    """The decoded body, limited in size so that a faulty endpoint can't exhaust the memory."""
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in response.aiter_bytes():
            size += len(chunk)
            if size > MAX_ANSWER_BYTES:
                raise AnswerTooLargeError(f"the answer is larger than {MAX_ANSWER_BYTES >> 20} MiB")
            chunks.append(chunk)
    except httpx2.DecodingError as error:
        raise MalformedAnswerError(f"the answer can't be decompressed: {error}") from error
    except httpx2.ReadError as error:
        raise _Interrupted(str(error)) from error
    return b"".join(chunks)


def parse_json(content: bytes) -> Any:
    """Parse the JSON of an answer. `MalformedAnswerError`: it is not JSON; the message shows its beginning."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise MalformedAnswerError(f"the answer is not JSON: {excerpt(content)}") from error


def _proxy(url: httpx2.URL) -> str | None:
    """Proxy for this address according to the environment variables, or None."""
    if urllib.request.proxy_bypass(url.host) or url.host in ("localhost", "127.0.0.1", "::1"):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get(url.scheme) or proxies.get("all")


def allow_many_connections() -> None:
    """Raise this process's soft limit of open files to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
