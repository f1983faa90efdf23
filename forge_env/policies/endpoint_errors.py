"""What can go wrong between us and a model endpoint. Every one is a `GeneratorError`: never the model's zero.

The class name is the kind that displays and summaries count.
"""

from __future__ import annotations

from typing import ClassVar

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
    """The address is https, and its certificate is expired, for another name, or signed by nobody known."""

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
    """The answer is no JSON, or not shaped as a chat completion."""


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
