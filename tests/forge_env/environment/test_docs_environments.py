"""The programs in docs/environments/ run as printed, saved under the names that the pages give them."""

from __future__ import annotations

import json
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

import forge_env as fe
from forge_env.cli.main import main
from forge_env.config.recipe import RunConfig, TasksSection
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import GoldPolicy, ReplayPolicy
from forge_env.sandbox.engines import LazyEngine
from forge_env.tasks.datasets import load_tasks
from forge_env.validation.checks import Validator
from tests.sandboxes.conftest import require
from tests.sandboxes.wheels import OPENAI, use_wheels

PAGES = sorted((Path(__file__).parents[3] / "docs" / "environments").glob("*.md"))
TEXT = "\n".join(page.read_text() for page in PAGES)
PROGRAMS = dict(re.findall(r"<!-- program: (\w+) -->\n```python\n(.*?)```", TEXT, re.DOTALL))
RECIPES = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
(SERVER,) = re.findall(r"<!-- server -->\n```python\n(.*?)```", TEXT, re.DOTALL)


ELSEWHERE = {"reverse", "safe", "countdown", "doubles", "hints", "agent", "writer"}
"""Those that other tests below run."""


@pytest.fixture(params=sorted(PROGRAMS.keys() - ELSEWHERE))
def program(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a program that is saved in the current folder."""
    name = str(request.param)
    save(name, tmp_path, monkeypatch)
    return name


def save(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / f"{name}.py").write_text(PROGRAMS[name])
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)


def test_every_kind_is_there() -> None:
    assert set(PROGRAMS) == {
        *("reverse", "safe", "tally", "doubles", "chat", "countdown", "hints", "qa", "repair", "race", "lake"),
        *("agent", "writer"),
    }


@pytest.mark.slow
async def test_programs_validate(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if program in ("tally", "repair"):
        require("local")
    if program == "repair":
        use_wheels(tmp_path, monkeypatch)
    module = import_module(program)
    classes = [
        value for value in vars(module).values() if isinstance(value, type) and issubclass(value, fe.Environment)
    ]
    cls = next(cls for cls in classes if cls.__module__ == program)
    options: dict[str, Any] = {}
    if program == "qa":
        rows = [{"question": f"{i} + 1?", "answer": f"so\n#### {i + 1}"} for i in range(40)]
        (tmp_path / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        columns = {"prompt": "question", "answer": "answer", "gold": "answer"}
        options = {"dataset": {"path": "data.jsonl", "columns": columns}}
    async with LazyEngine("local") as engine:

        def make() -> fe.Environment:
            return fe.make(f"{program}:{cls.__name__}", sandboxes=engine, **options)

        checks = [check async for check in Validator(make, num_tasks=1 if program == "tally" else 2).run()]
    assert [check for check in checks if check.status == "failed"] == []
    notes = [check.name for check in checks if check.status == "note"]
    assert set(notes) <= {"hidden data can't be found with the tools"}
    assert program != "repair" or not notes


@pytest.mark.slow
async def test_the_tools_of_the_pages_server_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two episodes: each starts the server's process, so the many of a validation would take a minute."""
    pytest.importorskip("mcp")
    save("doubles", tmp_path, monkeypatch)
    (tmp_path / "server.py").write_text(SERVER)
    cls = import_module("doubles").Doubles
    task = cls().task("train", 21)
    gold = await run_episode(cls, GoldPolicy(), task=task)
    assert (gold.error, gold.reward) == (None, 1.0)
    wrong = await run_episode(cls, ReplayPolicy([fe.call_tool("double", number=21), "41"]), task=task)
    assert (wrong.error, wrong.reward) == (None, 0.0)
    assert [message.content for message in wrong.turns[1].observation] == ["42"]


@pytest.mark.slow
async def test_the_pages_program_asks_with_the_real_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("local")
    use_wheels(tmp_path, monkeypatch, OPENAI)
    save("writer", tmp_path, monkeypatch)
    save("agent", tmp_path, monkeypatch)
    cls = import_module("writer").Writer
    async with LazyEngine("local") as engine:
        task = cls().task("train", 0)
        for said, reward in [
            (["def f(", *cls().gold_actions(task)], 1.0),
            (["def f(x): return 2"], 0.0),
            (["import os; os._exit(0)"], 0.0),
        ]:
            played = await run_episode(lambda: cls(sandboxes=engine), ReplayPolicy(said), task=task)
            assert (played.error, played.reward, len(played.turns)) == (None, reward, len(said))
            assert played.answer == "written"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_from_a_script_to_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ "Bring your agent": its files and its commands, in turn, but for those that need a model."""
    require("local")
    use_wheels(tmp_path, monkeypatch, OPENAI)
    for name in ("agent", "writer"):
        save(name, tmp_path, monkeypatch)
    text = next(path for path in PAGES if path.stem == "programs").read_text()
    commands = re.findall(r"^(?:OPENAI_API_KEY=\S+ )?forge-env (.*)$", text, re.MULTILINE)
    validate, gold, endpoint, train = commands
    assert main(shlex.split(validate)) == 0
    assert capsys.readouterr().out.endswith("writer:Writer: sound\n")
    assert main([*shlex.split(gold), "--out", "gold"]) == 0
    assert re.search(r"Writer \(eval\) +8 +8 +1\.000", capsys.readouterr().out)
    assert (endpoint, train) == ("eval writer:Writer --model NAME --base-url https://HOST/v1 -n 8", "train train.yaml")


@pytest.mark.parametrize("page", ["single-turn", "tools", "step", "seats"])
def test_the_command_that_a_page_gives_works(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = next(path for path in PAGES if path.stem == page).read_text()
    (file,) = re.findall(r"^Save it as `(\w+)\.py`", text, re.MULTILINE)[:1]
    (name,) = re.findall(r"`forge-env validate (\S+)`", text)[:1]
    (tmp_path / f"{file}.py").write_text(PROGRAMS[file])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, file, raising=False)
    assert main(["validate", name, "--tasks", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith(f"{name}: sound\n")
    assert {line.split(":")[0] for line in shown.splitlines() if line.startswith("note ")} <= {
        "note hidden data can't be found with the tools"
    }


def test_the_recipes_are_valid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program, seats, dataset, tasks = [yaml.safe_load(recipe) for recipe in RECIPES]
    RunConfig.model_validate(program)
    RunConfig.model_validate(seats)
    TasksSection.model_validate(tasks["tasks"])
    given = dataset["environment"]["options"]["dataset"]
    (tmp_path / "train.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    config = fe.DatasetConfig.model_validate({**given, "path": str(tmp_path)})
    assert load_tasks(config, "train")[0].prompt == "1 + 1?"


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, PAGES[0].parents[1] / "environments.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).is_file(), (page.name, target)
