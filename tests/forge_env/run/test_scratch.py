"""Temporary files go with the run that made them, or with the next command."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from forge_env.files import LONGEST_TMPDIR, monarch_logs
from forge_env.run.scratch import LOCK, PREFIX, reap_scratch, scratch_folder


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fe-", dir="/tmp") as short:
        monkeypatch.setenv("TMPDIR", short)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(short)


def test_a_path_too_long_for_sockets_is_left_for_tmp(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = parent / ("x" * LONGEST_TMPDIR)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with scratch_folder() as folder:
        assert folder.parent == Path("/tmp")
    assert not folder.exists()


def test_there_is_room_for_the_longest_name_of_a_socket(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM names its sockets by a UUID."""
    longest = parent / ("x" * (LONGEST_TMPDIR - len(str(parent)) - 1))
    longest.mkdir()
    monkeypatch.setenv("TMPDIR", str(longest))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with scratch_folder() as folder, socket.socket(socket.AF_UNIX) as listening:
        assert folder.parent == longest
        listening.bind(str(folder / str(uuid4())))


def test_temporary_files_of_process_and_children_lie_in_it_and_go_with_it(parent: Path) -> None:
    with scratch_folder() as folder:
        assert Path(tempfile.mkdtemp()).parent == folder
        code = "import tempfile; print(tempfile.gettempdir())"
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert Path(said.strip()) == folder
    assert list(parent.iterdir()) == []
    assert os.environ["TMPDIR"] == str(parent)


def test_a_living_run_keeps_its_folder(parent: Path) -> None:
    with scratch_folder() as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = str(parent)
        assert reap_scratch() == 0
        assert folder.is_dir()


def test_folder_named_like_a_pattern_removes_only_its_own_log(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_env.files.LOGS", parent)
    logs = monarch_logs()
    logs.mkdir()
    for name in ("other", "*", "[o]*"):
        (logs / f"monarch_log_{PREFIX}{name}.log").touch()
    for name in ("*", "[o]*"):
        (parent / f"{PREFIX}{name}").mkdir()
        (parent / f"{PREFIX}{name}" / LOCK).touch()
    assert reap_scratch() == 2
    assert [path.name for path in logs.iterdir()] == [f"monarch_log_{PREFIX}other.log"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("trick", ["owner", "link"])
def test_a_folder_of_another_user_is_left_alone(parent: Path, trick: str) -> None:
    folder = parent / f"{PREFIX}x"
    folder.mkdir()
    if trick == "owner":
        (folder / LOCK).touch()
        os.chown(folder, 65534, 65534)
    else:
        (parent / "file").touch()
        (folder / LOCK).symlink_to(parent / "file")
    assert reap_scratch() == 0
    assert folder.is_dir()


def test_a_killed_run_leaves_its_folder_to_the_next_command(parent: Path) -> None:
    code = (
        "import os, signal, tempfile\n"
        "from forge_env.run.scratch import scratch_folder\n"
        "with scratch_folder():\n"
        "    tempfile.mkdtemp()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert [path.name.startswith(PREFIX) for path in parent.iterdir()] == [True]
    assert reap_scratch() == 1
    assert list(parent.iterdir()) == []


def test_what_still_runs_of_a_killed_run_ends_with_the_next_command(parent: Path) -> None:
    code = (
        "import os, signal, subprocess\n"
        "from forge_env.run.scratch import scratch_folder\n"
        "with scratch_folder():\n"
        "    print(subprocess.Popen(['sleep', '600'], stdout=-3, stderr=-3).pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True).stdout
    orphan = psutil.Process(int(said))
    assert orphan.is_running()
    assert reap_scratch() == 1
    _, left = psutil.wait_procs([orphan], timeout=10)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in left)


def test_folders_that_are_not_ours_stay(parent: Path) -> None:
    (parent / f"{PREFIX}without-a-lock").mkdir()
    (parent / "other").mkdir()
    assert reap_scratch() == 0
    assert len(list(parent.iterdir())) == 2
