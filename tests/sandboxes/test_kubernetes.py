"""The Kubernetes engine against a small API server that runs pods as processes (`cluster.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import forge_env as fe
from forge_env.cli.main import main
from forge_env.errors import SandboxError, SandboxUnavailableError, UsageError
from forge_env.redaction import redact
from forge_env.sandbox import SandboxEngine, SandboxSpec, open_engine
from forge_env.sandbox.engines import LazyEngine, available_engines
from forge_env.sandbox_audit.conformance import LifeTests, SandboxConformance
from sandboxes import owner
from sandboxes.kubernetes import KubernetesEngine
from sandboxes.kubernetes.cluster import find_cluster
from sandboxes.kubernetes.pods import BOOT

pytest.importorskip("uvicorn")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="pods are made by root")]

from .cluster import FakeCluster  # noqa: E402  needs uvicorn

OWNER = """
import asyncio, os, signal
from forge_env.sandbox import open_engine
async def main():
    async with open_engine("kubernetes", concurrency=1, warm=1):
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def served(cluster: FakeCluster, folder: Path) -> AsyncIterator[FakeCluster]:
    with pytest.MonkeyPatch.context() as patch:
        async with cluster.serve(folder) as config:
            patch.setenv("KUBECONFIG", str(config))
            yield cluster


async def opened(**options: object) -> SandboxEngine:
    """As every command opens it: what is asked first blocks, and its answer must come from elsewhere."""
    return await asyncio.to_thread(open_engine, "kubernetes", **options)


@pytest.mark.asyncio(loop_scope="class")
class TestPods(SandboxConformance):
    """All that every engine must do."""

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def engine(cls, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SandboxEngine]:
        async with served(FakeCluster(), tmp_path_factory.mktemp("pods")) as cluster:
            async with await opened(concurrency=3, warm=2) as engine:
                yield engine
            assert not cluster.pods


@pytest.mark.asyncio(loop_scope="class")
class TestAgentSandbox(LifeTests):
    """The same through the controller of agent-sandbox."""

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def engine(cls, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SandboxEngine]:
        async with served(FakeCluster(agent_sandbox=True), tmp_path_factory.mktemp("pods")) as cluster:
            async with await opened(concurrency=3, warm=2) as engine:
                yield engine
            assert not cluster.pods
            assert {body["kind"] for _, _, body in cluster.requests} == {"Sandbox"}


async def test_a_pod_is_hardened(tmp_path: Path) -> None:
    async with served(FakeCluster(), tmp_path) as cluster:
        options = {"runtime_class": "gvisor", "pod": {"nodeSelector": {"a": "b"}}}
        async with await opened(concurrency=1, warm=0, **options) as engine, engine.session() as sandbox:
            shown = (await sandbox.exec(["cat", "/proc/self/status"])).stdout
            assert (await sandbox.exec(["sh", "-c", "echo $KUBERNETES_SERVICE_HOST"])).stdout == "\n"
        fields = dict(line.split(":\t", 1) for line in shown.splitlines() if ":\t" in line)
        assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == 0
        assert "0" not in fields["Uid"].split()
        ((_, _, body),) = cluster.requests
    assert body["metadata"]["labels"] == {"forge_env": owner.this_process(), "forge_env_network": "none"}
    spec = body["spec"]
    assert (spec["runtimeClassName"], spec["nodeSelector"]) == ("gvisor", {"a": "b"})
    assert spec["automountServiceAccountToken"] is False
    assert spec["restartPolicy"] == "Never"
    assert cluster.policies["forge-env-sandboxes"]["spec"]["policyTypes"] == ["Ingress", "Egress"]


async def test_pods_that_reach_the_network_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandboxes.kubernetes.pods.BOOT", BOOT.replace("+ 10", "+ 0.1"))  # not so patient
    async with served(FakeCluster(enforces=False), tmp_path) as cluster, await opened(concurrency=1, warm=0) as engine:
        with pytest.raises(SandboxUnavailableError, match="although a NetworkPolicy forbids it"):
            await engine.acquire()
        assert not cluster.pods
        async with engine.session(SandboxSpec(network=True)) as sandbox:
            assert (await sandbox.run_python("print(1)")).ok


