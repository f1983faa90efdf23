"""`forge-env export ... hub:OWNER/NAME`: huggingface_hub's own calls against a small hub of the test's own."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge_env.cli import export
from forge_env.cli.main import main
from forge_env.hub import repository_of
from tests.forge_env.cli.made_run import make_run

pytest.importorskip("huggingface_hub")
TOKEN = "hf_of_the_test"


class Hub(ThreadingHTTPServer):
    """What of a hub's API an upload uses: it creates repositories, and takes commits of small files."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.created: list[dict[str, Any]] = []
        self.public = False
        """Whether the repository is there, and public."""
        self.files: dict[str, dict[str, bytes]] = {}
        """Content by path, for each kind/owner/name."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid credentials"}, 401)
        if self.path == "/api/repos/create":
            self.server.created.append(asked := json.loads(body))
            return self.answer({"url": f"{self.server.url}/{asked.get('organization')}/{asked['name']}"})
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        match = re.fullmatch(r"/api/(\w+/[\w-]+/[\w-]+)/(preupload|commit)/main", self.path)
        assert match, self.path
        if match[2] == "preupload":
            return self.answer(
                {
                    "files": [
                        {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                        for file in json.loads(body)["files"]
                    ]
                }
            )
        lines = [json.loads(line) for line in body.splitlines()]
        files = self.server.files.setdefault(match[1], {})
        files |= {
            line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"
        }
        return self.answer({"success": True, "commitUrl": f"{self.server.url}/me/it/commit/0", "commitOid": "0" * 40})

    def do_GET(self) -> None:
        private = not self.server.public and all(each["visibility"] == "private" for each in self.server.created)
        self.answer({"id": "me/first", "sha": "0" * 40, "siblings": [], "private": private})

    def answer(self, data: dict[str, Any], status: int = 200) -> None:
        content = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        yield server
        server.shutdown()
        thread.join()


def front(readme: bytes) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(readme.decode().split("---\n")[1])
    return found


def test_a_run_is_uploaded_with_a_card_of_its_record(hub: Hub, tmp_path: Path) -> None:
    run = make_run(tmp_path / "first").root
    (run / "run.log").write_text("a log")
    (run / "checkpoints").mkdir(exist_ok=True)
    (run / "checkpoints" / "weights").write_text("large")
    assert main(["export", str(run), "hub:me/first", "--format", "run"]) == 0
    [created] = hub.created
    assert (created["name"], created["organization"], created["type"], created["visibility"]) == (
        *("first", "me", "dataset"),
        "private",
    )
    files = hub.files["datasets/me/first"]
    assert {"README.md", "curves.png", "metrics.jsonl", "config.yaml", "summary.json"} <= files.keys()
    assert any(name.startswith("trajectories/") for name in files)
    assert not {"run.log", "checkpoints/weights"} & files.keys()
    assert files["metrics.jsonl"] == (run / "metrics.jsonl").read_bytes()
    assert "forge-env" in front(files["README.md"])["tags"]
    assert "Did it learn?" in files["README.md"].decode()
    assert files["curves.png"].startswith(b"\x89PNG")


def test_public_repository_must_be_requested(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, hub.public = make_run(tmp_path / "first").root, True
    assert main(["export", str(run), "hub:me/first", "--format", "run"]) == 2
    assert "me/first is public" in capsys.readouterr().err
    assert not hub.files
    assert main(["export", str(run), "hub:me/first", "--format", "run", "--public"]) == 0
    assert hub.files


def test_a_package_with_a_link_that_leaves_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package, other = tmp_path / "package", tmp_path / "other"
    package.mkdir()
    other.write_text("private")
    (package / "openenv.yaml").write_text("name: package\n")
    (package / "key.pem").write_text("private")
    (package / "link.txt").symlink_to(other)
    assert main(["export", str(package), str(tmp_path / "out"), "--format", "environment"]) != 0
    assert "link.txt" in capsys.readouterr().err
    (package / "link.txt").unlink()
    assert main(["export", str(package), str(tmp_path / "out"), "--format", "environment"]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"openenv.yaml", "README.md"}


def test_model_card_describes_its_run(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "first").root

    def exporter(source: Path, out: Path, **_: object) -> Path:
        """As trainers.model.export, without weights."""
        out.mkdir(parents=True)
        (out / "config.json").write_text("{}")
        return source / "checkpoints" / "step-000010"

    monkeypatch.setattr(export, "load_plugin", lambda *_: exporter)
    assert main(["export", str(run), "hub:me/model"]) == 0
    files = hub.files["models/me/model"]
    assert files.keys() == {"config.json", "README.md", "curves.png"}
    assert front(files["README.md"])["library_name"] == "transformers"
    assert main(["export", str(tmp_path / "elsewhere"), "hub:me/other"]) == 0
    assert hub.files["models/me/other"].keys() == {"config.json"}  # without a record there is nothing to say


def test_an_environment_is_uploaded_as_a_space(hub: Hub, tmp_path: Path) -> None:
    assert main(["new", "marbles", "--openenv", "--dir", str(tmp_path)]) == 0
    package = tmp_path / "marbles"
    (package / ".venv").mkdir()
    (package / ".venv" / "pyvenv.cfg").write_text("")
    assert main(["export", str(package), "hub:me/marbles", "--format", "environment", "--public"]) == 0
    [created] = hub.created
    assert (created["type"], created["sdk"], created["visibility"]) == ("space", "docker", "public")
    files = hub.files["spaces/me/marbles"]
    assert {"README.md", "Dockerfile", "openenv.yaml", "src/marbles/environment.py"} <= files.keys()
    assert not any(name.startswith(".venv") for name in files)
    assert front(files["README.md"])["sdk"] == "docker"


def test_the_same_goes_to_a_folder(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first").root
    assert main(["export", str(run), str(tmp_path / "out"), "--format", "run"]) == 0
    assert {"README.md", "curves.png", "metrics.jsonl"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert main(["export", str(run), str(tmp_path / "out"), "--format", "run"]) == 2  # it is not overwritten


def test_what_the_hub_refuses_is_said_in_a_line(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "first").root
    monkeypatch.setenv("HF_TOKEN", "another")
    assert main(["export", str(run), "hub:me/first", "--format", "run"]) == 1
    said = capsys.readouterr().err
    assert "me/first can't be uploaded" in said
    assert "hf auth login" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hub:me"], "names no repository"),
        (["out", "--public"], "--public is for a target on the hub"),
        (["hub:me/it", "--format", "environment"], "no package with openenv.yaml"),
    ],
)
def test_mistakes_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert main(["export", str(tmp_path), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_path_is_no_repository() -> None:
    assert repository_of("runs/first") is None
    assert repository_of("hub:me/first") == "me/first"
