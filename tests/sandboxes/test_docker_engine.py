"""What is particular to containers: their flags, images, labels, and what happens when they are killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import docker
import docker.errors
import pytest
import requests

from forge_env.errors import SandboxError, SandboxUnavailableError
from forge_env.sandbox import Limits, SandboxSpec
from sandboxes import owner
from sandboxes.docker import DockerEngine
from sandboxes.docker.reaper import reap
from sandboxes.images.build import ensure_image

from .conftest import require

pytestmark = pytest.mark.docker


@pytest.fixture
def client() -> Any:
    require("docker")
    client = docker.from_env()
    yield client
    client.close()


def mine(client: Any, name: str) -> list[Any]:
    found = client.api.containers(all=True, filters={"label": f"{owner.LABEL}={name}"})
    return [client.containers.get(container["Id"]) for container in found if container["State"] != "removing"]


async def test_hardened_flags(client: Any) -> None:
    async with DockerEngine(concurrency=1, warm=1) as engine:
        (container,) = mine(client, owner.this_process())
        config, host = container.attrs["Config"], container.attrs["HostConfig"]
        assert host["NetworkMode"] == "none"
        assert host["ReadonlyRootfs"]
        assert host["CapDrop"] == ["ALL"]
        assert set(host["CapAdd"]) == {"SETUID", "SETGID"}
        assert "no-new-privileges" in host["SecurityOpt"]
        assert any(option.startswith("seccomp=") for option in host["SecurityOpt"])
        assert host["Memory"] == host["MemorySwap"] > 0
        assert host["PidsLimit"] > 0
        assert host["CpuQuota"] > 0
        assert host["LogConfig"]["Type"] == "none"
        assert host["AutoRemove"]
        assert not host["Privileged"]
        assert not host["Binds"]
        assert config["Labels"]["forge_env"] == owner.this_process()
        assert not [name for name in config["Env"] if "PATH" not in name and not name.startswith(("LANG", "PYTHON"))]
        async with engine.session() as sandbox:
            status = (await sandbox.exec(["cat", "/proc/self/status"])).stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == 0
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    assert "0" not in fields["Uid"].split()
    assert mine(client, owner.this_process()) == []


async def test_container_killed_in_the_middle_of_a_call(client: Any) -> None:
    async with DockerEngine(concurrency=1, warm=1) as engine:
        sandbox = await engine.acquire()
        call = asyncio.create_task(sandbox.run_python("import time; time.sleep(60)", limits=Limits(wall_s=60)))
        await asyncio.sleep(0)
        (container,) = mine(client, owner.this_process())
        await asyncio.to_thread(container.kill)
        with pytest.raises(SandboxError):
            await call
        await engine.release(sandbox)
        async with engine.session() as another:
            assert (await another.run_python("print(1)")).stdout == "1\n"
        assert engine.stats()["lost"] == 1


async def test_a_container_whose_start_was_never_confirmed_is_removed(client: Any, monkeypatch: Any) -> None:
    async with DockerEngine(concurrency=1, warm=1) as engine:
        start = engine._client.api.start
        lost: list[str] = []

        def start_and_lose(name: str) -> None:
            start(name)
            if not lost:
                lost.append(name)
                raise requests.ConnectionError("the daemon died before it answered")

        monkeypatch.setattr(engine._client.api, "start", start_and_lose)
        async with engine.session(SandboxSpec(disk_mb=16)) as sandbox:
            assert (await sandbox.run_python("print(1)")).stdout == "1\n"
    assert lost
    for container in mine(client, owner.this_process()):  # killed, and on its way out
        with contextlib.suppress(docker.errors.NotFound):
            await asyncio.to_thread(container.wait, timeout=20, condition="removed")
    assert mine(client, owner.this_process()) == []


async def test_dead_owner_leaves_nothing(client: Any) -> None:
    program = (
        "import asyncio, os, signal\nfrom sandboxes import owner\nfrom sandboxes.docker import DockerEngine\n"
        "async def main():\n"
        "    engine = DockerEngine(concurrency=1, warm=1)\n    await engine.start()\n"
        "    print(owner.this_process(), flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    dead = done.stdout.strip()
    assert owner.is_dead(dead)
    for container in mine(client, dead):  # it ends by itself
        with contextlib.suppress(docker.errors.NotFound):
            await asyncio.to_thread(container.wait, timeout=20, condition="removed")
    client.containers.create(ensure_image(client), ["true"], labels={"forge_env": dead})
    await asyncio.to_thread(reap, client)
    assert mine(client, dead) == []


async def test_others_containers_are_left_alone(client: Any) -> None:
    living = owner.this_process()
    elsewhere = "00000000.00000000.1.1.1"
    kept = [
        client.containers.create(ensure_image(client), ["true"], labels={"forge_env": name})
        for name in (living, elsewhere)
    ]
    try:
        await asyncio.to_thread(reap, client)
        for container in kept:
            container.reload()
    finally:
        for container in kept:
            container.remove(force=True)


async def test_own_dockerfile(client: Any, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\nCOPY hello /opt/hello\n")
    (tmp_path / "hello").write_text("from the image")
    async with DockerEngine(concurrency=1, warm=0) as engine:
        spec = SandboxSpec(image=str(tmp_path))
        async with engine.session(spec) as sandbox:
            assert (await sandbox.exec(["cat", "/opt/hello"])).stdout == "from the image"
        name = await engine.build(str(tmp_path))
        assert name == await engine.build(str(tmp_path))
    for tag in (name, *[t for image in client.images.list("forge-env/user") for t in image.tags]):
        client.images.remove(tag, force=True)


async def test_variables_of_an_image(client: Any, tmp_path: Path) -> None:
    """What an image sets reaches programs; what is the sandbox's own, or would load code by itself, does not."""
    (tmp_path / "own.py").write_text("ANSWER = 42\n")
    lines = [
        "ARG BASE_IMAGE",
        "FROM ${BASE_IMAGE}",
        "COPY own.py /app/own.py",
        "ENV GREETING='hello you' PYTHONPATH=/app PATH=/app/bin:$PATH",
        "ENV HOME=/nowhere TMPDIR=/nowhere LD_LIBRARY_PATH=/app PYTHONSTARTUP=/app/own.py",
    ]
    (tmp_path / "Dockerfile").write_text("\n".join(lines))
    async with DockerEngine(concurrency=1, warm=0) as engine:
        async with engine.session(SandboxSpec(image=str(tmp_path))) as sandbox:
            names = "GREETING HOME TMPDIR LD_LIBRARY_PATH PYTHONSTARTUP PYTHONPATH PATH"
            shown = await sandbox.exec(["sh", "-c", f"for n in {names}; do eval echo \\${{$n-none}}; done"])
            *values, path = shown.stdout.splitlines()
            assert values == ["hello you", "/work", "/tmp", "none", "none", "/app"]
            assert path.startswith("/app/bin:")
            for run in (sandbox.run_python("import own; print(own.ANSWER)"),
                        sandbox.exec(["python3", "-c", "import own; print(own.ANSWER)"])):  # fmt: skip
                assert (await run).stdout == "42\n"
            judged = await sandbox.run_tests("import own\ndef f(): return own.ANSWER", "assert f() == 42")
            assert judged.passed
        name = await engine.build(str(tmp_path))
    client.images.remove(name, force=True)


