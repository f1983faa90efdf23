"""The platform without what only Linux has (`darwin.py`), and in containers without privileges."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2
import pytest

from forge_env.sandbox import open_engine
from forge_env.sandbox.capabilities import Images
from tests.darwin import site_folder

ROOT = Path(__file__).parents[1]
PROGRAM = Path(sys.executable).with_name("forge-env")
RECIPE = str(ROOT / "apps" / "coding_rlvr" / "coding_rlvr.yaml")
MODEL = str(ROOT / "apps" / "coding_rlvr" / "coding_rlvr_base")
CONTAINER = "--security-opt seccomp=unconfined --security-opt systempaths=unconfined"


class Model(BaseHTTPRequestHandler):
    """An endpoint whose model always says 4."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        message = {"role": "assistant", "content": "4"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        body = json.dumps({**answer, "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def endpoint() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Model) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()


class Mac:
    """A folder in which `forge-env` runs as it would on macOS."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {**os.environ, "PYTHONPATH": f"{site_folder(folder)}{os.pathsep}{folder / 'mine' / 'src'}"}

    def __call__(self, *arguments: str, stdin: str = "", fails: bool = False, **environ: str) -> str:
        done = subprocess.run(
            [PROGRAM, *arguments], cwd=self.folder, env={**self.environ, **environ}, input=stdin, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        output = done.stdout + done.stderr
        assert (done.returncode != 0) == fails, output
        assert "Traceback" not in output
        return output


@pytest.fixture
def mac(tmp_path: Path) -> Mac:
    return Mac(tmp_path)


@pytest.mark.slow
@pytest.mark.core
def test_write_validate_evaluate_and_view_without_linux(mac: Mac, endpoint: str) -> None:
    assert "wrote mine" in mac("new", "mine")
    assert "mine:Mine: sound" in mac("validate", "mine:Mine")
    assert "1.000" in mac("eval", "mine:Mine", "--model", "gold", "-n", "3", "--out", "runs/gold")
    mac("eval", "calculator", "--model", "m", "--base-url", endpoint, "-n", "3", "--out", "runs/model")
    assert "3 of 3 samples" in mac("show", "runs/gold")
    viewing = [PROGRAM, "view", "runs", "--port", "0", "--no-browser"]
    pipe = subprocess.PIPE
    with subprocess.Popen(viewing, cwd=mac.folder, env=mac.environ, stdout=pipe, text=True) as server:
        try:
            assert server.stdout
            address = next(word for word in server.stdout.readline().split() if word.startswith("http://"))
            with httpx2.Client(follow_redirects=True, trust_env=False) as client:
                page = client.get(address)
            assert page.status_code == 200
        finally:
            server.terminate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sandbox", "run", "--engine", "local", "-"], "'local' can't run here: it needs Linux, and this is Darwin"),
        (["train", RECIPE], "training needs Linux, and this is Darwin"),
        (["worker", "tcp://127.0.0.1:4567"], "training needs Linux, and this is Darwin"),
        (["eval", "calculator", "--model", f"vllm:{MODEL}"], "a model with vLLM needs Linux, and this is Darwin"),
    ],
)
def test_what_needs_linux_says_so(mac: Mac, arguments: list[str], message: str) -> None:
    output = mac(*arguments, fails=True)
    assert message in output
    assert "\n  -> " in output


@pytest.fixture(scope="module")
def image() -> str:
    """The bundled image, made of this machine's Python."""

    async def build() -> str:
        engine = open_engine("docker")
        try:
            return await Images.of(engine).build()
        finally:
            await engine.close()

    return asyncio.run(build())


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_docker_sandboxes_without_linux(mac: Mac, image: str) -> None:
    """The daemon is in a machine of its own: nothing of this one is mounted or taken as a base."""
    mac("new", "mine", "--kind", "sandbox")
    assert "mine:Mine: sound" in mac("validate", "mine:Mine", FORGE_ENV_BASE_IMAGE=image)
    refused = mac("sandbox", "run", "--engine", "docker", "--allow", "example.org", "-", stdin="1", fails=True,
                  FORGE_ENV_BASE_IMAGE=image)  # fmt: skip
    assert "'allow' needs a Docker daemon that sees this machine's files" in refused


def contained(image: str, options: str, *command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run the platform in a container of Docker's defaults plus `options`."""
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    here = ["-v", f"{ROOT}:{ROOT}:ro", "-v", f"{packages}:{packages}:ro", "-v", "/usr/bin/ldd:/usr/bin/ldd:ro"]
    environ = ["-e", "HOME=/tmp", "-e", f"PYTHONPATH={ROOT}:{packages}", "-w", "/tmp"]
    docker = ["docker", "run", "--rm", "-i", "--network", "none", *options.split(), *here, *environ, image]
    program = ["python3", "-m", "forge_env", *command]
    return subprocess.run([*docker, *program], input=stdin, capture_output=True, text=True, check=False)


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_containers_without_privileges(image: str) -> None:
    """The platform needs none. The embedded engine needs two options, and its refusal names the missing ones."""
    evaluated = contained(image, "", "eval", "calculator", "--model", "gold", "-n", "3", "--out", "/tmp/e")
    assert evaluated.returncode == 0, evaluated.stderr
    assert "1.000" in evaluated.stdout
    run = ("sandbox", "run", "--engine", "local", "-")
    refused = contained(image, "", *run, stdin="print(6 * 7)")
    assert refused.returncode == 1
    assert f"inside a container, start that container with {CONTAINER}" in refused.stderr
    allowed = contained(image, CONTAINER, *run, stdin="print(6 * 7)")
    assert (allowed.returncode, allowed.stdout) == (0, "42\n"), allowed.stderr
