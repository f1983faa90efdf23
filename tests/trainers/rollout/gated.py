"""A generator that answers when it is told to."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from trainers.actors.actor import ForgeActor, concurrent_endpoint
from trainers.generator.types import Completion, SamplingOptions


class GatedGenerator(ForgeActor):
    """Samples one token, for everybody at once, from `open` on."""

    def __init__(self) -> None:
        self._waiting: set[str] = set()
        self._aborted: list[str] = []
        self._gate = asyncio.Event()
        self._changed = asyncio.Condition()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    @concurrent_endpoint
    async def generate(
        self, prompt_ids: Any, options: SamplingOptions, request_id: str, held: bool = False, at_least: int = 0
    ) -> Completion:
        """Wait, and answer."""
        self._waiting.add(request_id)
        await self._tell()
        await self._gate.wait()
        self._waiting.discard(request_id)
        return Completion(prompt_ids, np.array([40]), np.array([-1.0]), np.array([0]), "stop", 0)

    @concurrent_endpoint
    async def abort(self, request_id: str) -> None:
        self._waiting.discard(request_id)
        self._aborted.append(request_id)
        await self._tell()

    @concurrent_endpoint
    async def until(self, waiting: int, aborted: int = 0) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._waiting) >= waiting and len(self._aborted) >= aborted)

    @concurrent_endpoint
    async def open(self) -> None:
        self._gate.set()
