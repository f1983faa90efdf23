"""`forge-env info`, `validate`, `new`, `play`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import forge_env as fe
from forge_env import registry
from forge_env.cli.main import main
from tests.forge_env.validation.test_checks import Sound
from tests.sandboxes.conftest import require


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    fe.register("sums", Sound)
    yield
    registry.unregister("sums")


def test_list_names_environments_and_their_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    found = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert found["sums"]["summary"] == "Adding numbers, soundly."
    assert main(["info"]) == 0
    assert "sums" in capsys.readouterr().out


def test_info_shows_options_tools_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "sums", "max_turns=3"]) == 0
    shown = capsys.readouterr().out
    for expected in ("max_turns = 3", "Assistant messages", '"required": ["a"]', "[user] 0 + 1 = ?", "reward 1"):
        assert expected in shown
    assert main(["info", "sums", "--json"]) == 0
    assert {tool["name"] for tool in json.loads(capsys.readouterr().out)["tools"]} > {"add", "scale"}


def test_play_in_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def type_in(text: str) -> None:
        (tmp_path / "typed").write_text(text)
        monkeypatch.setattr("sys.stdin", (tmp_path / "typed").open())

    type_in('/tools\n/call add {"a": 5}\n\n/call nope\nhm\n\n6\n\n')
    assert main(["play", "sums", "--index", "5"]) == 0
    shown = capsys.readouterr().out
    assert "[tool] 6" in shown
    assert "there is no tool 'nope'" in shown
    assert "ended: reward 1" in shown
    type_in("/hepl\n/tmp/x\n//2\n\n")
    assert main(["play", "sums", "--index", "1"]) == 0
    assert "unknown command /hepl: use /call TOOL" in capsys.readouterr().out
    assert main(["play", "sums", "--index", "-1"]) == 2
    assert "there is no task -1" in capsys.readouterr().err
    for ending in ("/quit\n", ""):
        type_in(ending)
        assert main(["play", "sums"]) == 0
        assert "stopped" in capsys.readouterr().out


def command(*arguments: str) -> subprocess.Popen[bytes]:
    program = f"import sys; from forge_env.cli.main import main; sys.exit(main({list(arguments)}))"
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-uc", program], stdin=pipe, stdout=pipe, stderr=pipe)


class Spinning(Sound):
    def prompt(self, task: fe.Task) -> list[fe.Message]:
        print("spinning")
        while True:
            pass


@pytest.mark.slow
def test_ctrl_c_twice_ends_code_that_never_yields() -> None:
    with command("validate", f"{__name__}:Spinning") as validation:
        assert validation.stdout is not None
        assert any(b"spinning" in line for line in validation.stdout)
        validation.send_signal(signal.SIGINT)
        assert validation.stderr.readline() == b"stopping; Ctrl-C again stops at once\n"
        validation.send_signal(signal.SIGINT)
        assert validation.wait(30) == 130
        assert validation.stderr.read() == b"stopped\n"


@pytest.mark.slow
def test_ctrl_c_ends_a_game_that_waits_for_its_player() -> None:
    with command("play", "blackjack") as game:
        assert game.stdout is not None
        game.stdin.write(b"/tools\n")
        game.stdin.flush()
        assert any(b"[user]" in line for line in game.stdout)
        game.send_signal(signal.SIGINT)
        assert game.wait(30) == 130
        assert game.stderr.read() == b"interrupted\n"


@pytest.mark.parametrize("kind", ["tools", "single", "sandbox", "repository", "program"])
@pytest.mark.slow
def test_a_new_package_works_at_once(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if kind in ("sandbox", "repository", "program"):
        require("local")
    assert main(["new", "my_env", "--kind", kind, "--dir", str(tmp_path)]) == 0
    assert "pip install -e" in capsys.readouterr().out
    package = tmp_path / "my_env"
    site = install(package, tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(package / "src")])}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *command], env=environment, cwd=package, capture_output=True, text=True)

    if kind == "single":  # the project's folder has the package's name and must not hide it, whatever is inside
        code = "import forge_env as fe; print(type(fe.make('my_env')).__name__)"
        beside = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert beside.stdout == "MyEnv\n", beside.stderr
    tested = run("-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert tested.returncode == 0, tested.stdout
    validated = run("-m", "forge_env", "validate", "my_env", "--num-tasks", "1")
    assert validated.returncode == 0, validated.stdout + validated.stderr
    assert "ok gold solutions score full marks: 2 of 2" in validated.stdout
    assert "ok API version: 1" in validated.stdout


def test_a_new_package_takes_its_data_along_when_it_is_installed(tmp_path: Path) -> None:
    if find_spec("setuptools") is None:
        pytest.skip("NOT RUN: setuptools is not installed")
    assert main(["new", "my_env", "--dir", str(tmp_path)]) == 0
    for place in ("questions.jsonl", "more/table.parquet"):
        file = tmp_path / "my_env" / "src" / "my_env" / place
        file.parent.mkdir(exist_ok=True)
        file.write_text("{}")
    build = [
        sys.executable,
        "-c",
        "from setuptools import setup; setup()",
        "-q",
        "build_py",
        "-d",
        str(tmp_path / "out"),
    ]
    subprocess.run(build, cwd=tmp_path / "my_env", check=True, capture_output=True)
    built = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert built >= {"my_env/environment.py", "my_env/questions.jsonl", "my_env/more/table.parquet"}


@pytest.mark.slow
def test_a_new_package_for_openenv_is_served(tmp_path: Path) -> None:
    testclient = pytest.importorskip("starlette.testclient", reason='NOT RUN: pip install "forge-env[openenv]"')
    assert main(["new", "my_env", "--openenv", "--dir", str(tmp_path)]) == 0
    package = tmp_path / "my_env"
    manifest = yaml.safe_load((package / "openenv.yaml").read_text())
    assert (manifest["name"], manifest["app"], manifest["spec_version"]) == ("my_env", "my_env.server:app", 1)
    site = install(package, tmp_path / "site")
    code = (
        "from starlette.testclient import TestClient; from my_env.server import app\n"
        "with TestClient(app, 'http://localhost') as client:\n"
        "    print(client.post('/reset').json()['observation']['messages'][1]['content'])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(package / "src")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("There are "), done.stderr
    assert testclient


def install(package: Path, site: Path) -> Path:
    """What `pip install -e` does to the package's metadata, without a network."""
    project: dict[str, Any] = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items()) for group, entries in groups
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return site


@pytest.mark.parametrize(
    "name", ["My-Env", "class", "ünï", "environments", "json", "pytest", "coding_rlvr", "1st", "torch", "tests"]
)
def test_names_that_would_not_work_are_refused(name: str, tmp_path: Path) -> None:
    assert main(["new", name, "--dir", str(tmp_path)]) == 2
    assert list(tmp_path.iterdir()) == []
