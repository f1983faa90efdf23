"""Base class of the sandbox engines: a pool of boxes that each engine starts in its own way."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from forge_env.errors import SandboxError, UsageError
from forge_env.machine import free_memory_gb, usable_cpus
from forge_env.sandbox import HOLDER, SANDBOXES_PER_CPU, TENANT, Sandbox, SandboxEngine, SandboxSpec, phase
from sandboxes.box import Box, BoxSandbox
from sandboxes.network import AllowList
from sandboxes.pool import Pool

MAX_SANDBOXES = 10_000
"""Upper bound of `concurrency`; a larger number is taken for a mistake."""
RESERVE_MB = 256
RUNNER_MB = 64
"""Memory of the runner itself (MiB), added to the program's `memory_mb`."""
SCRATCH_MB = 32
"""Size of each writable folder other than the work folders (MiB)."""
PIDS = 1024
"""Process limit of a box: `MAX_PROCESSES` for each of its two users, plus the runner's own."""
CPU_PERIOD_US = 100_000
MAX_USES = 5000
"""Default number of leases after which a box is replaced."""
_DEFAULT = SandboxSpec()


class PooledEngine(SandboxEngine):
    """A `SandboxEngine` whose sandboxes are boxes in a pool.

    Args:
        concurrency: most sandboxes alive at once; by default four per CPU.
        warm: sandboxes to start ahead; by default one per CPU.
        max_uses: leases after which a box is replaced by a new one.
    """

    def __init__(self, *, concurrency: int | None = None, warm: int | None = None, max_uses: int = MAX_USES) -> None:
        cpus = usable_cpus()
        size = SANDBOXES_PER_CPU * cpus if concurrency is None else concurrency
        if not 1 <= size <= MAX_SANDBOXES:
            raise UsageError(f"concurrency={size} is out of range", fix=f"use 1 to {MAX_SANDBOXES}")
        self.concurrency = size
        self.warm = min(size, cpus if warm is None else warm)
        self._max_uses = max_uses
        self._pool: Pool | None = None
        self._checked: set[SandboxSpec] = set()

    @abstractmethod
    async def _prepare(self) -> None:
        """Build missing images and files, and remove the leftovers of dead owners."""

    @abstractmethod
    async def _make_box(self, spec: SandboxSpec) -> Box:
        """Start one box and wait until its runner is ready. Raises `SandboxError`."""

    def check(self, spec: SandboxSpec) -> None:  # noqa: D102
        AllowList.of(spec)

    async def start(self) -> None:  # noqa: D102
        if self._pool is not None:
            return
        await self._prepare()
        pool = Pool(self._make_box, size=self.concurrency, warm=self.warm, max_uses=self._max_uses, room=self._has_room)
        self._pool = pool
        try:
            await pool.start(SandboxSpec())
        except BaseException:  # also when cancelled: boxes that were started must be destroyed
            await self.close()
            raise

    async def acquire(self, spec: SandboxSpec | None = None) -> Sandbox:  # noqa: D102
        if self._pool is None:
            raise SandboxError("the sandbox engine was not started", fix="use it as 'async with engine:'")
        spec = spec or _DEFAULT
        if spec not in self._checked:
            self.check(spec)
            self._checked.add(spec)
        with phase("wait for one"):
            return BoxSandbox(await self._pool.acquire(spec, TENANT.get(), HOLDER.get()))

    async def release(self, sandbox: Sandbox) -> None:  # noqa: D102
        if not isinstance(sandbox, BoxSandbox):
            raise UsageError("this sandbox belongs to another engine")
        box, sandbox.box = sandbox.box, None
        if box is not None and self._pool is not None:
            self._pool.release(box)

    async def close(self) -> None:  # noqa: D102
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    def stats(self) -> dict[str, Any]:  # noqa: D102
        return {"engine": self.name, **(self._pool.stats() if self._pool else {})}

    @property
    def _alive(self) -> int:
        """Number of sandboxes alive."""
        return self._pool.total if self._pool else 0

    def _has_room(self, spec: SandboxSpec) -> bool:
        """Whether the machine would have memory to spare if this sandbox used its whole limit."""
        return free_memory_gb() * 1024 > spec.memory_mb + RESERVE_MB


class RemoteEngine(PooledEngine):
    """A `PooledEngine` whose boxes run elsewhere, from images or templates there."""

    instead_of_allow = "use network=True, or the docker engine"
    """What to do without a filtering proxy, for error messages."""

    def _has_room(self, spec: SandboxSpec) -> bool:
        return True  # the other side decides

    def check(self, spec: SandboxSpec) -> None:  # noqa: D102
        super().check(spec)
        if spec.proxied:
            raise UsageError(f"the {self.name} engine does not support 'allow' or 'origin'", fix=self.instead_of_allow)
        if spec.packages:
            fix = "name an image that has them"
            raise UsageError(f"the {self.name} engine installs no packages ({', '.join(spec.packages)})", fix=fix)
        if spec.writable:
            fix = "use the docker engine"
            raise UsageError(f"the {self.name} engine has no writable folders ({', '.join(spec.writable)})", fix=fix)
        if spec.image.startswith(("/", "./", "../", "~")):
            raise UsageError(
                f"the {self.name} engine builds no images ({spec.image})", fix="name one that exists there"
            )
