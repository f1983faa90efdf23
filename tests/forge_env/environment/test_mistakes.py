"""Mistakes of authors: each gives one error that names it and the fix, or one finding of the validation report."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field, field_validator

import forge_env as fe
from forge_env.cli.main import main
from forge_env.errors import UsageError
from forge_env.types import as_message
from tests.forge_env.environment.mistakes import Boxed, Find, Sound
from tests.sandboxes.conftest import require

SOURCE = Path(__file__).with_name("mistakes.py").read_text()
MISTAKES = re.findall(r"^class (\w+)[^\n]*\n(?:    [^\n]*\n)*# ([^\n]+)", SOURCE, re.MULTILINE)
ERRORS = [(name, text) for name, text in MISTAKES if text[:2] not in ("!!", "--")]
FINDINGS = [(name, text) for name, text in MISTAKES if text[:2] in ("!!", "--")]
MODULE = "tests.forge_env.environment.mistakes"
HERE = __name__


@pytest.mark.parametrize(("name", "text"), ERRORS)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_errors_name_the_mistake_and_the_fix(name: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    message, _, fix = text.partition(" -> ")
    assert main(["validate", f"{MODULE}:{name}", "--num-tasks", "1"]) in (1, 2)
    error = capsys.readouterr().err
    assert message in error
    assert fix in error
    assert len(error.splitlines()) == 1 + bool(fix)
    assert "this is a bug" not in error


@pytest.mark.parametrize(("name", "text"), FINDINGS)
def test_findings_are_listed_in_the_report(name: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    mark, _, message = text.partition(" ")
    assert main(["validate", f"{MODULE}:{name}", "--num-tasks", "1"]) == (1 if mark == "!!" else 0)
    printed = capsys.readouterr()
    assert [line for line in printed.out.splitlines() if line.startswith(mark) and message in line], printed.out
    assert printed.err == ""


@pytest.mark.parametrize("name", [":", "module:", ":Class", "a b:C"])
def test_what_is_no_import_path_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", name]) == 2
    assert "is not an import path\n  -> write module:Class" in capsys.readouterr().err


def test_a_cleanup_that_fails_after_setup_hides_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", f"{MODULE}:SetupFirst", "--num-tasks", "1"]) == 1
    assert "forge-env: SetupFirst.setup raised RuntimeError on task 'train-0': no server" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--num-tasks", "0"], "at least one task"),
        (["--num-tasks", "-3"], "at least one task"),
        (["--num-tasks", "many"], "invalid int value"),
        (["max_turns=0"], "max_turns"),
        (["nothing=1"], "--nothing: unknown key"),
        (["seed.x=1"], "seed"),
        (["seed=1", "seed.x=1"], "--seed.x: 'seed' is a value, not a section"),
        (["--num-tasks", "1", "--seed"], "needs a value"),
        (["--sandbox", "dokcer"], "did you mean 'docker'"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", f"{MODULE}:Sound", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_server_that_is_down_is_no_episode_with_reward_0(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--url", "http://127.0.0.1:9", "--reconnects", "0"]
    assert main(["info", "openenv", *options]) == 1
    shown = capsys.readouterr()
    assert "reward 0" not in shown.out
    assert "the example episode could not be played: InfrastructureError: http://127.0.0.1:9" in shown.err
    assert main(["info", "openenv", *options, "--no-example"]) == 0


def test_a_model_that_looks_like_a_function_is_said_to_be_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["eval", "calculator", "--model", "nowhere:answer", "--base-url", "http://127.0.0.1:9/v1", "--retries", "0"]
    assert main(asked) == 1
    error = capsys.readouterr().err
    assert "no connection to http://127.0.0.1:9/v1" in error
    assert "if 'nowhere:answer' is a function: there is no module 'nowhere' here" in error


def test_the_highest_reward_of_a_game_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--env_id", "CliffWalking-v1", "--env_options", "{}", "--max_turns", "2", "--num-tasks", "1"]
    assert main(["validate", "gymnasium", *options, "--max_reward", "-3"]) == 1
    assert re.search(r"scored \S+ of -3: set the option max_reward=\S+, or lower the reward", capsys.readouterr().out)
    assert main(["validate", "gymnasium", *options, "--max_reward", "1"]) == 0
    assert main(["validate", "gymnasium", *options]) == 1, (
        "answers without a move cost nothing, and the best game is -13"
    )


def test_no_tasks_at_all_are_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", f"{MODULE}:TasksEmpty"]) == 1
    assert "!! tasks: there are none" in capsys.readouterr().out


class Plain(fe.ToolEnvironment):
    """`setup`, `cleanup` and `respond` may be plain functions."""

    rubric = fe.Rubric(lambda: 1.0)

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=str(index), prompt="x")

    def setup(self, task: fe.Task) -> Any:
        self.held = True

    def cleanup(self) -> Any:
        self.held = False

    def is_final(self, message: fe.Message) -> bool:
        return False

    def respond(self, message: fe.Message) -> Any:
        return [fe.Message(role="user", content="And?")]


async def test_what_needs_no_await_may_be_plain() -> None:
    env = Plain()
    await env.reset(seed=0)
    assert env.held
    assert (await env.step("hm"))[0][0].content == "And?"
    await env.close()
    assert not env.held


@pytest.mark.parametrize("action", [None, 3, {"content": "x"}, ["x"], fe.Message(role="user", content="x")])
async def test_what_is_no_action_is_refused(action: Any) -> None:
    with pytest.raises(UsageError, match="an action is"):
        as_message(action)
    env = Sound()
    await env.reset(seed=0)
    with pytest.raises(UsageError, match="an action is"):
        await env.step(action)
    assert (await env.step("0"))[1] == 1.0  # the episode goes on


class ValidatedConfig(fe.ToolEnvironmentConfig):
    names: tuple[str, ...] = Field("a,b", validate_default=True)

    @field_validator("names", mode="before")
    @classmethod
    def split(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) else value


class OptionValidated(Find):
    config_class = ValidatedConfig


def test_a_default_that_pydantic_itself_validates_is_no_mistake() -> None:
    environment = fe.make(f"{HERE}:OptionValidated")
    assert isinstance(environment.config, ValidatedConfig)
    assert environment.config.names == ("a", "b")


class Judged(fe.SandboxEnvironment):
    """Hidden tests that something is wrong with."""

    api_version = 1
    editor = fe.tools.files(name="edit")
    submit = fe.tools.submit(with_answer=False)
    tests: Any = {}

    def __init__(self, config: Any = None, **context: Any) -> None:
        self.rubric = fe.Rubric(self.judge)
        super().__init__(config, **context)

    def num_tasks(self, split: str) -> int:
        return 1

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", split=split, prompt="x")

    def gold_files(self, task: fe.Task) -> dict[str, str]:
        return {"own.py": "def f():\n    return 2\n"}

    def hand_in(self, task: fe.Task, files: Any) -> list[str | fe.Message]:
        writing = [fe.call_tool("edit", command="create", path=path, file_text=text) for path, text in files.items()]
        return [*writing, fe.call_tool("submit")]

    async def judge(self) -> float:
        return (await self.run_hidden_tests(self.tests)).share


UNITTEST = "import unittest\nfrom own import f\nclass T(unittest.TestCase):\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ({}, "there are no tests [judge, "),
        ("def test_f(): assert f() == 2", "tests in one text need code in one text [judge, "),
        ({"test_own.py": "def test_f(:"}, "the tests in test_own.py are not Python: invalid syntax"),
        (
            {"test_own.py": "from own import f\ndef check(): assert f()\n"},
            "there is no test in test_own.py [judge, ",
        ),
        (
            {"test_own.py": f"{UNITTEST}    def test_f(self): self.assertEqual(f(), 3)\n"},
            "scores 0 of 1; failed hidden tests: test_own.py::T::test_f: AssertionError: 2 != 3",
        ),
        (
            {"test_own.py": f"{UNITTEST}    def test_f(self): pass\n".replace("own", "won")},
            "test_own.py::T::test_f was not run (test_own.py: ModuleNotFoundError: No module named 'won')",
        ),
    ],
)
def test_hidden_tests_that_are_none_or_fail_the_gold_solution_are_named(
    tests: Any, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require("local")
    monkeypatch.setattr(Judged, "tests", tests)
    assert main(["validate", f"{HERE}:Judged", "--sandbox", "local"]) in (1, 2)
    shown = capsys.readouterr()
    assert said in shown.out + shown.err


async def nothing_there(env: Boxed) -> Any:
    return await env.sandbox.read_text("none.txt")


async def a_text(env: Boxed) -> Any:
    await env.sandbox.exec("ls")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (nothing_there, "No such file or directory: none.txt [nothing_there, "),
        (a_text, "argv must be a non-empty list [a_text, "),
    ],
)
def test_what_a_sandbox_refuses_is_named_with_the_authors_line(
    reward: Any, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require("local")
    monkeypatch.setattr(Boxed, "rubric", fe.Rubric(reward))
    assert main(["validate", f"{MODULE}:Boxed", "--num-tasks", "1", "--sandbox", "local"]) in (1, 2)
    error = capsys.readouterr().err
    assert said in error
    assert "sandboxes/box.py" not in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("returned", "said", "fix"),
    [
        (["a.txt"], "Boxed.files returned a list", "return {path: text or bytes}"),
        (None, "Boxed.files returned a NoneType", "return {path: text or bytes}"),
        ({"/etc/passwd": "x"}, "Boxed.files: '/etc/passwd' is not inside the work folder", "relative path"),
        ({"a": 3}, "Boxed.files: a is of type int", "text or bytes"),
    ],
)
def test_files_that_are_none_are_named(
    returned: Any, said: str, fix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require("local")
    monkeypatch.setattr(Boxed, "files", lambda self, task: returned)
    assert main(["validate", f"{MODULE}:Boxed", "--num-tasks", "1", "--sandbox", "local"]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert fix in error
    assert len(error.splitlines()) == 2


CLASS = "import forge_env as fe\nclass Env(fe.SingleTurnEnvironment):\n    api_version = 1\n"


@pytest.mark.parametrize(
    ("source", "said", "fix"),
    [
        ("import nothing_there\n", "ModuleNotFoundError: No module named 'nothing_there'", ""),
        ("class Env(\n", "SyntaxError: '(' was never closed (careless.py, line 1)\n", ""),
        (f"{CLASS}    def reward(self, task, answr): return 1.0\n", "has an unknown parameter 'answr'", "task,"),
        (
            f"{CLASS}    def reward(self, response, answer): return float(answer in response)\n",
            "reward function 'reward' takes `response` and `answer`, which are both the agent's reply",
            "use `target` instead of `answer`",
        ),
        (f"{CLASS}    reward = fe.rewards.ExactMatch\n", "'ExactMatch' is a class", "write ExactMatch()"),
        (f"{CLASS}    reward = 1.0\n", "1.0 is not a reward function", "give a function"),
        (f"{CLASS}    rubric = fe.Rubric([])\n", "a rubric without a reward function gives every episode 0", "give it"),
        (
            f"{CLASS}    rubric = fe.Rubric(lambda x: 1)\n",
            "'<lambda>' has an unknown parameter 'x'",
            "task,",
        ),
        (
            f"{CLASS}    rubric = fe.Rubric([len, len])\n",
            "'len' has an unknown parameter 'obj'",
            "task,",
        ),
        (
            f"{CLASS}    def reward(self): return 1.0\n    rubric = fe.Rubric(lambda: 1)\n",
            "has both `reward` and `rubric`",
            "put the function in the rubric",
        ),
        (f"{CLASS}    look = fe.tool(timeout_s=-1)(lambda self: 'x')\n", "timeout_s=-1 of a tool", "seconds above 0"),
        (f"{CLASS}    look = fe.tool(name='a b')(lambda self: 'x')\n", "a tool can't be named 'a b'", "letters"),
        ("raise SystemExit('no licence')\n", "SystemExit: no licence", ""),
        ("x = 1 / 0\n", "ZeroDivisionError: division by zero [<module> (", ""),
        ("def Env(): pass\n", "is not a subclass of fe.Environment", ""),
        ("Other = 1\n", "has no attribute 'Env'", "it has none"),
        (
            f"{CLASS}    def task(self, split, index): pass\n    def reward(self): return 1.0\nEnv = Env()\n",
            "is not a subclass of fe.Environment",
            "name the class, Env, not an object",
        ),
        (CLASS.replace("class Env", "class Envs"), "has no attribute 'Env'", "did you mean 'Envs'?"),
        ("import forge_env as fe\nfe.ToolEnviroment\n", "; did you mean ToolEnvironment? [<module>", ""),
        (f"{CLASS}    @fe.tools\n    def f(self): pass\n", "'module' object is not callable [Env (", "is @fe.tool;"),
        (f"{CLASS}    f = fe.tool(timeout=3)\n", "@fe.tool has no option 'timeout'", "did you mean 'timeout_s'?"),
        (f"{CLASS}    f = fe.tool('find')\n", "@fe.tool can't be put on a str", "write @fe.tool(name='find')"),
        (
            "import forge_env as fe\nclass Config(fe.EnvironmentConfig):\n    size = 3\n",
            "A non-annotated attribute was detected: `size = 3`",
            "give it a type: `name: int = 3`",
        ),
    ],
)
def test_a_module_that_cant_be_loaded_is_named(
    source: str,
    said: str,
    fix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "careless.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "careless", raising=False)
    assert main(["validate", "careless:Env"]) in (1, 2)
    error = capsys.readouterr().err
    assert said in error
    assert fix in error
    assert "careless" in error
    assert len(error.splitlines()) == 1 + bool(fix)
