"""An actor to call, to kill, and to call again."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from trainers.actors.actor import ForgeActor, concurrent_endpoint, endpoint
from trainers.actors.remote import ActorDiedError


class NotAllowedError(ValueError):
    """Raised over there."""


class TwoPartsError(Exception):
    """Does not survive pickling: it is made of two arguments and knows one."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


class Counter(ForgeActor):
    """A number, and the version of something that all replicas have to know."""

    repeatable = frozenset({"where", "wait"})

    def __init__(self, start: int = 0, *, broken: str = "") -> None:
        self.value, self.version, self._broken = start, -1, broken
        self._go_on = asyncio.Event()

    @concurrent_endpoint
    async def setup(self) -> None:
        if self._broken and not Path(self._broken).exists():  # noqa: ASYNC240 - a look, in a test
            raise NotAllowedError("this replica can't be set up")

    @concurrent_endpoint
    async def add(self, amount: int, times: int = 1) -> int:
        self.value += amount * times
        return self.value

    @concurrent_endpoint
    async def get(self) -> int:
        return self.value

    @concurrent_endpoint
    async def where(self) -> tuple[int, int]:
        """Process and version."""
        return os.getpid(), self.version

    @concurrent_endpoint
    async def wait(self) -> int:
        await self._go_on.wait()
        return os.getpid()

    @concurrent_endpoint
    async def wait_once(self) -> int:
        """The same, but not to be repeated."""
        await self._go_on.wait()
        return os.getpid()

    @concurrent_endpoint
    async def go(self) -> None:
        self._go_on.set()

    @concurrent_endpoint
    async def load(self, version: int) -> int:
        self.version = int(version)
        return version

    @concurrent_endpoint
    async def fail(self, message: str) -> None:
        raise NotAllowedError(message)

    @concurrent_endpoint
    async def fail_in_two_parts(self) -> None:
        raise TwoPartsError("no room", "it is full")

    @endpoint
    async def fail_in_order(self) -> None:
        raise TwoPartsError("no room", "it is full")

    @concurrent_endpoint
    async def lose_another(self) -> None:
        raise ActorDiedError("the judge has ended")
