"""Which GPUs an actor's processes see: every GPU is given to one actor only."""

from __future__ import annotations

from forge_env import machine
from forge_env.errors import ForgeError


class Placement:
    """The GPUs of this machine, handed out in order."""

    def __init__(self) -> None:
        self._free: list[str] | None = None

    def take(self, count: int) -> dict[str, str]:
        """Environment of an actor's processes that gives them `count` GPUs: rank r uses the r-th.

        Raises:
            ForgeError: there are not as many left.
        """
        if self._free is None:
            self._free = [gpu.uuid for gpu in machine.gpus()]
        if count > len(self._free):
            raise ForgeError(f"{count} GPUs are needed and {len(self._free)} are left", fix="use fewer processes")
        taken, self._free = self._free[:count], self._free[count:]
        return {"CUDA_VISIBLE_DEVICES": ",".join(taken)} if count else {}
