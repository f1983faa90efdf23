"""Who calls an engine: on whose behalf sandboxes are acquired, and who is told what is done with them.

Neither is an argument: an environment's code asks for a sandbox, and knows nothing of either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

TENANT: ContextVar[str] = ContextVar("sandbox_tenant", default="")
"""On whose behalf sandboxes are acquired, such as an environment's name: pools share them out evenly."""
HOLDER: ContextVar[object | None] = ContextVar("sandbox_holder", default=None)
"""The block of `on_behalf_of`, such as an episode, that holds what is acquired; None outside of all."""


class on_behalf_of:  # a class, since every open episode is in one, and a generator is five times as big
    """A block in which sandboxes that are acquired count for `tenant`."""

    __slots__ = ("__weakref__", "_holder_token", "_tenant", "_token")

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant

    def __enter__(self) -> on_behalf_of:
        self._token = TENANT.set(self._tenant)
        self._holder_token = HOLDER.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        HOLDER.reset(self._holder_token)
        TENANT.reset(self._token)


SEEN: ContextVar[Callable[[str, float, float], object] | None] = ContextVar("sandbox_seen", default=None)
"""Who wants to know what is done with sandboxes, such as a timeline; see `seen_by`."""


@contextmanager
def seen_by(tell: Callable[[str, float, float], object] | None) -> Iterator[None]:
    """A block of which each wait for a sandbox and each call of one is told: what it was, its start and its end.

    Args:
        tell: given the phase ("wait for one", "command", "python", "tests", "files", "session"), and seconds of
            `time.perf_counter`; None: nobody wants to know.
    """
    token = SEEN.set(tell)
    try:
        yield
    finally:
        SEEN.reset(token)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """What an engine does in this block for whoever wants to know (`seen_by`)."""
    tell, begun = SEEN.get(), time.perf_counter()
    try:
        yield
    finally:
        if tell is not None:
            tell(name, begun, time.perf_counter())
