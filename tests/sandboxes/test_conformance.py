"""Both engines against the suite that every engine must pass."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from forge_env.sandbox import SandboxEngine, open_engine
from forge_env.sandbox_audit.conformance import SandboxConformance

from .conftest import require


@pytest.mark.docker
class TestDocker(SandboxConformance):
    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def engine(cls) -> AsyncIterator[SandboxEngine]:
        require("docker")
        async with open_engine("docker", concurrency=3, warm=2) as engine:
            yield engine


class TestLocal(SandboxConformance):
    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def engine(cls) -> AsyncIterator[SandboxEngine]:
        require("local")
        async with open_engine("local", concurrency=3, warm=2) as engine:
            yield engine
