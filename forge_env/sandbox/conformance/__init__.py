"""What every sandbox engine must do, as a test suite that third parties run on theirs:

    class TestMyEngine(SandboxConformance):
        @pytest_asyncio.fixture(scope="class", loop_scope="class")
        @classmethod
        async def engine(cls):
            async with MyEngine(concurrency=2) as engine:
                yield engine

Needs pytest and pytest-asyncio. The engine must allow at least two sandboxes at once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from forge_env.sandbox.conformance.judging import JudgingTests
from forge_env.sandbox.conformance.life import LifeTests
from forge_env.sandbox.conformance.programs import ProgramTests
from forge_env.sandbox.conformance.sessions import SessionTests
from forge_env.sandbox.protocol import Sandbox, SandboxEngine


@pytest.mark.asyncio(loop_scope="class")
class SandboxConformance(ProgramTests, JudgingTests, SessionTests, LifeTests):
    """Subclass it and provide the fixture `engine`, with class scope."""

    @pytest_asyncio.fixture(loop_scope="class")
    async def sandbox(self, engine: SandboxEngine) -> AsyncIterator[Sandbox]:
        """A clean sandbox."""
        async with engine.session() as sandbox:
            yield sandbox