async def test_missing_image_is_explained() -> None:
    require("docker")
    async with DockerEngine(concurrency=1, warm=0) as engine:
        with pytest.raises(SandboxUnavailableError):
            await engine.acquire(SandboxSpec(image="forge-env/no-such-image:1"))


async def test_a_daemon_that_does_not_see_our_files_is_used_all_the_same() -> None:
    """As from a container that was given the daemon's socket: the folder of its temporary files is another one."""
    program = (
        "import asyncio\nfrom forge_env.errors import UsageError\nfrom forge_env.sandbox import SandboxSpec\n"
        "from sandboxes.docker import DockerEngine\n"
        "async def main():\n"
        "    async with DockerEngine(concurrency=1, warm=0) as engine:\n"
        "        for spec in (SandboxSpec(), SandboxSpec(), SandboxSpec(allow=('127.0.0.1:80',))):\n"
        "            async with engine.session(spec) as sandbox:\n"
        "                print((await sandbox.run_python('print(40 + 2)')).stdout, end='', flush=True)\n"
        "asyncio.run(main())\n"
    )
    apart = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-c"]
    command = [*apart, 'mount -t tmpfs tmpfs "$TMPDIR" && exec "$0" -c "$1"', sys.executable, program]
    with tempfile.TemporaryDirectory(prefix="fe-", dir="/tmp") as hidden:  # short: the engine makes a socket there
        environment = {**os.environ, "TMPDIR": hidden}
        done = await asyncio.to_thread(subprocess.run, command, env=environment, capture_output=True, text=True)
    assert done.stdout == "42\n42\n", done.stderr
    assert "needs a Docker daemon that sees this machine's files" in done.stderr.splitlines()[-1]
