"""From acquire to release."""

from __future__ import annotations

import asyncio

import pytest

from forge_env.errors import SandboxError
from forge_env.sandbox.protocol import Sandbox, SandboxEngine
from forge_env.sandbox.types import Limits


class LifeTests:
    """Wiping, waiting, cancelling, neighbours."""

    async def test_released_is_wiped(self, engine: SandboxEngine) -> None:
        """Nothing of one user reaches the next."""
        for _ in range(4):
            async with engine.session() as sandbox:
                look = "ls -A . /tmp /dev/shm | grep -v :; true"
                assert (await sandbox.exec(["sh", "-c", look])).stdout.split() == []
                await sandbox.exec(["sh", "-c", "touch here /tmp/there /dev/shm/everywhere"])

    async def test_use_after_release_is_refused(self, engine: SandboxEngine) -> None:
        """A released sandbox can't be used, and releasing twice does no harm."""
        sandbox = await engine.acquire()
        await engine.release(sandbox)
        with pytest.raises(SandboxError):
            await sandbox.run_python("print(1)")
        await engine.release(sandbox)

    async def test_more_users_than_sandboxes(self, engine: SandboxEngine) -> None:
        """Demand above the bound waits and is served."""

        async def one(number: int) -> str:
            async with engine.session() as sandbox:
                return (await sandbox.run_python(f"print({number})")).stdout

        assert await asyncio.gather(*map(one, range(40))) == [f"{number}\n" for number in range(40)]

    async def test_cancelled_call(self, engine: SandboxEngine) -> None:
        """A cancelled call stops its program; the engine goes on."""
        sandbox = await engine.acquire()
        call = asyncio.ensure_future(sandbox.run_python("import time; time.sleep(60)", limits=Limits(wall_s=60)))
        await sandbox_has_started(sandbox)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await engine.release(sandbox)
        async with engine.session() as another:
            assert (await another.run_python("print(1)")).ok

    async def test_neighbours_are_apart(self, engine: SandboxEngine) -> None:
        """Two sandboxes see neither each other's files nor each other's processes."""
        async with engine.session() as left, engine.session() as right:
            await left.write_file("secret", b"1")
            with pytest.raises(FileNotFoundError):
                await right.read_file("secret")


async def sandbox_has_started(sandbox: Sandbox) -> None:
    """Give a call that was just scheduled the chance to be sent."""
    for _ in range(3):
        await asyncio.sleep(0)
