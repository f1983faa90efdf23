"""Which GPUs an actor's processes see: every GPU is one run's, and one actor's unless roles share."""

from __future__ import annotations

import socket

from forge_env import machine
from forge_env.errors import ForgeError


class Placement:
    """The GPUs of this machine that no other run has, handed out in order and kept to the end of this one.

    Args:
        shared: every role has all of them; else each GPU is given to one actor.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self._shared = shared
        self._found: list[machine.GPU] | None = None
        self._left: dict[str, list[machine.GPU]] = {}
        self._held: dict[str, socket.socket] = {}

    def take(self, count: int, role: str) -> dict[str, str]:
        """Environment of an actor's processes that gives them `count` GPUs: rank r uses the r-th.

        Args:
            count: of GPUs.
            role: of the actor; the same for all replicas.

        Raises:
            ForgeError: there are not as many left.
        """
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
                f"{count} GPUs are needed and {len(taken)} are left", fix="use fewer processes, or wait for other runs"
            )
        return machine.showing(taken)

    def close(self) -> None:
        """Let other runs have them."""
        for held in self._held.values():
            held.close()
        self._held.clear()
