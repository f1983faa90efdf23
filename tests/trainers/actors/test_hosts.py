"""Actors on several hosts, which may be lost and come back; what listens there, and what a worker leaves: nothing."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("monarch")

from forge_env.listeners import matching
from tests.listeners import as_another_user, listeners
from tests.trainers.actors.workers import Worker, certificates, workers

pytestmark = [pytest.mark.slow, pytest.mark.stack]

RECIPE = """
environment: {{name: wordle}}
model: {{cache_dir: {folder}/cache}}
output_dir: {folder}/runs
job: {{kind: hosts, workers: [{workers}], place: {{trainer: {trainer}}}, on_loss: {on_loss}}}
"""


class Controller:
    """Of `on_hosts.py`."""

    def __init__(self, hosts: list[Worker], folder: Path, environment: dict[str, str], *how: str, **job: str) -> None:
        recipe = folder / "recipe.yaml"
        recipe.write_text(RECIPE.format(folder=folder, workers=", ".join(host.address for host in hosts), **job))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.trainers.actors.on_hosts", str(recipe), *how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def hear(self, word: str) -> str:
        assert self.process.stdout is not None
        line = next((line for line in self.process.stdout if line.startswith(word)), "")
        assert line, f"it ended before {word}"
        return line.removeprefix(word).strip()

    def go_on(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[list[Worker], dict[str, str]]]:
    """Two workers, and the environment of those that are to reach them."""
    environment = certificates(tmp_path) if request.param == "tls" else {}
    with workers(2, tmp_path, request.param, environment) as started:
        yield started, environment


def listening(process: psutil.Process) -> set[str]:
    """Addresses at which a process listens."""
    return {each.laddr.ip for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}


def without_certificate(address: str) -> str:
    """What a client gets that shows no certificate: nothing, or an error's name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), 5) as plain, context.wrap_socket(plain) as client:
            return client.recv(1).decode()
    except OSError as error:
        return type(error).__name__


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("scheme", ["tcp", "tls"])
def test_another_user_reaches_a_worker_at_its_address_only(scheme: str, tmp_path: Path) -> None:
    with workers(1, tmp_path, scheme, certificates(tmp_path) if scheme == "tls" else {}) as [host]:
        there = listeners(host.family())
        assert sorted(each.kind for each in there) == ["tcp", "tcp", "unix"]
        assert all(matching(each.kind, each.address, "worker") for each in there)
        for each, end in as_another_user(there).items():
            assert end == ("PermissionError" if each.kind == "unix" else "connected")
        if scheme == "tls":
            ports = [each.address for each in there if each.kind == "tcp"]
            assert {without_certificate(port) for port in ports} <= {"", "SSLError"}
        assert ("has no authentication" in host.said) is (scheme == "tcp")


@pytest.mark.parametrize(
    ("hosts", "on_loss", "trainer"), [("tcp", "place", "[0, 1]"), ("tls", "wait", "[0]")], indirect=["hosts"]
)
def test_actors_live_on_hosts_and_move_or_wait_when_one_is_lost(
    hosts: tuple[list[Worker], dict[str, str]], on_loss: str, trainer: str, tmp_path: Path
) -> None:
    [first, second], environment = hosts
    controller = Controller([first, second], tmp_path, environment, on_loss=on_loss, trainer=trainer)
    apart = os.geteuid() == 0
    names = ["host2", "host3"] if apart else [os.uname().nodename] * 2
    assert controller.hear("WIDE") == str([(names[0], 3.0), (names[1], 3.0)])
    assert controller.hear("FIRST") == str((names[0], 1.0))
    for number, host in ((2, first), (3, second)):
        for process in host.family():
            assert listening(process) <= {f"127.0.0.{number}"}
        local = [each for each in listeners(host.family()) if each.kind == "unix"]
        assert local
        assert os.geteuid() or set(as_another_user(local).values()) == {"PermissionError"}
    assert listening(psutil.Process(controller.process.pid)) == {"127.0.0.1"}

    started = first.family()
    assert len(started) > 1
    if on_loss == "wait":
        first.kill()
    else:
        first.interrupt()
    _, left = psutil.wait_procs(started, timeout=30)
    assert not left
    controller.hear("LOST")
    if on_loss == "wait":
        first.start()
    said = controller.hear("SECOND")
    home, told = (names[0], "waits for it to return") if on_loss == "wait" else (names[1], "trainer moves to host 1")
    assert said.startswith(str((home, 1.0)))
    assert told in said
    logs = {path.name: path.read_text() for path in (tmp_path / "runs" / "run" / "logs").iterdir()}
    assert set(logs) == {f"0-{names[0]}.log", f"1-{names[1]}.log"}
    assert all("added" in text for text in logs.values())

    controller.go_on()
    controller.hear("END")
    assert controller.process.wait(60) == 0
    assert len(second.family()) == 1, "the worker alone"
    second.interrupt()
    assert second.said.endswith("interrupted\n")


@pytest.mark.parametrize("hosts", ["tcp"], indirect=True)
def test_of_hosts_that_are_lost_together_all_are_told_also_where_monarch_tells_of_none(
    hosts: tuple[list[Worker], dict[str, str]], tmp_path: Path
) -> None:
    both, environment = hosts
    slow = {f"HYPERACTOR_MESH_GET_{what}_STATE_MAX_IDLE": "1h" for what in ("ACTOR", "PROC")}
    job = {"on_loss": "wait", "trainer": "[0], generator: [1]"}
    controller = Controller(both, tmp_path, environment | slow, "both", **job)
    try:
        controller.hear("BOTH")
        for host in both:
            host.kill()
        assert controller.hear("LOST") == "; its host is lost; its host is lost"
    finally:
        controller.process.kill()
        controller.process.wait()
