"""The E2B engine, through E2B's own client, against its API on this machine (`e2b_api.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from forge_env.errors import SandboxError, SandboxUnavailableError, UsageError
from forge_env.sandbox import SandboxEngine, SandboxSpec, open_engine
from forge_env.sandbox.engines import available_engines
from forge_env.sandbox_audit.conformance import SandboxConformance
from sandboxes import owner
from sandboxes.e2b import engine as module

pytest.importorskip("e2b")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="machines are made by root")]

from .e2b_api import KEY, FakeE2B  # noqa: E402  needs e2b


@contextlib.asynccontextmanager
async def served(cloud: FakeE2B) -> AsyncIterator[FakeE2B]:
    with pytest.MonkeyPatch.context() as patch:
        async with cloud.serve() as address:
            for name, value in {
                "E2B_API_KEY": KEY,
                "E2B_API_URL": address,
                "E2B_SANDBOX_URL": address,
                "E2B_HTTP_VERSION": "1.1",
            }.items():
                patch.setenv(name, value)
            yield cloud


async def opened(**options: object) -> SandboxEngine:
    """As every command opens it: what is asked first blocks, and its answer must come from elsewhere."""
    return await asyncio.to_thread(open_engine, "e2b", **options)


@pytest.mark.asyncio(loop_scope="class")
class TestE2B(SandboxConformance):
    """All that every engine must do."""

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def engine(cls, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SandboxEngine]:
        async with served(FakeE2B(tmp_path_factory.mktemp("machines"))) as cloud:
            async with await opened(concurrency=3, warm=2) as engine:
                yield engine
            assert not cloud.machines


async def test_a_program_in_a_machine_has_no_rights_and_no_network(tmp_path: Path) -> None:
    async with served(FakeE2B(tmp_path)) as cloud:
        async with await opened(concurrency=1, warm=0) as engine, engine.session() as sandbox:
            status = (await sandbox.exec(["cat", "/proc/self/status"])).stdout
            look = "touch /etc/x /opt/x /var/tmp/x; ls /proc/net/dev /sys; cat /proc/net/dev | grep -c :; env"
            seen = await sandbox.exec(["sh", "-c", look])
        (body,) = cloud.created
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == 0
    assert "0" not in fields["Uid"].split()
    assert seen.stderr.count("Read-only file system") == 3
    assert "\n1\n" in seen.stdout  # loopback
    assert KEY not in seen.stdout
    assert body["allow_internet_access"] is False
    assert body["metadata"] == {"forge_env": owner.this_process()}


async def test_leases_are_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENEW_S", 0.05)
    async with served(FakeE2B(tmp_path)) as cloud, await opened(concurrency=1, warm=1):
        (machine,) = cloud.machines.values()
        async with asyncio.timeout(20):
            await cloud.renewed.wait()
        assert machine.timeouts[:2] == [module.LEASE_S, module.LEASE_S]


async def test_a_machine_that_ends_is_replaced(tmp_path: Path) -> None:
    async with served(FakeE2B(tmp_path)) as cloud, await opened(concurrency=1, warm=0) as engine:
        sandbox = await engine.acquire()
        next(iter(cloud.machines.values())).end()
        with pytest.raises(SandboxError, match=r"lost|gone"):
            await sandbox.run_python("import time; time.sleep(60)")
        await engine.release(sandbox)
        async with engine.session() as another:
            assert (await another.run_python("print(1)")).ok
        assert len(cloud.created) == 2


async def test_what_is_wrong_is_named_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(FakeE2B(tmp_path)) as cloud:
        monkeypatch.setenv("E2B_API_KEY", KEY.replace("0", "1"))
        with pytest.raises(SandboxUnavailableError, match="Invalid API key"):
            await opened()
        monkeypatch.setenv("E2B_API_KEY", "")
        with pytest.raises(SandboxUnavailableError, match="E2B_API_KEY is not set"):
            await opened()
        monkeypatch.setenv("E2B_API_KEY", KEY)
        async with await opened(base_image="nobodys", concurrency=1, warm=0) as engine:
            with pytest.raises(SandboxUnavailableError, match="template 'nobodys' not found"):
                await engine.acquire()
            for spec in (SandboxSpec(allow=("example.org",)), SandboxSpec(packages=("numpy",)), SandboxSpec("./here")):
                with pytest.raises(UsageError, match="e2b engine"):
                    engine.check(spec)
        cloud.limit = 0
        async with await opened(concurrency=1, warm=0) as engine:
            with pytest.raises(SandboxError, match="maximum number of concurrent sandboxes"):
                await engine.acquire(SandboxSpec("mine"))
        assert not cloud.machines
    assert "e2b" not in available_engines()
