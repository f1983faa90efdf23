"""A sandbox engine that says how many sandboxes are out and how many are waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forge_env.sandbox.protocol import Sandbox, SandboxEngine
from forge_env.sandbox.types import SandboxSpec
from forge_env.working_time import waiting

QUEUE = 2
"""Sandboxes waited for, however few are out, that don't yet hold anything up."""


class WatchedEngine(SandboxEngine):
    """Passes everything on to `engine`. Waiting for a sandbox is no working time."""

    def __init__(self, engine: SandboxEngine, *, on_change: Callable[[], object] = lambda: None) -> None:
        self.engine = engine
        self.on_change = on_change
        """Called whenever a sandbox was handed out."""
        self.out = 0
        self.queued = 0

    @property
    def in_use(self) -> bool:
        """Whether anybody has, or waits for, a sandbox."""
        return self.out + self.queued > 0

    @property
    def saturated(self) -> bool:
        """Whether the queue is as long as all that is out: starting more samples would only lengthen it."""
        return self.queued >= max(QUEUE, self.out)

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Known by the engine inside only."""
        return None

    async def start(self) -> None:
        """Start the engine."""
        await self.engine.start()

    async def acquire(self, spec: SandboxSpec | None = None) -> Sandbox:
        """A sandbox of the engine."""
        self.queued += 1
        try:
            with waiting():
                sandbox = await self.engine.acquire(spec)
        finally:
            self.queued -= 1
        self.out += 1
        self.on_change()
        return sandbox

    async def release(self, sandbox: Sandbox) -> None:
        """Give a sandbox back."""
        self.out -= 1
        await self.engine.release(sandbox)

    async def close(self) -> None:
        """Close the engine."""
        await self.engine.close()

    def stats(self) -> dict[str, Any]:
        """Counters of the engine."""
        return self.engine.stats()
