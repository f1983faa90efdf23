"""Engines with two sandboxes: a neighbour that works all the time, and the one under attack."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from forge_env.sandbox import SandboxEngine
from forge_env.sandbox_audit.audit import Neighbour, neighbour
from tests.sandboxes.conftest import ENGINES, engine_fixture

engine = engine_fixture(*ENGINES, warm=2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def witness(engine: SandboxEngine) -> AsyncIterator[Neighbour]:
    async with neighbour(engine) as witness:
        yield witness


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark attacks on the Docker engine, which take longer, as slow and as part of `make test`."""
    for item in items:
        if item.get_closest_marker("docker") and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.core)
