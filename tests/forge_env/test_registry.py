"""Finding environments: names, options, broken plug-ins, hidden packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forge_env as fe
from forge_env import plugins, registry
from forge_env.cli.main import main
from forge_env.errors import ConfigError, ForgeError, HeldUpError, NotRegisteredError, PluginError, UsageError
from tests.forge_env.environment.test_tool_environment import Arithmetic


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package with one good plug-in and four broken ones."""
    info = tmp_path / "third_party-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(
        "[forge_env.environments]\n"
        "good = third_party_good:Good\nfuture = third_party_good:Future\n"
        "crash = third_party_crash:Env\nleaves = third_party_leaves:Env\nnumber = third_party_good:NUMBER\n"
        "odd = third_party_odd:Env\ndash = third-party:Env\nempty =\n"
    )
    (tmp_path / "third_party_good.py").write_text(
        "import forge_env as fe\nNUMBER = 7\n"
        "class Good(fe.SingleTurnEnvironment):\n"
        "    '''A good one.\n\n    More.\n    '''\n"
        "    def task(self, split, index):\n        return fe.Task(id=str(index), prompt='x')\n"
        "    def reward(self):\n        return 1.0\n"
        "class Future(Good):\n    api_version = 99\n"
    )
    (tmp_path / "third_party_crash.py").write_text("raise ZeroDivisionError('at import')\n")
    (tmp_path / "third_party_odd.py").write_text("class Odd(BaseException): pass\nraise Odd('out of the ordinary')\n")
    (tmp_path / "third_party_leaves.py").write_text("import sys; sys.exit('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugins.installed.cache_clear()
    yield tmp_path
    plugins.installed.cache_clear()


def test_broken_plugins_are_reported_and_the_rest_works(third_party: Path) -> None:
    found = {entry.name: entry for entry in fe.list_environments()}
    good = found["good"]
    assert (good.source, good.target, good.summary, good.error) == (
        "third-party 1.2",
        "third_party_good:Good",
        "A good one.",
        None,
    )
    assert "ZeroDivisionError: at import" in (found["crash"].error or "")
    assert "SystemExit: no licence" in (found["leaves"].error or "")
    assert "Odd: out of the ordinary" in (found["odd"].error or "")
    assert "'third-party:Env' is not an import path" in (found["dash"].error or "")
    assert "'' is not an import path (write module:attribute in" in (found["empty"].error or "")
    assert "written for environment API 99, this is API 1 (update forge-env)" in (found["future"].error or "")
    assert "7 is not a subclass of fe.Environment" in (found["number"].error or "")
    assert plugins.shadowed("third_party_good") is None
    assert fe.make("good").config.max_turns == 1
    with pytest.raises(PluginError, match="at import"):
        fe.make("crash")


def add_package(folder: Path, name: str, entry_points: str) -> None:
    info = folder / f"{name}-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text(f"[forge_env.environments]\n{entry_points}")
    plugins.installed.cache_clear()


def test_adapters_have_names_and_say_what_they_need(capsys: pytest.CaptureFixture[str]) -> None:
    found = {entry.name: entry.needs for entry in fe.list_environments()}
    adapters = {
        "conversations": ["dataset"],
        "gymnasium": ["env_id"],
        "harbor": ["folder"],
        "mixture": ["environments"],
        "openenv": ["url"],
        "pettingzoo": ["env_id"],
        "reasoning_gym": ["dataset"],
        "swe_bench": ["file"],
        "verifiers": ["taskset"],
    }
    assert {name: needs for name, needs in found.items() if needs} == adapters
    for name, (needed,) in adapters.items():
        with pytest.raises(ConfigError, match=f"{needed}: missing .add it, for example `{needed}: VALUE`"):
            fe.make(name)
    mixture = fe.make("mixture", environments={"gsm8k": {"weight": 2}, "wordle": {}})
    assert mixture.task("train", 0).tags[0] in ("gsm8k", "wordle")
    assert fe.make("openenv", url="http://localhost:1").config.model_dump()["url"] == "http://localhost:1"
    assert main(["info"]) == 0
    assert "(needs taskset: verifiers:TASKSET)" in capsys.readouterr().out


def test_two_packages_of_one_name_are_both_named(third_party: Path) -> None:
    add_package(third_party, "rival", "good = third_party_good:Good\n")
    with pytest.raises(PluginError, match=r"2 packages register the environment 'good': .*uninstall") as caught:
        fe.make("good")
    assert "third-party 1.2 (third_party_good:Good)" in str(caught.value)
    assert "rival 2.0 (third_party_good:Good)" in str(caught.value)
    found = {entry.name: entry for entry in fe.list_environments()}["good"]
    assert sorted(found.source.split(" and ")) == ["rival 2.0", "third-party 1.2"]
    assert "2 packages register" in (found.error or "")
    assert fe.make("third_party_good:Good").config.max_turns == 1


def test_entry_points_that_cant_be_parsed_are_named(third_party: Path, caplog: pytest.LogCaptureFixture) -> None:
    add_package(third_party, "unreadable", "no equals sign\n")
    assert fe.make("good").config.max_turns == 1
    assert "the entry points of unreadable can't be read" in caplog.text


def test_unknown_names_and_options_say_what_was_meant(third_party: Path) -> None:
    with pytest.raises(NotRegisteredError, match=r"no environment 'goood'.*did you mean 'good'"):
        fe.make("goood")
    with pytest.raises(NotRegisteredError, match=r"available: .*good"):
        fe.make("zzz")
    with pytest.raises(ConfigError, match=r"environment 'good': name: unknown key \(known here: seed, "):
        fe.make("good", name="x")
    with pytest.raises(ConfigError, match="max_turns: should be greater than or equal to 1, not 0"):
        fe.make("blackjack", max_turns=0)
    with pytest.raises(UsageError, match=r"sandboxes='docker' is not a started engine.*fe.open_engine"):
        fe.make("good", sandboxes="docker")
    with pytest.raises(ConfigError, match=r"sandboxes: unknown key"):
        registry.maker("calculator", {"sandboxes": 1})
    with pytest.raises(ConfigError, match=r"max_turn: unknown key \(did you mean max_turns\?\)"):
        fe.make("good", max_turn=1)
    with pytest.raises(ConfigError, match=r"dataset.pth: unknown key \(did you mean dataset.path\?\)"):
        fe.make("gsm8k", dataset={"path": "x.jsonl", "pth": 1})
    with pytest.raises(ConfigError, match=r"dataset.path: missing \(add it, for example `path: VALUE`\)"):
        fe.make("gsm8k", dataset={})
    with pytest.raises(ConfigError, match=r"seed: should be a valid integer, not 'x'"):
        fe.make("good", seed="x")


def test_registering_in_code(third_party: Path) -> None:
    fe.register("good", Arithmetic)  # comes before the installed one
    fe.register("by_path", "tests.forge_env.environment.test_tool_environment:Arithmetic")
    try:
        assert isinstance(fe.make("good", max_turns=2), Arithmetic)
        assert isinstance(fe.make("by_path"), Arithmetic)
        assert {entry.name: entry.source for entry in fe.list_environments()}["by_path"] == "code"
    finally:
        registry.unregister("good")
        registry.unregister("by_path")
    assert isinstance(fe.make("tests.forge_env.environment.test_tool_environment:Arithmetic"), Arithmetic)
    with pytest.raises(PluginError, match="not a subclass"):
        fe.register("no", int)


@pytest.mark.parametrize("package", [True, False])
def test_a_folder_that_hides_ours_is_explained(tmp_path: Path, package: bool) -> None:
    root = Path(plugins.__file__).parent.parent
    (tmp_path / "sandboxes").mkdir()
    if package:
        (tmp_path / "sandboxes" / "__init__.py").touch()
    code = (
        f"import sys; sys.path[:] = [{str(tmp_path)!r}, *sys.path, {str(root)!r}]\n"
        "import sandboxes, forge_env.plugins as p\n"
        "print(p.shadowed('sandboxes.docker'), p.shadowed('json'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    if package or "hides" in done.stdout:
        assert done.stdout.strip() == (
            f"your own {tmp_path}/sandboxes hides the package 'sandboxes' that comes with forge-env None"
        )
    else:
        assert done.stdout.strip() == "None None"  # a plain folder gives way to an installed package


def test_plain_folder_hiding_a_package_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "third_party_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match=r"the folder .*third_party_folder hides the installed package.*rename"):
        plugins.load_plugin(registry.GROUP, "third_party_folder:Env")


def test_endless_module_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is thrown into code that holds everything up is not the module's own failure."""
    (tmp_path / "endless_plugin.py").write_text("from forge_env.errors import HeldUpError\nraise HeldUpError('loops')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HeldUpError):
        plugins.load_plugin(registry.GROUP, "endless_plugin:Env")


def test_import_is_light() -> None:
    code = (
        "import sys, forge_env as fe; fe.make, fe.ToolEnvironment, fe.Rubric\n"
        "heavy = ('torch', 'vllm', 'docker', 'gymnasium', 'httpx2', 'rich', 'matplotlib', 'numpy')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_class_that_was_changed_is_checked_when_it_is_registered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed(Arithmetic):
        pass

    monkeypatch.setattr(registry, "_REGISTERED", {})
    fe.register("changed", Changed)
    Changed.splits = "train"
    with pytest.raises(PluginError, match="splits is 'train'"):
        fe.register("changed", Changed)


def test_an_environment_is_made_of_its_class() -> None:
    class Mine(fe.SingleTurnEnvironment):
        rubric = fe.Rubric(lambda answer: 1.0)

        def tasks(self, split: str) -> list[fe.Task]:
            return [fe.Task(id="0", prompt="?", split=split)]

    assert type(fe.make(Mine)) is Mine
    assert fe.make(Mine, seed=3).config.seed == 3
    with pytest.raises(ConfigError, match="environment 'Mine': sede: unknown key"):
        fe.make(Mine, sede=3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (5, "5 is neither the name nor the class of an environment"),
        (None, "None is neither the name"),
        (lambda: None, "is neither the name"),
        (int, "environment 'int': <class 'int'> is not a subclass of fe.Environment"),
        (fe.Environment, "environment 'Environment': Environment lacks"),
    ],
)
def test_what_is_no_environment_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ForgeError, match=said):
        fe.make(given)
    env = fe.make("calculator")
    with pytest.raises(UsageError, match="pass its class: Calculator"):
        fe.make(env)
