"""GPUs of actors: each GPU belongs to one run, and to one of its actors unless roles share GPUs."""

from __future__ import annotations

import socket

from forge_env import machine
from forge_env.errors import ForgeError


class Placement:
    """Assigns this machine's GPUs that no other run uses to actors, in order, until the end of this run.

    Args:
        shared: every role can use all GPUs; otherwise each GPU is assigned to one actor.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self._shared = shared
        self._found: list[machine.GPU] | None = None
        self._left: dict[str, list[machine.GPU]] = {}
        self._held: dict[str, socket.socket] = {}

    def take(self, count: int, role: str) -> dict[str, str]:
        """Assign `count` GPUs to an actor; return its processes' environment variables. Rank r uses the r-th GPU."""
        if not count:
            return {}
        if self._found is None:
            self._found = machine.gpus()
        left = self._left.setdefault(role if self._shared else "", list(self._found))
        taken: list[str] = []
        while len(taken) < count and left:
            gpu = left.pop(0)
            if gpu.uuid not in self._held:
                held = machine.claim(gpu)
                if held is None:
                    continue
                self._held[gpu.uuid] = held
            taken.append(gpu.uuid)
        if len(taken) < count:
            raise ForgeError(
                f"{count} GPUs are needed, {len(taken)} are free", fix="use fewer processes, or wait for other runs"
            )
        return machine.showing(taken)

    def close(self) -> None:
        """Release the GPUs for other runs."""
        for held in self._held.values():
            held.close()
        self._held.clear()
