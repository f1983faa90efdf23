"""Which GPUs an actor's processes see: every GPU is given to one actor of one run only."""

from __future__ import annotations

import socket

from forge_env import machine
from forge_env.errors import ForgeError


class Placement:
    """The GPUs of this machine that no other run has, handed out in order and kept to the end of this one."""

    def __init__(self) -> None:
        self._left: list[machine.GPU] | None = None
        self._held: list[socket.socket] = []

    def take(self, count: int) -> dict[str, str]:
        """Environment of an actor's processes that gives them `count` GPUs: rank r uses the r-th.

        Raises:
            ForgeError: there are not as many left.
        """
        if not count:
            return {}
        if self._left is None:
            self._left = machine.gpus()
        taken: list[str] = []
        while len(taken) < count and self._left:
            gpu = self._left.pop(0)
            if (held := machine.claim(gpu)) is not None:
                self._held.append(held)
                taken.append(gpu.uuid)
        if len(taken) < count:
            raise ForgeError(
                f"{count} GPUs are needed and {len(taken)} are left", fix="use fewer processes, or wait for other runs"
            )
        return {"CUDA_VISIBLE_DEVICES": ",".join(taken)}

    def close(self) -> None:
        """Let other runs have them."""
        for held in self._held:
            held.close()
        self._held.clear()
