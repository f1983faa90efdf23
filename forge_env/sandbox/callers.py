"""Context of a sandbox call: the tenant and holder it is made for, and the callback that records its phases.

These are context variables instead of arguments, so that environments can ask for sandboxes without knowing them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

TENANT: ContextVar[str] = ContextVar("sandbox_tenant", default="")
"""The environment (or other tenant) that sandboxes are acquired for; pools share them evenly among tenants."""
HOLDER: ContextVar[object | None] = ContextVar("sandbox_holder", default=None)
"""The `on_behalf_of` block, such as an episode's, that holds acquired sandboxes; None outside of any."""


class on_behalf_of:  # a class, since each open episode has one and a generator takes five times the memory
    """A block in which acquired sandboxes count for `tenant`."""

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
"""The callback that records sandbox phases, such as a timeline's; see `seen_by`."""


@contextmanager
def seen_by(tell: Callable[[str, float, float], object] | None) -> Iterator[None]:
    """Report the block's waits for sandboxes and calls of sandboxes to a callback.

    Args:
        tell: called with the phase ("wait for one", "command", "python", "tests", "files", "session"), its start and
            its end, in seconds of `time.perf_counter`. None: no reports.
    """
    token = SEEN.set(tell)
    try:
        yield
    finally:
        SEEN.reset(token)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Report this block to the callback of `seen_by`, if any, as a phase."""
    tell, begun = SEEN.get(), time.perf_counter()
    try:
        yield
    finally:
        if tell is not None:
            tell(name, begun, time.perf_counter())
