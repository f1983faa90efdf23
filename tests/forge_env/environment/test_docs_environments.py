"""The programs in docs/environments/ run as printed, saved under the names that the pages give them."""

from __future__ import annotations

import re
import shlex
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

import forge_env as fe
from forge_env.cli.main import main
from forge_env.config.recipe import RunConfig, TasksSection
from forge_env.environment.optional import gold_actions
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import GoldPolicy, ReplayPolicy
from forge_env.sandbox.engines import LazyEngine
from forge_env.tasks.datasets import load_tasks
from forge_env.types import as_message
from tests.sandboxes.conftest import require
from tests.sandboxes.wheels import use_client, use_wheels

PAGES = sorted((Path(__file__).parents[3] / "docs" / "environments").glob("*.md"))
TEXT = "\n".join(page.read_text() for page in PAGES)
PROGRAMS = dict(re.findall(r"<!-- program: (\w+) -->\n```python\n(.*?)```", TEXT, re.DOTALL))
RECIPES = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
(SERVER,) = re.findall(r"<!-- server -->\n```python\n(.*?)```", TEXT, re.DOTALL)
(DATA,) = re.findall(r"<!-- data -->\n```json\n(.*?)```", TEXT, re.DOTALL)


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


def printed(name: str) -> tuple[str, list[str]]:
    """Under which name the page has a program saved, and the commands it then gives."""
    before = TEXT[: TEXT.index(f"<!-- program: {name} -->")].rpartition("```")[2]
    (file,) = re.findall(r"[Ss]ave .*?\bas `(\w+)\.py`", before)
    return file, re.findall(r"`forge-env ((?:validate|play) [^`]+)`", before)


IN_BLOCKS = {"agent", "writer"}
"""Those of "Bring your agent", whose commands stand in blocks."""
PRINTED = [
    pytest.param(name, command, id=" ".join(command.split()[:2]))
    for name in PROGRAMS
    if name not in IN_BLOCKS
    for command in printed(name)[1]
]
ASKS_A_SERVER = "doubles"
SANDBOXED = {"tally", "repair"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "command"), PRINTED)
def test_what_a_page_says_works_as_printed(
    name: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program under the name that the page gives it, and the command word for word; who plays gives the gold."""
    if name in SANDBOXED:
        require("local")
        use_wheels(tmp_path, monkeypatch)
    if name == ASKS_A_SERVER:
        pytest.importorskip("mcp")
        (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "data.jsonl").write_text(DATA)
    file, _ = printed(name)
    (tmp_path / f"{file}.py").write_text(PROGRAMS[name])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, file, raising=False)
    words = shlex.split(command)
    if words[0] == "play":
        with (tmp_path / "typed").open("w+") as typed:
            typed.write(gold_typed(words[1]))
            typed.seek(0)
            monkeypatch.setattr("sys.stdin", typed)
            assert main(words) == 0
        assert "\nended: reward 1" in capsys.readouterr().out
        return
    assert main(words) == 0
    shown = capsys.readouterr().out
    verdict = shown.splitlines()[-1].removeprefix(f"{words[1]}: ")
    hidden = {"the agent is shown no hidden data", "hidden data can't be found with the tools"}
    unmade = verdict.removeprefix("no check failed; not checked: ").split("; ")
    assert verdict == "sound" or hidden.issuperset(unmade)  # short answers aren't looked for
    notes = {line[3:].split(":")[0] for line in shown.splitlines() if line.startswith("-- ")}
    assert notes <= {*hidden, "cheats earn nothing"}
    assert name != "repair" or (verdict == "sound" and not notes)


def gold_typed(environment: str) -> str:
    """What a person types who plays the first task's gold solution."""
    env = fe.make(environment)
    lines = []
    for action in map(as_message, gold_actions(env, env.task("train", 0)) or []):
        lines += [f"/call {call.function.name} {call.function.arguments}" for call in action.tool_calls]
        lines += [*([action.content] if action.content else []), ""]
    return "\n".join(lines) + "\n"


def test_every_program_has_its_command() -> None:
    assert {case.values[0] for case in PRINTED} == PROGRAMS.keys() - IN_BLOCKS


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
async def test_the_pages_program_asks_with_the_real_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    require("local")
    use_client(tmp_path, monkeypatch, tmp_path_factory)
    save("writer", tmp_path, monkeypatch)
    save("agent", tmp_path, monkeypatch)
    cls = import_module("writer").Writer
    async with LazyEngine("local") as engine:
        task = cls().task("train", 0)
        for said, reward in [
            (["def f(", *gold_actions(cls(), task)], 1.0),
            (["def f(x): return 2"], 0.0),
            (["import os; os._exit(0)"], 0.0),
        ]:
            played = await run_episode(lambda: cls(sandboxes=engine), ReplayPolicy(said), task=task)
            assert (played.error, played.reward, len(played.turns)) == (None, reward, len(said))
            assert played.answer == "written"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_from_a_script_to_an_evaluation(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """ "Bring your agent": its files and its commands, in turn, but for those that need a model."""
    require("local")
    use_client(tmp_path, monkeypatch, tmp_path_factory)
    for name in ("agent", "writer"):
        save(name, tmp_path, monkeypatch)
    text = next(path for path in PAGES if path.stem == "programs").read_text()
    commands = re.findall(r"^(?:OPENAI_API_KEY=\S+ )?forge-env (.*)$", text, re.MULTILINE)
    validate, gold, endpoint, train = commands
    assert main([*shlex.split(validate), "--num-tasks", "2"]) == 0
    assert capsys.readouterr().out.endswith("writer:Writer: sound\n")
    assert main([*shlex.split(gold), "--out", "gold"]) == 0
    assert re.search(r"Writer \(eval\) +8 +8 +1\.000", capsys.readouterr().out)
    assert (endpoint, train) == ("eval writer:Writer --model NAME --base-url https://HOST/v1 -n 8", "train train.yaml")


def test_the_recipes_are_valid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    agent, program, seats, dataset, tasks = [yaml.safe_load(recipe) for recipe in RECIPES]
    RunConfig.model_validate(agent)
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
