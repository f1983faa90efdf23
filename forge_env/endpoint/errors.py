"""Errors of a model endpoint. Each is a `GeneratorError`, so it never counts as a reward of 0 for the model.

Displays and summaries count errors by class name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from time import time
from typing import ClassVar

import httpx2

from forge_env.errors import GeneratorError
from forge_env.redaction import redact


class EndpointError(GeneratorError):
    """Base class of endpoint errors."""

    transient: ClassVar[bool] = True
    """Whether the same request may succeed a little later."""
    overload: ClassVar[bool] = False
    """Whether the error means that too many requests are in flight."""
    fatal: ClassVar[bool] = False
    """Whether every other request will fail in the same way."""
    excusable: ClassVar[bool] = False
    """Whether a fatal error concerns only this request if the endpoint has answered other requests."""
    status: int | None = None
    retry_after_s: float | None = None
    """Seconds to wait before a retry, as requested by the endpoint."""


class EndpointUnreachableError(EndpointError):
    """No connection could be made, or it broke before an answer began."""


class UntrustedEndpointError(EndpointUnreachableError):
    """The address is https, and its certificate has expired, is for another name, or has an unknown signer."""

    transient = False
    fatal = True


class EndpointTimeoutError(EndpointError):
    """No complete answer arrived within the time limit."""

    overload = True


class EndpointOverloadedError(EndpointError):
    """Status 429, 503 or 529: too many requests."""

    overload = True


class EndpointFailureError(EndpointError):
    """Another 5xx status, or an answer that is itself an error report."""


class TruncatedAnswerError(EndpointError):
    """The connection ended in the middle of an answer."""


class MalformedAnswerError(EndpointError):
    """The answer is not JSON, or not a chat completion."""


class AnswerTooLargeError(EndpointError):
    """The answer exceeds the size limit."""

    transient = False


class RequestRefusedError(EndpointError):
    """Another 4xx status: the endpoint rejects this request."""

    transient = False


class AccessDeniedError(RequestRefusedError):
    """Status 401 or 403: the key is missing or wrong, or (403) the request is not allowed."""

    fatal = True
    excusable = True


class NoSuchModelError(RequestRefusedError):
    """Status 404: the address or the model's name is wrong."""

    fatal = True
    excusable = True


class ContentFilterError(RequestRefusedError):
    """The endpoint's content filter blocked the request or the whole answer."""


class RedirectedError(RequestRefusedError):
    """Status 3xx: the endpoint is at another address."""

    fatal = True


class OutOfCreditError(RequestRefusedError):
    """Status 402, or 429 because of exhausted credit instead of too many requests."""

    fatal = True


# ---
# Errors for answers whose status is not 2xx.

OVERLOAD = (429, 503, 529)
REDIRECTS = (301, 302, 303, 307, 308)
_FILTERED = re.compile(rb"content.?filter|content.(?:management.)?policy|moderation|\bflagged\b|safety system", re.I)


def refusal(status: int, headers: Mapping[str, str], content: bytes) -> EndpointError:
    """The error for an answer with a status other than 2xx."""
    text = f"status {status}: {error_text(content)}"
    if status == 402 or (status == 429 and b"insufficient_quota" in content):
        return OutOfCreditError(text)
    if status in OVERLOAD:
        overload = EndpointOverloadedError(text)
        overload.retry_after_s = retry_after(headers)
        return overload
    if status in (400, 403) and _FILTERED.search(content):
        return ContentFilterError(text)
    if status in (401, 403):
        return AccessDeniedError(text, fix="set the API key (environment variable, see --api-key-env)")
    if status == 404:
        return NoSuchModelError(text, fix="check --base-url and the model's name")
    if status in (408, 409, 425):
        return EndpointFailureError(text)
    if 400 <= status < 500:
        return RequestRefusedError(text)
    return EndpointFailureError(text)


def redirected(status: int, headers: Mapping[str, str], url: httpx2.URL, path: str) -> EndpointError | None:
    """The error for a redirect, naming its target; None for any other answer.

    Redirects are not followed: the user did not ask to repeat a request as GET, or to send the key to another host.
    """
    if status not in REDIRECTS:
        return None
    location = headers.get("location", "")
    try:
        target = url.join(location) if location else None
    except httpx2.InvalidURL:
        target = None
    if target is None:
        return RedirectedError(f"status {status}: {url} has moved", fix="check --base-url")
    where = str(target.copy_with(query=None)).rstrip("/")
    fix = f"--base-url {where.removesuffix(path).rstrip('/')}" if where.endswith(f"/{path}") else "check --base-url"
    return RedirectedError(f"status {status}: {url} has moved to {location}", fix=fix)


def error_text(content: bytes) -> str:
    """Message of an error report in a common format, or its beginning; without secrets, which some endpoints repeat."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        return excerpt(content)
    for key in ("error", "message", "detail"):
        if isinstance(data, dict) and key in data:
            data = data[key]
    return beginning(data, 500)


def beginning(value: object, most: int) -> str:
    """The first `most` characters of a value as text. Secrets are removed first, so that no part of one is left."""
    return redact(str(value))[:most]


def excerpt(content: bytes) -> str:
    """Beginning of `content` as printable text without secrets."""
    text = redact(content[:4096].decode("utf-8", "backslashreplace"))[:120]
    return repr(text) + (f" ... ({len(content)} bytes)" if len(content) > 120 else "")


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds requested by `Retry-After` (a number or a date), without an upper limit; None if missing or invalid."""
    value = headers.get("retry-after", "")
    with suppress(ValueError):
        seconds = float(value)
        return None if math.isnan(seconds) else max(seconds, 0.0)
    with suppress(ValueError, TypeError, OverflowError):
        return max(parsedate_to_datetime(value).timestamp() - time(), 0.0)
    return None
