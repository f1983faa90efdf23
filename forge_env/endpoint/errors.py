"""What can go wrong between us and a model endpoint. Every error is a `GeneratorError`: never the model's zero.

The name of the class is the kind that displays and summaries count.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

from forge_env.errors import GeneratorError


class EndpointError(GeneratorError):
    """Base of the errors of an endpoint."""

    transient: ClassVar[bool] = True
    """Whether the same request may well succeed a little later."""
    overload: ClassVar[bool] = False
    """Whether it says that we ask too much at once."""
    fatal: ClassVar[bool] = False
    """Whether every other request will fail in the same way."""
    excusable: ClassVar[bool] = False
    """Whether a fatal one concerns this request alone where the endpoint has answered others."""
    status: int | None = None
    """Of the HTTP answer."""
    retry_after_s: float | None = None
    """How long the endpoint asks us to wait."""


class EndpointUnreachableError(EndpointError):
    """No connection, or it broke before an answer began."""


class UntrustedEndpointError(EndpointUnreachableError):
    """The address is https, and its certificate has expired, is for another name, or has an unknown signer."""

    transient = False
    fatal = True


class EndpointTimeoutError(EndpointError):
    """No complete answer within the time allowed."""

    overload = True


class EndpointOverloadedError(EndpointError):
    """Status 429, 503 or 529: too many requests."""

    overload = True


class EndpointFailureError(EndpointError):
    """Another 5xx status, or an answer that is itself an error report."""


class TruncatedAnswerError(EndpointError):
    """The connection ended in the middle of an answer."""


class MalformedAnswerError(EndpointError):
    """The answer is not JSON, or not shaped as a chat completion."""


class AnswerTooLargeError(EndpointError):
    """The answer is larger than we are willing to read."""

    transient = False


class RequestRefusedError(EndpointError):
    """Another 4xx status: the endpoint doesn't take this request."""

    transient = False


class AccessDeniedError(RequestRefusedError):
    """Status 401 or 403: the key is missing or wrong, or (403) what is asked is not allowed."""

    fatal = True
    excusable = True


class NoSuchModelError(RequestRefusedError):
    """Status 404: the address or the model's name is wrong."""

    fatal = True
    excusable = True


class ContentFilterError(RequestRefusedError):
    """The endpoint's filter stopped the request, or the answer before a word of it."""


class RedirectedError(RequestRefusedError):
    """Status 3xx: the endpoint is at another address."""

    fatal = True


class OutOfCreditError(RequestRefusedError):
    """Status 402, or 429 for want of money rather than of patience."""

    fatal = True


# ---
# Refusals that speak of lengths: is the conversation too long, or the bound on the reply?
#
# Servers disagree on a reply's bound (`max_tokens`) that the context can't hold: some lower it, some refuse the request
# where the bound alone is larger, some where prompt and bound together are. Leaving the bound out asks for what is
# left, which is less than the bound where that was the reason; so a refusal may be asked again without it.

FIELDS = ("max_tokens", "max_completion_tokens")
"""Names of the bound, the older first."""

_CONTEXT_FULL = re.compile(
    r"context_length_exceeded|context length|context window|max_model_len|maximum.{0,40}tokens|prompt is too long", re.I
)
_BOUND = re.compile(r"max_?(?:completion|output|new)?_?tokens|(?:completion|output) tokens", re.I)
_LARGEST = re.compile(
    r"(?:context (?:length|window|size)|max_model_len|max_total_tokens|at most|<=|>)\D{0,30}?(\d[\d,]*)", re.I
)


def says_full(refusal: str) -> bool:
    """Whether a refusal says that the conversation, perhaps with the reply's bound, doesn't fit the context."""
    return _CONTEXT_FULL.search(refusal) is not None


def blames_bound(refusal: str) -> bool:
    """Whether a refusal may be due to the bound on the reply alone."""
    return says_full(refusal) or _BOUND.search(refusal) is not None


def largest(refusal: str) -> int | None:
    """The tokens that a refusal names as what there can be at most, where it does."""
    found = _LARGEST.search(refusal)
    return int(found[1].replace(",", "")) if found else None


def bound(body: dict[str, Any]) -> int | None:
    """The bound in a request, or None."""
    return next((body[name] for name in FIELDS if isinstance(body.get(name), int)), None)


def without_bound(body: dict[str, Any]) -> dict[str, Any]:
    """The request without one."""
    return {name: value for name, value in body.items() if name not in FIELDS}


def with_bound(body: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The request with this one, under the name it already uses."""
    return {**body, FIELDS[1] if FIELDS[1] in body else FIELDS[0]: tokens}
