"""Wrong code earns nothing from tests that are judged apart, whatever it does to pass them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from forge_env.sandbox import Limits, SandboxEngine, SandboxSpec, TestsResult, open_engine

from .conftest import ENGINES, require
from .wheels import use_wheels
from .wrong_code import HONEST, TESTS, WRONG

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = Limits(wall_s=10, memory_mb=1024)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SandboxEngine]:
    require(request.param)
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_wheels(tmp_path_factory.mktemp("wheels"), monkeypatch)
        async with open_engine(request.param, concurrency=1, warm=0) as engine:
            yield engine


async def judged(engine: SandboxEngine, code: str) -> TestsResult:
    async with engine.session(SandboxSpec(packages=("pytest",))) as sandbox:
        return await sandbox.run_tests(files={"shop.py": code}, tests={"test_shop.py": TESTS}, limits=LIMITS)


async def test_honest_code_passes_without_doubts(engine: SandboxEngine) -> None:
    result = await judged(engine, HONEST)
    assert (result.passed, result.how, result.doubts, result.failures) == (True, "apart", [], [])


@pytest.mark.parametrize("name", WRONG)
async def test_wrong_code_earns_nothing(engine: SandboxEngine, name: str) -> None:
    result = await judged(engine, WRONG[name])
    assert (result.passed, result.how) == (False, "apart")
