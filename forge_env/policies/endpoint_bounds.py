"""Refusals that speak of lengths: is the conversation too long, or the bound on the reply?

Servers disagree on a reply's bound (`max_tokens`) that the context can't hold: some lower it, some refuse the request
where the bound alone is larger, some where prompt and bound together are. Leaving the bound out asks for what is left,
which is less than the bound where that was the reason; so a refusal may be asked again without it.
"""

from __future__ import annotations

import re
from typing import Any

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
