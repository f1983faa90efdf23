"""The server of `vllm:PATH` ends with the program that started it, however that ends (a stand-in for vLLM here)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
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
from forge_env.endpoint import vllm_server

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
@pytest.mark.slow
def test_a_server_that_is_starting_ends_with_its_starter(number: signal.Signals, tmp_path: Path) -> None:
    """It ignores SIGTERM, as vLLM does while it starts, and has a helper."""
    log = tmp_path / "vllm.log"
    with tempfile.TemporaryDirectory(prefix="fe-", dir="/tmp") as name:  # short: for sockets
        folder = Path(name)
        with subprocess.Popen([sys.executable, "-c", STARTER, str(log), STUBBORN, name]) as starter:
            processes = pids(starter, log)
            assert len(list(folder.iterdir())) == 1
            starter.send_signal(number)
        gone, alive = psutil.wait_procs(processes, timeout=60)
        assert (len(gone), alive, list(folder.iterdir())) == (3, [], [])


async def test_a_server_that_fails_to_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_env.endpoint import vllm_server
    from forge_env.errors import GeneratorError

    monkeypatch.setattr(vllm_server, "check_checkpoint", lambda model: model)
    monkeypatch.setattr(
        vllm_server.VLLMServer, "_command", lambda self: [sys.executable, "-c", "raise ValueError('no room')"]
    )
    with pytest.raises(GeneratorError, match="ended while starting: ValueError: no room"):
        async with vllm_server.VLLMServer("org/model", tmp_path / "vllm.log"):
            pass


@pytest.mark.parametrize(("build", "whole"), [("train-cpu", True), ("train-gpu", False)])
def test_seeds_do_not_end_a_server_on_a_cpu(build: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, vLLM can't go back in a request's seed when it has prefilled a piece of its prompt."""
    from forge_env.endpoint import vllm_server

    monkeypatch.setattr(vllm_server, "check_checkpoint", lambda model: model)
    monkeypatch.setattr(vllm_server, "training_extra", lambda: build)
    server = vllm_server.VLLMServer("org/model", Path("log"), ["--max-model-len", "64"])
    server.uds = "socket"
    assert ("--no-enable-chunked-prefill" in server._command()) is whole


@pytest.mark.parametrize(
    ("build", "fast", "dtype"), [("train-cpu", False, True), ("train-cpu", True, False), ("", False, False)]
)
def test_fast_precision_of_a_processor(build: str, fast: bool, dtype: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_env.endpoint import vllm_server

    monkeypatch.setattr(vllm_server, "check_checkpoint", lambda model: model)
    monkeypatch.setattr(vllm_server, "training_extra", lambda: build)
    monkeypatch.setattr(vllm_server, "fast_in_bfloat16", lambda: fast)
    monkeypatch.setattr(vllm_server, "free_memory_gb", lambda: 20.0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    server = vllm_server.VLLMServer("org/model", Path("log"))
    server.uds, server._folder = "socket", "folder"
    command, variables = server._command(), server._environment()
    assert ("float32" in command) is dtype
    assert command[command.index("--max-model-len") + 1] == "auto"
    assert ("--enforce-eager" in command) is (build == "train-cpu")
    assert ("--gdn-prefill-backend" in command) is (build != "train-cpu")
    assert (variables.get("VLLM_CPU_KVCACHE_SPACE") == "5") is (build == "train-cpu")
    chosen = vllm_server.VLLMServer("org/model", Path("log"), ["--dtype=bfloat16"])
    chosen.uds = "socket"
    assert "float32" not in chosen._command()


async def test_the_first_failure_is_named_not_its_consequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_env.endpoint import vllm_server
    from forge_env.errors import GeneratorError

    code = """
print("(EngineCore pid=7) ERROR 11-26 15:49:01 [core.py:1] Traceback (most recent call last):")
print("(EngineCore pid=7) ERROR 11-26 15:49:01 [core.py:1] torch.OutOfMemoryError: no room")
raise RuntimeError("Engine core initialization failed. See root cause above.")
"""
    monkeypatch.setattr(vllm_server, "check_checkpoint", lambda model: model)
    monkeypatch.setattr(vllm_server.VLLMServer, "_command", lambda self: [sys.executable, "-u", "-c", code])
    with pytest.raises(GeneratorError, match=r"ended while starting: torch.OutOfMemoryError: no room"):
        async with vllm_server.VLLMServer("org/model", tmp_path / "vllm.log"):
            pass


ONE_ANSWER = """
import http.server, json, os, signal, socketserver, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def address_string(self):
        return "socket"
    def do_GET(self):
        self.say({"object": "list", "data": [{"id": "model"}]})
    def do_POST(self):
        print("RuntimeError: out of memory", file=sys.stderr, flush=True)
        END
    def say(self, data):
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

Server(sys.argv[1], Handler).serve_forever()
"""


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("os._exit(3)", "exit code 3: "),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"exit code 137 \(killed by SIGKILL\): "),
    ],
)
async def test_server_ends_during_the_run(end: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, however patient the requests are."""
    import forge_env as fe
    from forge_env.endpoint import vllm_server
    from forge_env.evaluation import evaluation
    from tests.forge_env.evaluation.toys import Sums

    code = ONE_ANSWER.replace("END", end)
    for module in (vllm_server, evaluation):
        monkeypatch.setattr(module, "check_checkpoint", lambda model: model)
    monkeypatch.setattr(vllm_server.VLLMServer, "_command", lambda self: [sys.executable, "-c", code, self.uds])
    out = tmp_path / "out"
    result = await fe.evaluate_async(Sums, "vllm:org/model", out=out, first_delay_s=3600.0, retries=9)
    assert result.summary.status == "incomplete"
    assert re.search(f"vLLM ended during the run with {how}RuntimeError: out of memory", str(result.error))
    assert f"see {out / 'vllm.log'}" in (result.error.fix or "")


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_folder_above_models_suggests_the_newest(depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_env.endpoint import vllm_server
    from forge_env.errors import UsageError

    monkeypatch.setattr(vllm_server, "find_spec", lambda name: object())
    below = "/".join(["x"] * (depth - 1))
    for number, name in enumerate(("c", "b", "a")):
        model = tmp_path / below / name
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        os.utime(model / "config.json", (number, number))
    with pytest.raises(UsageError, match=r"no config\.json") as refused:
        vllm_server.check_checkpoint(str(tmp_path))
    deep = "give a Hugging Face checkpoint folder; `forge-env export` makes one"
    assert refused.value.fix == (deep if depth == 4 else f"use vllm:{tmp_path / below / 'a'}")


def test_models_are_named_as_in_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_env.endpoint import vllm_server
    from forge_env.errors import UsageError

    monkeypatch.setattr(vllm_server, "find_spec", lambda name: object())
    monkeypatch.setenv("FORGE_ENV_CACHE", str(tmp_path))
    assert vllm_server.check_checkpoint("coding_rlvr_base").endswith("apps/coding_rlvr/coding_rlvr_base")
    assert vllm_server.check_checkpoint("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    with pytest.raises(UsageError) as refused:
        vllm_server.check_checkpoint("smollm2")
    assert "forge-env model get smollm2" in (refused.value.fix or "")
    fetched = tmp_path / "models" / "smollm2"
    fetched.mkdir(parents=True)
    (fetched / "config.json").write_text("{}")
    assert vllm_server.check_checkpoint("smollm2") == str(fetched)
