"""Sandbox engines for tests. In CI a missing engine is a failure."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from forge_env.sandbox import Sandbox, SandboxEngine, open_engine
from forge_env.sandbox.engines import load_engine


def require(name: str) -> None:
    """Skip the test, or fail in CI, if the engine can't work here."""
    if reason := load_engine(name).unavailable_reason():
        if os.environ.get("CI"):
            pytest.fail(f"{name} engine: {reason}")
        pytest.skip(f"{name} engine: {reason}")


ENGINES = [pytest.param("docker", marks=pytest.mark.docker), "local"]
WITH_SLOW_DOCKER = [pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.slow]), "local"]


def engine_fixture(*engines: Any, concurrency: int = 2, warm: int = 1) -> Any:
    """Return a fixture `engine` for a module, started once: the embedded engine, or each of `engines`."""
    names = engines or ("local",)

    @pytest_asyncio.fixture(scope="module", loop_scope="module", params=names if len(names) > 1 else None)
    async def engine(request: Any) -> AsyncIterator[SandboxEngine]:
        name = getattr(request, "param", names[0])
        require(name)
        async with open_engine(name, concurrency=concurrency, warm=warm) as engine:
            yield engine

    return engine


engine = engine_fixture(*ENGINES, concurrency=3, warm=2)


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(engine: SandboxEngine) -> AsyncIterator[Sandbox]:
    """A clean sandbox."""
    async with engine.session() as sandbox:
        yield sandbox
