"""A lease for processes on other hosts, which end themselves when the controller no longer renews it.

On the controller's own host the kernel ends processes together with the controller. Those on other hosts get a call of
`alive` every few seconds, and a process without one for about a minute exits. The host's worker keeps running and
serves the next controller.
"""

from __future__ import annotations

import contextvars
import os
import threading
from typing import Any

from monarch.actor import Actor, ProcMesh, endpoint

LEASE_S = 50.0
"""Seconds without a renewal after which the lease has run out."""
LAST_CHANCE_S = 5.0
"""Seconds that a process then waits before it exits: one that was stopped can read renewals that arrived meanwhile."""
RENEW_S = 10.0
LEFT_ALONE = 113
"""Exit code of a process whose lease has run out."""


class Tenant(Actor):  # type: ignore[misc]
    """Actor in each leased process, which exits when the lease has run out."""

    def __init__(self, lease_s: float, last_chance_s: float) -> None:
        self._renewed = threading.Event()
        self._waits = lease_s, last_chance_s
        threading.Thread(target=self._watch, name="forge-env-lease", daemon=True).start()

    @endpoint
    async def alive(self) -> None:
        """Renew the lease."""
        self._renewed.set()

    def _watch(self) -> None:
        """Wait for renewals in a separate thread, so that blocked event loops don't delay the exit."""
        lease_s, last_chance_s = self._waits
        while self._renewed.wait(lease_s) or self._renewed.wait(last_chance_s):
            self._renewed.clear()
        os._exit(LEFT_ALONE)


class Lease:
    """Keeps the processes of a mesh alive by renewing their lease, even while this process's event loop is blocked.

    Args:
        lease_s: seconds without a renewal after which the lease has run out.
        last_chance_s: seconds that processes then wait before they exit, to read renewals that arrived while stopped.
        renew_s: seconds between two renewals.
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
        run = contextvars.copy_context().run  # Monarch finds the calling actor in the context
        self._thread = threading.Thread(target=run, args=(self._renew,), name="forge-env-lease", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop renewing; call it before the processes are stopped, which otherwise exit when the lease has run out."""
        self._ended.set()
        self._thread.join()

    def _renew(self) -> None:
        while True:
            self._tenants.alive.broadcast()
            if self._ended.wait(self._renew_s):
                return
