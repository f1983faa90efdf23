"""An engine that is opened by the first sandbox asked of it, for callers that can't know whether any will be."""

from __future__ import annotations

import asyncio
from typing import Any

from forge_env.sandbox.engines import open_engine
from forge_env.sandbox.protocol import Sandbox, SandboxEngine
from forge_env.sandbox.types import SandboxSpec


class LazyEngine(SandboxEngine):
    """Stands for `open_engine(name, **options)`; an environment that runs no code never opens it."""

    def __init__(self, name: str = "auto", **options: Any) -> None:
        self.name = name
        self._options = options
        self._engine: SandboxEngine | None = None
        self._opening = asyncio.Lock()

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Known only when it is opened."""
        return None

    async def start(self) -> None:
        """Nothing yet."""
        return

    async def acquire(self, spec: SandboxSpec | None = None) -> Sandbox:
        """A sandbox of the real engine, which starts now if it hasn't.

        Raises:
            SandboxUnavailableError: no engine works here.
        """
        async with self._opening:
            if self._engine is None:
                engine = open_engine(self.name, **self._options)
                try:
                    await engine.start()
                except BaseException:  # cancelled too: no half-started engine may be left
                    await engine.close()
                    raise
                self._engine = engine
        return await self._engine.acquire(spec)

    async def release(self, sandbox: Sandbox) -> None:
        """Give a sandbox back."""
        if self._engine is not None:
            await self._engine.release(sandbox)

    async def close(self) -> None:
        """Close the real engine if there is one."""
        async with self._opening:
            engine, self._engine = self._engine, None
            if engine is not None:
                await engine.close()

    def stats(self) -> dict[str, Any]:
        """Counters of the real engine."""
        return self._engine.stats() if self._engine is not None else {}
