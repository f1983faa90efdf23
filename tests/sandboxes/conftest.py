"""Engines for the tests of this folder. In CI nothing is skipped: a missing engine is a failure."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from forge_env.sandbox import Sandbox, SandboxEngine, open_engine
from forge_env.sandbox.engines import load_engine


def require(name: str) -> None:
    """Skip loudly, or fail in CI, when the engine can't work here."""
    if reason := load_engine(name).unavailable_reason():
        if os.environ.get("CI"):
            pytest.fail(f"{name} engine: {reason}")
        pytest.skip(f"{name} engine: {reason}")


ENGINES = [pytest.param("docker", marks=pytest.mark.docker), "local"]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def engine(request: Any) -> AsyncIterator[SandboxEngine]:
    """A started engine with room for three sandboxes, shared by the tests of one file."""
    require(request.param)
    async with open_engine(request.param, concurrency=3, warm=2) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(engine: SandboxEngine) -> AsyncIterator[Sandbox]:
    """A clean sandbox."""
    async with engine.session() as sandbox:
        yield sandbox
