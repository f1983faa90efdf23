"""A lease on life for processes of other hosts: the kernel ends those of this one with the controller, theirs don't.

The controller says `alive` to them every few seconds; a process that has not heard it for a minute ends itself. The
host itself goes on, and serves the next controller.
"""

from __future__ import annotations

import contextvars
import os
import threading
from typing import Any, Self

from monarch.actor import Actor, ProcMesh, endpoint

LEASE_S = 50.0
"""After this long without a word..."""
LAST_CHANCE_S = 5.0
"""...and this long again, in which a process that was stopped itself hears what has arrived meanwhile, it ends."""
RENEW_S = 10.0
LEFT_ALONE = 113
"""Exit code of a process that ended itself."""


class Tenant(Actor):  # type: ignore[misc]
    """In each process: ends it when its lease has run out."""

    def __init__(self, lease_s: float, last_chance_s: float) -> None:
        self._renewed = threading.Event()
        self._waits = lease_s, last_chance_s
        threading.Thread(target=self._watch, name="forge-env-lease", daemon=True).start()

    @endpoint
    async def alive(self) -> None:
        """The controller lives."""
        self._renewed.set()

    def _watch(self) -> None:
        """In a thread of its own: whatever holds the process's event loops up, it is not alone."""
        lease_s, last_chance_s = self._waits
        while self._renewed.wait(lease_s) or self._renewed.wait(last_chance_s):
            self._renewed.clear()
        os._exit(LEFT_ALONE)


class Lease:
    """Keeps the processes of a mesh alive while it is held, also while this process's event loop is held up.

        with Lease(mesh):
            ...

    Args:
        mesh: processes of another host.
        lease_s: seconds without a word after which they end.
        last_chance_s: seconds for what has arrived while they were stopped.
        renew_s: seconds between two words.
    """

    def __init__(
        self,
        mesh: ProcMesh,
        *,
        lease_s: float = LEASE_S,
        last_chance_s: float = LAST_CHANCE_S,
        renew_s: float = RENEW_S,
    ) -> None:
        self._tenants: Any = mesh.spawn("lease", Tenant, lease_s, last_chance_s)
        self._renew_s = renew_s
        self._ended = threading.Event()
        run = contextvars.copy_context().run  # Monarch knows by it who is calling
        self._thread = threading.Thread(target=run, args=(self._renew,), name="forge-env-lease", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Say no more; call it before the processes are stopped, or they end by themselves."""
        self._ended.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _renew(self) -> None:
        while True:
            self._tenants.alive.broadcast()
            if self._ended.wait(self._renew_s):
                return
