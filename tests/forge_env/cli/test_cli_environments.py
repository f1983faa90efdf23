"""`forge-env list`, `info`, `validate`, `new`, `play`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

import forge_env as fe
from forge_env import registry
from forge_env.cli.main import main
from forge_env.errors import EnvironmentBugError
from forge_env.validation.checks import Check, Validator
from tests.forge_env.rollout.test_episode import Golden, Tame
from tests.sandboxes.conftest import require


class Sound(Tame, Golden):
    """Adding numbers, soundly."""


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    fe.register("sums", Sound)
    yield
    registry.unregister("sums")


def test_list_names_environments_and_their_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    found = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert found["sums"]["summary"] == "Adding numbers, soundly."
    assert main(["list"]) == 0
    assert "sums" in capsys.readouterr().out


def test_info_shows_options_tools_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "sums", "max_turns=3"]) == 0
    shown = capsys.readouterr().out
    for expected in ("max_turns = 3", "Assistant messages", '"required": ["a"]', "[user] 0 + 1 = ?", "reward 1"):
        assert expected in shown
    assert main(["info", "sums", "--json"]) == 0
    assert {tool["name"] for tool in json.loads(capsys.readouterr().out)["tools"]} > {"add", "scale"}


@pytest.mark.parametrize(
    "arguments", [["info", "sum"], ["info", "sums", "max_turn=3"], ["validate", "sums", "--x", "1"]]
)
def test_usage_errors_name_the_fix(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert "did you mean" in err or "known here: " in err


def test_a_sound_environment_validates(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "sums", "--tasks", "4"]) == 0
    assert capsys.readouterr().out.endswith("sums: sound\n")


class Generous(Sound):
    rubric = fe.Rubric(lambda answer: 1.0)


class WrongGold(Sound):
    def task(self, split: str, index: int) -> fe.Task:
        return super().task(split, index).model_copy(update={"gold": "7"})


class Telling(Sound):
    def task(self, split: str, index: int) -> fe.Task:
        task = super().task(split, index)
        return task.model_copy(update={"data": {**task.data, "note": "the butler did it"}})

    def prompt(self, task: fe.Task) -> list[fe.Message]:
        return [fe.Message(role="user", content=f"{task.prompt} Hint: {task.data['note']}.")]


class TellingNumber(Sound):
    def task(self, split: str, index: int) -> fe.Task:
        number = 1_000_000 + index
        return (
            super()
            .task(split, index)
            .model_copy(
                update={"prompt": f"Guess my number (not {number}0). It is {number}.", "data": {"answer": number}}
            )
        )


class Moody(Sound):
    count = 0

    def prompt(self, task: fe.Task) -> list[fe.Message]:
        Moody.count += 1
        return [fe.Message(role="user", content=f"{task.prompt} #{Moody.count}")]


class Careless(Sound):
    """Keeps the answer where a tool can reach it."""

    def task(self, split: str, index: int) -> fe.Task:
        task = super().task(split, index)
        return task.model_copy(update={"data": {**task.data, "key": f"the key of task {index}"}})

    @fe.tool
    async def look_up(self, kind: int, text: str, mode: Literal["a", "b"] = "a") -> str:
        """Look something up."""
        return self.current_task.data["key"] if text == "/" and kind == 1 else "nothing there"


class Doors(Careless):
    @fe.tool
    async def look_up(self, door: int) -> str:  # type: ignore[override]
        """Look behind a door."""
        return self.current_task.data["key"] if door == 2 else "nothing there"


class Switch(Careless):
    @fe.tool
    async def look_up(self, verbose: bool = True, level: Literal[1, 5] | None = 1) -> str:  # type: ignore[override]
        """Look around."""
        return self.current_task.data["key"] if not verbose or level == 5 else "nothing there"


class Level(Switch):
    @fe.tool
    async def look_up(self, level: Literal[1, 5] | None = 1, text: str = "") -> str:  # type: ignore[override]
        """Look around."""
        return self.current_task.data["key"] if level == 5 else "nothing there"


class Bare(Careless):
    @fe.tool
    async def look_up(self) -> str:  # type: ignore[override]
        """Look around."""
        return self.current_task.data["key"]


class Excessive(Sound):
    rubric = fe.Rubric(lambda answer, task: 1.5 if answer == task.gold else 0.0)


class Repeating(Sound):
    def task(self, split: str, index: int) -> fe.Task:
        return super().task(split, 0)


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (Generous, "gives full marks for ''"),
        (WrongGold, "'train-0' scores 0 of 1"),
        (Telling, "shows the agent its data['note']"),
        (TellingNumber, "shows the agent its data['answer']"),
        (Careless, "task 'train-0' shows the agent its data['key']"),
        (Doors, "task 'train-0' shows the agent its data['key']"),
        (Switch, "task 'train-0' shows the agent its data['key']"),
        (Level, "task 'train-0' shows the agent its data['key']"),
        (Bare, "task 'train-0' shows the agent its data['key']"),
        (Excessive, "scored 1.5 of 1"),
        (Moody, "shown differently the second time"),
        (Repeating, "two tasks have the id 'train-0'"),
    ],
)
async def test_unsound_environments_are_caught(cls: type[Sound], expected: str) -> None:
    failed = [check async for check in Validator(cls, num_tasks=3).run() if check.status == "failed"]
    assert any(expected in check.detail for check in failed), failed


async def test_group_functions_are_run() -> None:
    class Compared(Sound):
        rubric = fe.Rubric(lambda answer, task: float(answer == task.gold), group=[compared])

    checks = {check.name: check async for check in Validator(Compared, num_tasks=1).run()}
    assert checks["group functions score groups"] == Check(
        "ok", "group functions score groups", "2 groups of 4 episodes"
    )
    assert checks["no reward is above max_reward"].status == "ok"  # theirs are relative

    class Uncomparable(Sound):
        rubric = fe.Rubric(lambda answer, task: float(answer == task.gold), group=[uncomparable])

    with pytest.raises(EnvironmentBugError, match=r"'uncomparable' raised KeyError on task 'train-0'.*missing"):
        [check async for check in Validator(Uncomparable, num_tasks=1).run()]


def compared(answers: list[str]) -> list[float]:
    return [5.0] * len(answers)


def uncomparable(answers: list[str]) -> list[float]:
    raise KeyError("missing")


async def test_it_is_known_where_an_environment_stands_still() -> None:
    entered = asyncio.Event()

    class Stuck(Sound):
        async def setup(self, task: fe.Task) -> None:
            entered.set()
            await asyncio.Event().wait()

    async def check_all() -> None:
        async for _ in validator.run():
            pass

    validator = Validator(Stuck, num_tasks=1)
    checking = asyncio.create_task(check_all())
    await entered.wait()
    assert validator.longest_wait()[:2] == ("train-0", "reset")
    checking.cancel()
    await asyncio.wait([checking])
    assert validator.longest_wait()[:2] == ("", "")


async def test_an_environment_without_gold_is_noted_not_failed() -> None:
    checks = {check.name: check async for check in Validator(Tame, num_tasks=2).run()}
    assert checks["gold solutions score full marks"] == Check(
        "note", "gold solutions score full marks", "no task has one (set Task.gold, or override gold_actions)"
    )


def test_playing_at_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert "there is no /hepl: /call TOOL" in capsys.readouterr().out
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


def test_ctrl_c_twice_ends_code_that_never_yields() -> None:
    with command("validate", f"{__name__}:Spinning") as validation:
        assert validation.stdout is not None
        assert validation.stderr is not None
        assert any(b"spinning" in line for line in validation.stdout)
        validation.send_signal(signal.SIGINT)
        assert validation.stderr.readline() == b"stopping; Ctrl-C again stops at once\n"
        validation.send_signal(signal.SIGINT)
        assert validation.wait(30) == 130
        assert validation.stderr.read() == b"stopped\n"


def test_ctrl_c_ends_a_game_that_waits_for_its_player() -> None:
    with command("play", "blackjack") as game:
        assert game.stdin is not None
        assert game.stdout is not None
        assert game.stderr is not None
        game.stdin.write(b"/tools\n")
        game.stdin.flush()
        assert any(b"[user]" in line for line in game.stdout)
        game.send_signal(signal.SIGINT)
        assert game.wait(30) == 130
        assert game.stderr.read() == b"interrupted\n"


@pytest.mark.parametrize("kind", ["tools", "single", "sandbox"])
@pytest.mark.slow
def test_a_new_package_works_at_once(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if kind == "sandbox":
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
    validated = run("-m", "forge_env", "validate", "my_env", "--tasks", "1")
    assert validated.returncode == 0, validated.stdout + validated.stderr
    assert "ok gold solutions score full marks: 2 of 2" in validated.stdout
    assert "ok API version: 1" in validated.stdout


def test_a_new_package_for_openenv_is_served(tmp_path: Path) -> None:
    testclient = pytest.importorskip("starlette.testclient", reason='NOT RUN: pip install "forge-env[openenv]"')
    assert main(["new", "my_env", "--openenv", "--dir", str(tmp_path)]) == 0
    package = tmp_path / "my_env"
    manifest = yaml.safe_load((package / "openenv.yaml").read_text())
    assert (manifest["name"], manifest["app"], manifest["spec_version"]) == ("my_env", "my_env.server:app", 1)
    site = install(package, tmp_path / "site")
    code = (
        "from starlette.testclient import TestClient; from my_env.server import app\n"
        "with TestClient(app) as client: print(client.post('/reset').json()['observation']['messages'][1]['content'])"
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
