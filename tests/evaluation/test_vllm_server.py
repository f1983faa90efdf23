"""The server of `vllm:PATH` ends with the program that started it, however that ends (a stand-in for vLLM here)."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("PIDS", os.getpid(), helper.pid, os.getppid(), flush=True)
time.sleep(600)
"""
STARTER = """
import asyncio, sys
from pathlib import Path
from forge_env.evaluation import vllm_server

class Server(vllm_server.VLLMServer):
    grace_s = 0.1
    def _command(self):
        return [sys.executable, "-c", sys.argv[2]]

async def main():
    async with Server("org/model", Path(sys.argv[1])):
        pass

vllm_server.check_checkpoint = lambda model: model
vllm_server.tempfile.tempdir = sys.argv[3]
asyncio.run(main())
"""


def pids(starter: subprocess.Popen[bytes], log: Path) -> list[psutil.Process]:
    """Server, its helper and its warden, once the server has started."""
    while starter.poll() is None:
        words = log.read_text().split() if log.exists() else []
        if len(words) == 4:
            return [psutil.Process(int(word)) for word in words[1:]]
    raise AssertionError("the starter ended early")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_is_starting_ends_with_its_starter(number: signal.Signals, tmp_path: Path) -> None:
    """It ignores SIGTERM, as vLLM does while it starts, and has a helper."""
    log, folder = tmp_path / "vllm.log", tmp_path / "sockets"
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", STARTER, str(log), STUBBORN, str(folder)]) as starter:
        processes = pids(starter, log)
        assert len(list(folder.iterdir())) == 1
        starter.send_signal(number)
    gone, alive = psutil.wait_procs(processes, timeout=60)
    assert (len(gone), alive, list(folder.iterdir())) == (3, [], [])


async def test_a_server_that_fails_to_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_env.errors import GeneratorError
    from forge_env.evaluation import vllm_server

    monkeypatch.setattr(vllm_server, "check_checkpoint", lambda model: model)
    monkeypatch.setattr(
        vllm_server.VLLMServer, "_command", lambda self: [sys.executable, "-c", "raise ValueError('no room')"]
    )
    with pytest.raises(GeneratorError, match="ended while starting: ValueError: no room"):
        async with vllm_server.VLLMServer("org/model", tmp_path / "vllm.log"):
            pass
