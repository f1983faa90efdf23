"""Sockets of Monarch's processes: no other user of the machine can connect to them."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

pytest.importorskip("monarch")

from forge_env.errors import ForgeError
from forge_env.files import monarch_logs
from forge_env.run.scratch import PREFIX, reap_scratch
from tests.listeners import Listener, as_another_user, listeners
from trainers.actors import sockets

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
ACTORS = """
import asyncio
import os

from trainers.actors.processes import start_processes, stop_processes, survive_deaths
from trainers.actors.spare import Spare


async def main():
    survive_deaths()  # the spare process is killed
    mesh = await start_processes(2, "trainer")
    spare = Spare(os.getpid, first_after_s=0.0)
    spare.prepare(1, "generator", {})
    await spare.ready.wait()
    print("ready", flush=True)
    await asyncio.to_thread(input)
    await spare.close()
    await stop_processes(mesh)


asyncio.run(main())
"""


@contextmanager
def actors(variables: Mapping[str, str], umask: int) -> Iterator[list[psutil.Process]]:
    """A controller with two processes and a spare one."""
    command, environment = [sys.executable, "-c", ACTORS], {**os.environ, **variables}
    with subprocess.Popen(
        command, env=environment, umask=umask, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as controller:
        assert controller.stdout is not None
        assert next((line for line in controller.stdout if line.startswith("ready")), "")
        process = psutil.Process(controller.pid)
        yield [process, *process.children(recursive=True)]
        controller.communicate("\n")
    assert controller.returncode == 0


@ROOT
@pytest.mark.slow
@pytest.mark.parametrize(("mode", "umask"), [(0o700, 0o022), (0o777, 0o000)], ids=["private", "open"])
def test_another_user_connects_to_no_process(tmp_path: Path, mode: int, umask: int) -> None:
    """Whatever TMPDIR and the umask allow to others."""
    with tempfile.TemporaryDirectory(prefix="fe-", dir="/tmp") as folder:
        os.chmod(folder, mode)
        with actors({"TMPDIR": folder}, umask) as family:
            there = listeners(family)
            assert {each.pid for each in there if each.kind == "unix"} >= {process.pid for process in family}
            assert set(as_another_user(there).values()) == {"PermissionError"}
        assert not [path for path in Path(folder).iterdir() if path.name.startswith(PREFIX)]


@pytest.mark.slow
def test_the_folder_of_a_killed_process_is_removed_by_the_next_command(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # so that a folder of its own is needed
    code = "from trainers.actors.sockets import private_folder; print(private_folder(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        folder = Path(process.stdout.readline().strip())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(folder.parent))
            reap_scratch()
            assert folder.exists(), "its process lives"
            process.kill()
            process.wait()
            reap_scratch()
    assert not folder.exists()


@ROOT
def test_the_other_user_of_these_tests_does_connect_where_he_may() -> None:
    """Else the tests would hold for any listener."""
    code = "import socket; s = socket.socket(socket.AF_UNIX); s.bind('\\0%s'); s.listen(); print(flush=True); input()"
    name = f"forge-env-test-{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-c", code % name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        server.stdout.readline()
        there = listeners([psutil.Process(server.pid)])
        assert there == {Listener(server.pid, "unix", f"@{name}")}
        assert set(as_another_user(there).values()) == {"connected"}
        server.communicate("\n")


def test_a_library_that_does_not_call_libc_is_refused() -> None:
    library = ctypes.util.find_library("z") or "libz.so.1"
    with pytest.raises(ForgeError, match="does not import bind, so its sockets can't be kept from other users"):
        sockets._redirect(library, {"bind": sockets._private_bind})


@ROOT
def test_a_log_folder_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("forge_env.files.LOGS", tmp_path)
    sockets.own_log_folder()
    [folder] = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    os.chown(folder, 65534, 65534)
    with pytest.raises(ForgeError, match="which belongs to another user of this machine"):
        sockets.own_log_folder()
    elsewhere = folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(elsewhere)
    with pytest.raises(ForgeError):
        sockets.own_log_folder()
    folder.unlink()
    folder.symlink_to("/nowhere")
    os.chown(folder, 65534, 65534, follow_symlinks=False)
    with pytest.raises(ForgeError):
        sockets.own_log_folder()


@pytest.mark.parametrize("linked", [False, True])
def test_open_log_folder_is_made_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, linked: bool) -> None:
    monkeypatch.setattr("forge_env.files.LOGS", tmp_path)
    folder = monarch_logs()
    if linked:
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
    folder.chmod(0o777)
    sockets.own_log_folder()
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("mode", "kept"), [(0o700, True), (0o750, False), (0o701, False)])
def test_sockets_are_in_a_private_temporary_folder(monkeypatch: pytest.MonkeyPatch, mode: int, kept: bool) -> None:
    sockets.private_folder.cache_clear()
    try:
        with tempfile.TemporaryDirectory(prefix="fe-", dir="/tmp") as short:  # pytest's may be too long for sockets
            folder = Path(short)
            folder.chmod(mode)
            monkeypatch.setattr(tempfile, "tempdir", short)
            chosen = sockets.private_folder()
            assert (chosen == folder) is kept
            assert chosen.stat().st_mode & 0o777 == 0o700
            assert len(os.fsencode(chosen)) <= sockets.LONGEST
    finally:
        sockets.private_folder.cache_clear()