async def test_a_dead_owners_pod_ends_and_is_removed(tmp_path: Path) -> None:
    async with served(FakeCluster(), tmp_path) as cluster:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER)
        assert await process.wait() == -signal.SIGKILL
        (pod,) = cluster.pods.values()
        assert pod.watcher
        async with asyncio.timeout(20):
            await asyncio.wait([pod.watcher])
        assert pod.object["status"]["phase"] == "Succeeded"
        async with await opened(concurrency=1, warm=0):
            assert not cluster.pods


async def test_what_is_wrong_is_named_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(denied={"get pods/attach"})
    async with served(cluster, tmp_path):
        with pytest.raises(SandboxUnavailableError, match="not allowed to get pods/attach in namespace 'boxes'"):
            await opened()
        cluster.denied.clear()
        with pytest.raises(SandboxUnavailableError, match=r"no context 'other'.*there: test"):
            await opened(context="other")
        async with await opened(namespace="nowhere", concurrency=1, warm=0) as engine:
            with pytest.raises(SandboxUnavailableError, match='namespaces "nowhere" not found'):
                await engine.acquire()
        async with await opened(base_image="no/such:1", concurrency=1, warm=0) as engine:
            with pytest.raises(SandboxUnavailableError, match=r"no/such:1 can't start: ErrImagePull"):
                await engine.acquire()
            for spec in (
                SandboxSpec(allow=("example.org",)),
                SandboxSpec(image="./folder"),
                SandboxSpec(packages=("pytest",)),
            ):
                with pytest.raises(UsageError, match="the kubernetes engine"):
                    await engine.acquire(spec)
        assert not cluster.pods
        cluster.write_config(tmp_path, token="wrong")
        with pytest.raises(SandboxUnavailableError, match="401"):
            await opened()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(SandboxUnavailableError, match="can't be reached"):
        await opened()


class Packed(fe.SandboxEnvironment):
    api_version = 1
    rubric = fe.Rubric(lambda: 1.0)
    sandbox_spec = SandboxSpec(packages=("numpy",))

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", split=split, prompt="x")


def test_packages_are_refused_before_anything_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    """There is no cluster here, and nobody looks for one."""
    assert main(["validate", f"{__name__}:Packed", "--sandbox", "kubernetes"]) == 2
    said = capsys.readouterr().err
    assert "the kubernetes engine installs no packages (numpy)" in said
    assert "name an image that has them" in said
    with pytest.raises(UsageError, match="the local engine has no image 'other'"):
        LazyEngine("local").check(SandboxSpec(image="other"))


async def test_a_plug_in_gives_the_token(tmp_path: Path) -> None:
    """As on managed clusters."""
    answer = '{"status": {"token": "secret-0123456789", "expirationTimestamp": "2000-01-01T00:00:00Z"}}'
    async with served(FakeCluster(), tmp_path) as cluster:
        cluster.write_config(tmp_path, exec={"command": "echo", "args": [answer]})
        assert await asyncio.to_thread(lambda: KubernetesEngine().unusable_reason()) is None
        assert redact("secret-0123456789") == "(redacted kubernetes-token)"
        cluster.write_config(tmp_path, exec={"command": "sh", "args": ["-c", "echo log in first >&2; exit 1"]})
        reason = await asyncio.to_thread(lambda: KubernetesEngine().unusable_reason())
        assert reason == "sh returned no token for the cluster: log in first"


async def test_a_pod_that_dies_is_replaced(tmp_path: Path) -> None:
    async with served(FakeCluster(), tmp_path) as cluster, await opened(concurrency=1, warm=1) as engine:
        sandbox = await engine.acquire()
        (pod,) = cluster.pods.values()
        assert pod.process
        pod.process.kill()
        with pytest.raises(SandboxError):
            await sandbox.run_python("import time; time.sleep(60)")
        await engine.release(sandbox)
        async with engine.session() as another:
            assert (await another.run_python("print(1)")).ok


def test_without_a_cluster_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert "no cluster: there is no" in (KubernetesEngine.unavailable_reason() or "")
    assert "kubernetes" not in available_engines()
    (tmp_path / "none").write_text("clusters: 7")
    with pytest.raises(SandboxUnavailableError, match="is not a kubeconfig"):
        find_cluster()


def test_the_command_runs_without_a_cluster(tmp_path: Path) -> None:
    environment = {**os.environ, "KUBECONFIG": str(tmp_path / "none")}
    command = [sys.executable, "-m", "forge_env", "sandbox", "run", "--engine", "kubernetes", "-"]
    done = subprocess.run(command, env=environment, input="print(1)", capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "no cluster" in done.stderr
