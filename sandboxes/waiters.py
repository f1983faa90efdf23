"""Who waits for a box: first come, first served, but a tenant who holds fewer goes before one who holds more."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from forge_env.sandbox import SandboxSpec
from sandboxes.box import Box


@dataclass(eq=False)
class Waiter:
    """One who waits for a box of `spec`."""

    spec: SandboxSpec
    tenant: str
    box: asyncio.Future[Box]


class Waiters:
    """The queue."""

    def __init__(self) -> None:
        self._queue: list[Waiter] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._queue)

    def wants(self, spec: SandboxSpec) -> bool:
        """Whether anybody waits for this kind."""
        return any(waiter.spec == spec for waiter in self._queue)

    def join(self, spec: SandboxSpec, tenant: str) -> Waiter:
        """A new last one."""
        waiter = Waiter(spec, tenant, asyncio.get_running_loop().create_future())
        self._queue.append(waiter)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """Wait no more; fine when it was served already."""
        if waiter in self._queue:
            self._queue.remove(waiter)

    def next(self, spec: SandboxSpec, holders: Iterable[str]) -> Waiter | None:
        """Take out who is next for a box of this kind, given the tenant of every box that is held."""
        held = Counter(holders)
        candidates = [waiter for waiter in self._queue if waiter.spec == spec and not waiter.box.done()]
        if not candidates:
            return None
        chosen = min(candidates, key=lambda waiter: held[waiter.tenant])  # the first among equals
        self._queue.remove(chosen)
        return chosen

    def fail_first(self, spec: SandboxSpec, error: Exception) -> None:
        """The first who waits for this kind gets an error instead."""
        for waiter in self._queue:
            if waiter.spec == spec:
                self._queue.remove(waiter)
                _fail(waiter, error)
                return

    def fail_all(self, error: Exception) -> None:
        """Everybody gets an error."""
        for waiter in self._queue:
            _fail(waiter, error)
        self._queue.clear()


def _fail(waiter: Waiter, error: Exception) -> None:
    if not waiter.box.done():
        waiter.box.set_exception(error)
