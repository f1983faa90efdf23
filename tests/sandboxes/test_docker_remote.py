"""A Docker daemon of another machine, over TLS and over ssh: what every engine must do, and what it can't do there."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import docker.errors
import pytest
import pytest_asyncio

from forge_env.errors import SandboxUnavailableError, UsageError
from forge_env.sandbox import SandboxEngine, SandboxSpec, open_engine
from forge_env.sandbox_audit.conformance import LifeTests, SessionTests
from sandboxes import owner
from sandboxes.docker import DockerEngine
from sandboxes.docker.daemon import connect

from .conftest import require
from .remote import RemoteDaemon, remote_daemon

OWNER = """
import asyncio, os, signal
from forge_env.sandbox import open_engine
from sandboxes import owner
async def main():
    async with open_engine("docker", docker_host=os.environ["HOST"], concurrency=1, warm=1) as engine:
        print(owner.this_process(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def remote() -> Iterator[RemoteDaemon]:
    require("docker")
    if os.geteuid() or shutil.which("dockerd") is None:
        pytest.skip("a second daemon needs root and dockerd")
    with remote_daemon() as daemon, pytest.MonkeyPatch.context() as patch:
        for name, value in daemon.environment.items():
            patch.setenv(name, value)
        yield daemon


@pytest.mark.docker
@pytest.mark.asyncio(loop_scope="class")
class TestOverTls(LifeTests, SessionTests):
    """A part of the suite that every engine must pass: all that depends on how a runner is reached."""

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def engine(cls, remote: RemoteDaemon) -> AsyncIterator[SandboxEngine]:
        async with open_engine("auto", docker_host=remote.host, concurrency=3, warm=2) as engine:
            yield engine

    @pytest_asyncio.fixture(loop_scope="class")
    async def sandbox(self, engine: SandboxEngine) -> AsyncIterator[object]:
        async with engine.session() as sandbox:
            yield sandbox

    async def test_large_bodies(self, engine: SandboxEngine) -> None:
        data = os.urandom(5 << 20)
        async with engine.session() as sandbox:
            await sandbox.write_file("large", data)
            assert await sandbox.read_file("large") == data

    async def test_an_allow_list_is_refused(self, engine: SandboxEngine) -> None:
        with pytest.raises(UsageError, match="'allow' needs a Docker daemon"):
            await engine.acquire(SandboxSpec(allow=("example.org",)))


@pytest.mark.docker
def test_a_dead_owner_leaves_nothing_there(remote: RemoteDaemon) -> None:
    environment = {**os.environ, "HOST": remote.host}
    done = subprocess.run(
        [sys.executable, "-c", OWNER], env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    daemon = connect(remote.host)
    try:
        for found in daemon.client.containers.list(filters={"label": f"{owner.LABEL}={done.stdout.strip()}"}):
            found.wait(timeout=20, condition="removed")
    except docker.errors.NotFound:
        pass  # it went before it could be waited for
    finally:
        daemon.close()


@pytest.mark.docker
def test_without_its_certificates_it_is_refused(remote: RemoteDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CERT_PATH", f"{remote.folder}/nowhere")
    with pytest.raises(SandboxUnavailableError, match="certificate"):
        open_engine("docker", docker_host=remote.host)
    monkeypatch.delenv("DOCKER_CERT_PATH")
    monkeypatch.delenv("DOCKER_TLS_VERIFY")
    with pytest.raises(SandboxUnavailableError, match="Docker can't be reached at tcp://"):
        open_engine("docker", docker_host=remote.host)


@pytest.mark.parametrize("host", ["10.0.0.1:2375", "http://somewhere:1"])
def test_what_is_no_address_is_said(host: str) -> None:
    with pytest.raises(UsageError, match="docker_host"):
        DockerEngine(docker_host=host)


def test_an_address_without_tls_is_not_spoken_to(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert "not reached over verified TLS" in (DockerEngine(docker_host="tcp://192.0.2.1:2375").unusable_reason() or "")


def test_a_daemon_is_nothing_to_another_engine() -> None:
    with pytest.raises(UsageError, match="docker_host"):
        open_engine("local", docker_host="tcp://127.0.0.1:1")


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a real server, for one test, that lets in the key made for it."""
    server = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
    if server is None:
        assert not os.environ.get("CI"), "sshd is not installed"
        pytest.skip("sshd is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / key], check=True)
    known = f"UserKnownHostsFile {tmp_path}/known\nStrictHostKeyChecking accept-new\n"
    (tmp_path / "config").write_text(f"IdentityFile {tmp_path}/user\nIdentitiesOnly yes\n{known}")
    client = tmp_path / "ssh"  # the real one, with a configuration of this test's
    client.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/config "$@"\n')
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    Path("/run/sshd").mkdir(exist_ok=True)
    options = [f"ListenAddress=127.0.0.1:{port}", f"HostKey={tmp_path}/host", f"AuthorizedKeysFile={tmp_path}/user.pub"]
    options += ["StrictModes=no", "PidFile=none", "UsePAM=no", "PermitRootLogin=prohibit-password"]
    command = [server, "-D", "-e", "-f", "/dev/null", *(word for option in options for word in ("-o", option))]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        assert process.stderr
        assert b"listening" in process.stderr.readline()
        yield f"ssh://root@127.0.0.1:{port}"
        process.terminate()


@pytest.mark.slow  # needs an ssh server, which only `make test-rest` installs
@pytest.mark.docker
async def test_over_ssh(remote: RemoteDaemon, ssh: str) -> None:
    """It leads to the daemon's Unix socket, and nothing of it is left."""
    options = {"docker_host": ssh + remote.socket, "concurrency": 1, "warm": 1}
    async with open_engine("docker", **options) as engine, engine.session() as sandbox:
        assert (await sandbox.run_python("print(6 * 7)")).stdout == "42\n"
    missing = DockerEngine(docker_host=f"{ssh}/nowhere.sock").unusable_reason()
    assert "there is no socket /nowhere.sock" in (missing or "")
    assert "Connection refused" in (DockerEngine(docker_host="ssh://127.0.0.1:1").unusable_reason() or "")
    assert not [name for name in os.listdir("/tmp") if name.startswith(f"forge-env-{owner.this_process()}-")]
