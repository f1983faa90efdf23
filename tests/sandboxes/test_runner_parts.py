"""Parts of the runner by themselves: what stands in for what a kernel may lack, and the filter's jumps."""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_env.sandbox import WORK
from sandboxes.runner import archives, child, config, folders, processes, seccomp
from sandboxes.runner.zygote import Deaths


@pytest.fixture
def own_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("descriptors", [True, False])
def test_every_death_is_noticed(descriptors: bool, own_signals: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if not descriptors:

        def missing(pid: int, flags: int = 0) -> int:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

        monkeypatch.setattr(os, "pidfd_open", missing)
    poll = select.poll()
    deaths = Deaths(poll)
    alive, ended = set(), set()
    for status in range(3):
        pid = os.fork()
        if pid == 0:
            os._exit(status)
        deaths.watch(pid)
        alive.add(pid)
    while ended != alive:
        for fd, _ in poll.poll():
            for pid in deaths.suspects(fd):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    deaths.forget(fd, pid)
                    ended.add(pid)
    assert poll.poll(0) == [] or not descriptors  # a wake-up may still be on its way


@pytest.mark.parametrize("listed", [True, False])
def test_children_are_found(listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_HAS_CHILDREN", listed)
    own = processes.OwnChildren()
    if not listed:
        own._fd = -1
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        assert pid in own.pids()
        assert pid in processes.all_children(os.getpid())
        assert processes.tree([os.getpid()])[0] == os.getpid()
        assert processes.owner(pid) == os.getuid()
    finally:
        os.close(writing)
        os.waitpid(pid, 0)
    assert pid not in own.pids()
    os.close(reading)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_no_jump_leaves_the_filter(machine: str) -> None:
    code = seccomp.instructions(machine)
    returns = 0x06
    for index, (operation, if_true, if_false, _) in enumerate(code):
        assert 0 <= if_true < 256
        assert 0 <= if_false < 256
        if operation & 0x07 == 0x05:
            assert index + 1 + max(if_true, if_false) < len(code)
    assert code[-1][0] == returns


def test_which_variables_of_an_image_reach_programs() -> None:
    given = {
        "PATH": "/app/bin:/bin",
        "APP": "1",
        "HOME": "/root",
        "LD_PRELOAD": "x",
        "BASH_ENV": "x",
        "PYTHONHOME": "x",
    }
    given |= {"http_proxy": "x", "HTTPS_PROXY": "x", "LC_ALL": "C", "KUBERNETES_PORT": "1", "HOSTNAME": "x"}
    assert child.image_environment(given) == {"PATH": "/app/bin:/bin", "APP": "1"}
    assert child.image_environment({"PYTHONPATH": f"{child.RUNNER}:/app::/lib"}) == {"PYTHONPATH": "/app:/lib"}
    assert child.image_environment({"PYTHONPATH": child.RUNNER}) == {}


def test_both_sides_know_the_work_folder_by_one_name() -> None:
    """The runner imports nothing of ours, so it says it again."""
    assert config.WORK == WORK


def test_what_goes_away_while_it_is_packed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").write_text("1")
    monkeypatch.setattr(os, "listdir", lambda path: ["gone", "here"])
    out = io.BytesIO()
    archives.pack([str(tmp_path)], out)
    out.seek(0)
    with tarfile.open(fileobj=out) as archive:
        assert archive.getnames() == [f"{tmp_path}/here"[1:]]


@pytest.mark.slow
def test_folders_are_packed_however_deep(tmp_path: Path) -> None:
    deep = tmp_path
    for _ in range(1500):
        deep /= "d"
        deep.mkdir()
    out = io.BytesIO()
    try:
        archives.pack([str(tmp_path)], out)
    finally:
        folders.clear(str(tmp_path))
    out.seek(0)
    with tarfile.open(fileobj=out) as archive:
        assert archive.getnames()[-1] == f"{deep}"[1:]
