"""More of what a new author may get wrong: in tools, gold solutions, whole classes, tasks that look alike, plug-ins.

`test_bad_environments` has what `task`, `prompt`, `reset`, `step` and rewards may return.
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
from pydantic import Field, field_validator

import forge_env as fe
from forge_env.cli.main import main
from tests.sandboxes.conftest import require


class Find(fe.ToolEnvironment):
    """Find something."""

    api_version = 1
    rubric = fe.Rubric([fe.rewards.ExactMatch()])

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", split=split, prompt="x", gold=f"x{index}")

    def gold_actions(self, task: fe.Task) -> Any:
        return [fe.call_tool("find"), str(task.gold)]

    @fe.tool
    def find(self) -> Any:
        """Find something."""
        return "x"


class ToolBytes(Find):
    @fe.tool
    def find(self) -> Any:
        return b"x\xff"


class ToolNotAwaited(Find):
    @fe.tool
    def find(self) -> Any:
        return self.look()

    async def look(self) -> str:
        return "x"


class ToolNoSelf(Find):
    @fe.tool
    def find(what: str) -> str:  # type: ignore[override]
        return what


class ToolNothing(Find):
    @fe.tool
    def find() -> str:  # type: ignore[misc]
        return "x"


class ToolUnknownHint(Find):
    @fe.tool
    def find(self, what: Nothing) -> str:  # type: ignore[name-defined]  # noqa: F821
        return "x"


class ToolThreadHint(Find):
    @fe.tool
    def find(self, what: threading.Thread) -> str:
        return "x"


class ToolGenerator(Find):
    @fe.tool
    def find(self) -> Any:
        yield "x"


class ToolForgotten(Find):
    @fe.tool
    def find(self) -> str:
        return self.nothing  # type: ignore[attr-defined,no-any-return]


class ToolSubmitsNumber(Find):
    @fe.tool
    def find(self) -> str:
        self.submit(3)  # type: ignore[arg-type]
        return "x"


class ToolStep(Find):
    @fe.tool
    def step(self, what: str) -> str:  # type: ignore[override]
        return "x"


class ToolAsks(Find):
    @fe.tool
    def find(self) -> str:
        raise EOFError("EOF when reading a line")  # what `input` does where nobody types


class ToolDefaultNone(Find):
    @fe.tool
    def find(self, most: int = None) -> str:  # type: ignore[assignment]  # noqa: RUF013
        return "x"


class ToolDefaultText(Find):
    @fe.tool
    def find(self, most: int = "ten") -> str:  # type: ignore[assignment]
        return "x"


class TextConfig(fe.ToolEnvironmentConfig):
    size: int = "large"  # type: ignore[assignment]


class OptionText(Find):
    config_class = TextConfig


class RangeConfig(fe.ToolEnvironmentConfig):
    size: int = Field(0, ge=1)


class OptionOutOfRange(Find):
    config_class = RangeConfig


class ListConfig(fe.ToolEnvironmentConfig):
    levels: tuple[int, ...] = [1, 2]  # type: ignore[assignment]


class OptionList(Find):
    config_class = ListConfig


class GoldDictionary(Find):
    def gold_actions(self, task: fe.Task) -> Any:
        return [{"tool": "find"}]


class GoldNothing(Find):
    def gold_actions(self, task: fe.Task) -> Any:
        return [None]


class GoldAsync(Find):
    async def gold_actions(self, task: fe.Task) -> Any:  # type: ignore[override]
        return ["x"]


class SetupSignature(Find):
    async def setup(self) -> None:  # type: ignore[override]
        pass


class SetupAwaitsNothing(Find):
    async def setup(self, task: fe.Task) -> None:
        await None  # type: ignore[misc]


class SetupSubmits(Find):
    async def setup(self, task: fe.Task) -> None:
        self.submit("x")


class SetupYields(Find):
    def setup(self, task):  # type: ignore[no-untyped-def]
        yield


class CountersList(Find):
    def counters(self):  # type: ignore[no-untyped-def]
        return [1]


class PromptNone(Find):
    def prompt(self, task):  # type: ignore[no-untyped-def]
        return None


class SetupRunsLoop(Find):
    async def setup(self, task: fe.Task) -> None:
        work = asyncio.sleep(0)
        try:
            asyncio.run(work)
        finally:
            work.close()


class PromptSignature(Find):
    def prompt(self) -> Any:  # type: ignore[override]
        return []


class RespondNone(Find):
    def is_final(self, message: fe.Message) -> bool:
        return False

    def respond(self, message: fe.Message) -> Any:
        return None


class ResetAlone(Find):
    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return [fe.Message(role="user", content="x")], {}


class RubricNone(fe.ToolEnvironment):
    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", split=split, prompt="x")


class RubricClass(Find):
    rubric = fe.Rubric  # type: ignore[assignment]


class RubricWeights(Find):
    def __init__(self, config: Any = None, **context: Any) -> None:
        self.rubric = fe.Rubric([fe.rewards.ExactMatch()], weights=[1, 2])
        super().__init__(config, **context)


class CountAsync(Find):
    async def num_tasks(self, split: str) -> Any:  # type: ignore[override]
        return 3


class CountTrue(Find):
    def num_tasks(self, split: str) -> Any:
        return True


class CountTooHigh(Find):
    def num_tasks(self, split: str) -> Any:
        return 3

    def task(self, split: str, index: int) -> fe.Task:
        return [fe.Task(id=f"{split}-1", split=split, prompt="x")][index]


class TasksAttribute(fe.ToolEnvironment):
    tasks = [fe.Task(id="1", prompt="x")]  # type: ignore[assignment]
    api_version = 1
    rubric = Find.rubric


class TasksNone(fe.ToolEnvironment):
    api_version = 1
    rubric = Find.rubric

    def tasks(self, split: str) -> Any:
        pass


class TasksAsync(TasksNone):
    async def tasks(self, split: str) -> Any:
        return []


class TasksText(TasksNone):
    def tasks(self, split: str) -> Any:
        return "abc"


class TasksNoFile(TasksNone):
    def tasks(self, split: str) -> Any:
        return fe.load_tasks("nowhere.jsonl", split)


class SplitsNone(Find):
    splits = ()


class SystemList(Find):
    system_prompt = ["x"]  # type: ignore[assignment]


class DataList(Find):
    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=str(index), prompt="x", data=[1])  # type: ignore[arg-type]


class ApiOfTomorrow(Find):
    api_version = 99


class ConfigObject(Find):
    config_class = fe.EnvironmentConfig()  # type: ignore[assignment]


class NoEnvironment:
    pass


class FewerConfig(fe.EnvironmentConfig):
    size: int = 3


class ConfigOfLess(Find):
    config_class = FewerConfig


class TaskSwapped(Find):
    def task(self, index: int, split: str) -> fe.Task:  # type: ignore[override]
        return fe.Task(id=f"{split}-{index}", prompt="x")


class OwnTurns(Find):
    async def setup(self, task: fe.Task) -> None:
        self.turns = "none"  # type: ignore[assignment]


class OwnMessages(Find):
    async def setup(self, task: fe.Task) -> None:
        self.messages = {}  # type: ignore[assignment]


class OwnConfig(Find):
    async def setup(self, task: fe.Task) -> None:
        self.config = {"size": 3}  # type: ignore[assignment]


class OwnAnswer(Find):
    answer = None  # type: ignore[assignment]


class Boxed(fe.SandboxEnvironment):
    """What is wrong here is found before any sandbox is asked for, but in `files`."""

    api_version = 1
    rubric = fe.Rubric(lambda: 0.5)

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", split=split, prompt="x")


class SpecDictionary(Boxed):
    sandbox_spec = {"packages": ["x"]}  # type: ignore[assignment]


class ToolNotMade(Boxed):
    bash = fe.tools.bash


class FilesAsync(Boxed):
    async def files(self, task: fe.Task) -> Any:  # type: ignore[override]
        return {}


class Whole(fe.Environment):
    """The contract without help."""

    api_version = 1
    given: Any = ([], 0.0, True, False, {})
    said: Any = {}

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", split=split, prompt="x")

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return [fe.Message(role="user", content="x")], self.said

    async def step(self, action: Any) -> Any:
        return self.given


class SeatStranger(Whole):
    seats = ("a", "b")
    said = {"seat": "c"}


class SeatMissing(Whole):
    seats = ("a", "b")


class SeatsText(Whole):
    seats = "ab"  # type: ignore[assignment]


class SeatRewards(Whole):
    seats = ("a", "b")
    said = {"seat": "a"}
    given = ([], 0.0, True, False, {"rewards": {"c": 1.0}})


class MetricText(Whole):
    given = ([], 0.0, True, False, {"metrics": {"length": "long"}})


class StepWord(Whole):
    given = ([], 0.0, "done", False, {})


class StepNone(Whole):
    given = None


class StepPlain(Whole):
    def step(self, action: Any) -> Any:
        return self.given


class StepUnfinished(Whole):
    async def step(self, action: Any) -> Any:
        raise NotImplementedError


class ResetSignature(Whole):
    async def reset(self) -> Any:  # type: ignore[override]
        return [], {}


class ResetPositional(Whole):
    async def reset(self, seed: int) -> Any:  # type: ignore[override]
        return [], {}


class CloseFails(Whole):
    async def close(self) -> None:
        raise RuntimeError("stuck")


class CountAttribute(Find):
    num_tasks = 10  # type: ignore[assignment]


class SplitsTwice(Find):
    splits = ("train", "train")


class SeatsTwice(Whole):
    seats = ("a", "a")


class HighestNan(Find):
    max_reward = float("nan")


class ToolsFunctions(Whole):
    tools = [len]  # type: ignore[assignment]


class SpecSignature(Boxed):
    def spec_of(self) -> Any:  # type: ignore[override]
        return fe.SandboxSpec()


class ScoreNumber(Find):
    async def score(self) -> Any:
        return 1.0


class ScorePlain(Find):
    def score(self, answer: str) -> Any:  # type: ignore[override]
        return 1.0


class TaskProperty(Find):
    @property
    def task(self) -> Any:  # type: ignore[override]
        return fe.Task(id="1", prompt="x")


class FinalWord(Find):
    def is_final(self, message: fe.Message) -> Any:
        return "no"


class DemonstrateAsync(Find):
    async def demonstrate(self, task: fe.Task, rng: random.Random) -> Any:  # type: ignore[override]
        return []


class MetricWord(Find):
    rubric = fe.Rubric([fe.rewards.ExactMatch()], metrics=[lambda: "long"])  # type: ignore[list-item,return-value]


class RewardWeightNan(Find):
    def __init__(self, config: Any = None, **context: Any) -> None:
        self.rubric = fe.Rubric([fe.rewards.ExactMatch()], weights=[float("nan")])
        super().__init__(config, **context)


class DifficultyWord(Find):
    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", split=split, prompt="x", difficulty="hard")  # type: ignore[arg-type]


class TagsText(Find):
    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", split=split, prompt="x", tags="easy")  # type: ignore[arg-type]


HERE = "tests.forge_env.environment.test_careless_mistakes"


@pytest.mark.parametrize(
    ("cls", "said", "fix"),
    [
        (ToolBytes, "tool 'find' returned bytes, which a model can't read", "decode them"),
        (ToolNotAwaited, "tool 'find' returned coroutine, which a model can't read", "await it"),
        (ToolNoSelf, "the tool ToolNoSelf.find has no `self`", "write `def find(self, what, ...)`"),
        (ToolNothing, "the tool ToolNothing.find has no `self`", "write `def find(self)`"),
        (ToolUnknownHint, "its type hints can't be resolved: name 'Nothing' is not defined", "import what they name"),
        (ToolThreadHint, "tool 'find': Unable to generate pydantic-core schema for <class 'thr", "use JSON types"),
        (ToolGenerator, "tool 'find' is a generator", "return its whole answer"),
        (ToolForgotten, "-0': 'ToolForgotten' object has no attribute 'nothing' [find, ", ""),
        (ToolSubmitsNumber, "ToolSubmitsNumber.submit was given a int", "give a text"),
        (ToolStep, "the tool ToolStep.step hides ToolEnvironment.step", "step_tool"),
        (ToolAsks, "-0': EOF when reading a line [find, ", ""),
        (ToolDefaultNone, "tool 'find': the default of 'most' should be a valid integer, not None", "... | None ="),
        (ToolDefaultText, "tool 'find': the default of 'most' should be a valid integer", "correct the default"),
        (OptionText, "TextConfig.size: its default should be a valid integer", "correct the default"),
        (OptionOutOfRange, "RangeConfig.size: its default should be greater than or equal to 1, not 0", "the default"),
        (OptionList, "ListConfig.levels: its default should be (1, 2), not [1, 2]", "correct the default"),
        (
            GoldDictionary,
            "GoldDictionary.gold_actions: an action is a text or a Message, not dict",
            "fe.call_tool(...)",
        ),
        (GoldNothing, "GoldNothing.gold_actions: an action is a text or a Message, not NoneType", "give texts"),
        (GoldAsync, "GoldAsync.gold_actions is a coroutine function", "without `async`"),
        (SetupSignature, "SetupSignature.setup: too many positional", "write `async def setup(self, task)`"),
        (SetupAwaitsNothing, "SetupAwaitsNothing.setup raised TypeError on task", ""),
        (SetupSubmits, "SetupSubmits.submit was called before the agent", "in a tool or `respond`"),
        (SetupRunsLoop, "SetupRunsLoop.setup raised RuntimeError on task", ""),
        (SetupYields, "SetupYields.setup has a `yield`", "end it in `cleanup`"),
        (CountersList, "CountersList.counters returned a list", "a dictionary of numbers"),
        (PromptNone, "PromptNone.prompt gave a NoneType, None as messages", "give a list"),
        (PromptSignature, "PromptSignature.prompt: too many positional", "write `def prompt(self, task)`"),
        (RespondNone, "RespondNone.respond gave a NoneType, None as messages", "give a list"),
        (ResetAlone, "step() without a running episode", "return await super().reset(...)"),
        (RubricNone, "RubricNone has no rubric", "set `rubric"),
        (RubricClass, "RubricClass.rubric is a type", "set `rubric"),
        (RubricWeights, "a rubric has 1 reward functions but 2 weights", "give one for each"),
        (CountAsync, "CountAsync.num_tasks is a coroutine function", "without `async`"),
        (CountTrue, "CountTrue.num_tasks returned True", "None: endless"),
        (CountTooHigh, "CountTooHigh.task raised IndexError", ""),
        (TasksAttribute, "TasksAttribute.tasks is a list", "write `def tasks(self, split)`"),
        (TasksNone, "TasksNone.tasks returned a NoneType", "return a list"),
        (TasksAsync, "TasksAsync.tasks is a coroutine function", "without `async`"),
        (TasksText, "TasksText.tasks returned a str", "return a list"),
        (TasksNoFile, "there is no file nowhere.jsonl", "check `dataset.path`"),
        (SplitsNone, "SplitsNone.splits is ()", 'write ("train", "eval")'),
        (SystemList, "SystemList.system_prompt is ['x']", "write a text"),
        (DataList, "data: should be a mapping of keys to values, not [1] [task, ", ""),
        (ApiOfTomorrow, "was written for environment API 99, this is API 1", "update forge-env"),
        (ConfigObject, "config_class is EnvironmentConfig(", "derive it"),
        (NoEnvironment, "is not a subclass of fe.Environment", ""),
        (ConfigOfLess, "config_class is <class 'tests.forge_env.", "derive it from fe.ToolEnvironmentConfig"),
        (TaskSwapped, "TaskSwapped.task: takes self, index, split", "write `def task(self, split, index)`"),
        (OwnTurns, "OwnTurns.setup made self.turns a str", "use another"),
        (OwnMessages, "OwnMessages.setup made self.messages a dict", "use another"),
        (OwnConfig, "OwnConfig.reset made self.config a dict", "use another"),
        (OwnAnswer, "OwnAnswer.answer hides ToolEnvironment.answer", "call it something else"),
        (SpecDictionary, "SpecDictionary.sandbox_spec is a dict", "write fe.SandboxSpec"),
        (ToolNotMade, "ToolNotMade.bash is not a tool yet", "write `bash = fe.tools.bash()`"),
        (FilesAsync, "FilesAsync.files is a coroutine function", "without `async`"),
        (SeatStranger, "SeatStranger.reset gave the seat a str, 'c'", "one of a, b"),
        (SeatMissing, "SeatMissing.reset gave the seat a str, ''", "one of a, b"),
        (SeatsText, "SeatsText.seats is 'ab'", 'write ("first", "second")'),
        (SeatRewards, "SeatRewards.step gave a dict, {'c': 1.0} as info['rewards']", "finite numbers by seat"),
        (MetricText, "MetricText.step gave a dict, {'length': 'long'} as info['metrics']", "finite numbers by name"),
        (StepWord, "StepWord.step gave a str, 'done' as terminated", "give True or False"),
        (StepNone, "StepNone.step returned a NoneType, None", "return (messages, reward"),
        (StepPlain, "StepPlain.step is a plain function", "async def step"),
        (StepUnfinished, "StepUnfinished.step raised NotImplementedError on task", ""),
        (ResetSignature, "ResetSignature.reset: got an unexpected keyword", "reset(self, *, seed=None, options=None)"),
        (
            ResetPositional,
            "ResetPositional.reset: got an unexpected keyword",
            "reset(self, *, seed=None, options=None)",
        ),
        (CountAttribute, "CountAttribute.num_tasks is a int", "write `def num_tasks(self, split)`"),
        (SplitsTwice, "SplitsTwice.splits has 'train' twice", "a name of its own"),
        (SeatsTwice, "SeatsTwice.seats has 'a' twice", "a name of its own"),
        (HighestNan, "max_reward is nan", "write a number"),
        (ToolsFunctions, "ToolsFunctions.tools has a builtin_function_or_method", "put @fe.tool on its methods"),
        (SpecSignature, "SpecSignature.spec_of: too many positional", "write `def spec_of(self, task)`"),
        (ScoreNumber, "ScoreNumber.score returned a float", "set `rubric` to the function"),
        (ScorePlain, "ScorePlain.score: missing a required argument: 'answer'", "write `async def score(self)`"),
        (TaskProperty, "TaskProperty.task is a property", "write `def task(self, split, index)`"),
        (FinalWord, "FinalWord.is_final returned 'no'", "return True or False"),
        (DemonstrateAsync, "DemonstrateAsync.demonstrate is a coroutine function", "without `async`"),
        (MetricWord, "reward function '<lambda>' returned 'long' on task 'train-0'", "finite number"),
        (RewardWeightNan, "the weight nan of 'ExactMatch' is not valid", "give a finite number"),
        (DifficultyWord, "difficulty: should be a valid integer, not 'hard' [task, ", ""),
        (TagsText, "tags: should be a valid list, not 'easy' [task, ", ""),
        (CloseFails, "CloseFails.close raised RuntimeError: stuck [close, ", ""),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_mistake_is_named(cls: type, said: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", f"{HERE}:{cls.__name__}", "--num-tasks", "1"]) in (1, 2)
    error = capsys.readouterr().err
    assert said in error
    assert fix in error
    assert len(error.splitlines()) == 1 + bool(fix)
    assert "this is a bug" not in error


class ValidatedConfig(fe.ToolEnvironmentConfig):
    names: tuple[str, ...] = Field("a,b", validate_default=True)  # type: ignore[arg-type]

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
    await env.sandbox.exec("ls")  # type: ignore[arg-type]


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
    assert main(["validate", f"{HERE}:Boxed", "--num-tasks", "1", "--sandbox", "local"]) in (1, 2)
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
    assert main(["validate", f"{HERE}:Boxed", "--num-tasks", "1", "--sandbox", "local"]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert fix in error
    assert len(error.splitlines()) == 2


# --- what only shows beside other episodes or tasks is a finding


class EqualIds(Find):
    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id="one", split=split, prompt=f"x{index}", gold="x")


class EqualAcross(Find):
    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=str(index), split=split, prompt=f"{split} {index}", gold="x")


class OtherSplit(Find):
    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", prompt="x", gold="x")


class EmptyPrompt(Find):
    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", split=split, prompt=" ", gold="x")


class ShowsNothing(Find):
    def prompt(self, task: fe.Task) -> Any:
        return []


class ByChance(Find):
    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", split=split, prompt=f"x{random.random()}", gold="x")


class DataLambda(Find):
    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", split=split, prompt="x", gold="x", data={"check": lambda: 1})


class DataModule(Find):
    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", split=split, prompt="x", gold="x", data={"check": threading})


class ToldGold(Find):
    def task(self, split: str, index: int) -> fe.Task:
        gold = f"the watermelon {index}"
        return fe.Task(id=f"{split}-{index}", split=split, prompt=f"Say {gold}.", gold=gold)


class SharedByAll(Find):
    found: list[str] = []

    @fe.tool
    def find(self) -> Any:
        self.found.append("x")
        return str(len(self.found))


class SharedPrompt(Find):
    seen: dict[str, int] = {}

    def prompt(self, task: fe.Task) -> Any:
        self.seen[task.id] = self.seen.get(task.id, 0) + 1
        return [fe.Message(role="user", content=str(self.seen))]


class GoldMisspelt(Find):
    def gold_actions(self, task: fe.Task) -> Any:
        return [fe.call_tool("fnd"), str(task.gold)]


class GoldWrong(Find):
    def gold_actions(self, task: fe.Task) -> Any:
        return ["y"]


class NotDescribed(Find):
    @fe.tool
    def look(self) -> str:
        return "x"


class AlwaysPaid(Find):
    rubric = fe.Rubric(lambda: 1.0)


class DataArray(Find):
    def task(self, split: str, index: int) -> fe.Task:
        return super().task(split, index).model_copy(update={"data": {"cells": numpy.arange(3)}})


class PaidTwice(Find):
    rubric = fe.Rubric(lambda answer: 2.0 * (answer[:1] == "x"))


class ScoredByChance(Find):
    rubric = fe.Rubric(lambda: random.random() / 2)


@pytest.mark.parametrize(
    ("cls", "mark", "said"),
    [
        (EqualIds, "!!", "tasks of 'train': two tasks have the id 'one'"),
        (EqualAcross, "!!", "tasks of 'eval': task '0' is also the id of one of 'train': put the split into the id"),
        (OtherSplit, "!!", "says split='train': set Task.split"),
        (EmptyPrompt, "!!", "has an empty prompt"),
        (ShowsNothing, "!!", "shows the agent nothing at the start"),
        (ByChance, "!!", "task('train', 0) is different in a second environment of the same seed"),
        (DataLambda, "!!", "data['check'] is a function, which can't be compared or recorded"),
        (DataModule, "!!", "can't be written as JSON"),
        (DataArray, "!!", "can't be written as JSON: Unable to serialize unknown type: <class 'numpy.ndarray'>"),
        (ToldGold, "!!", "task 'train-0' shows the agent its gold solution"),
        (SharedByAll, "--", "SharedByAll.found changed while episodes were played"),
        (SharedPrompt, "!!", "was shown differently the second time"),
        (GoldMisspelt, "--", "Error: there is no tool 'fnd'; did you mean 'find'?"),
        (GoldWrong, "!!", "task 'train-0' scores 0 of 1"),
        (NotDescribed, "--", "tools without a description: look: a docstring tells the model"),
        (AlwaysPaid, "!!", "gives full marks for ''"),
        (PaidTwice, "!!", "scored 2 of 1: raise max_reward in the class, or lower the reward"),
        (ScoredByChance, "!!", "was scored 0."),
    ],
)
def test_a_finding_is_shown(cls: type, mark: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", f"{HERE}:{cls.__name__}", "--num-tasks", "1"]) == (1 if mark == "!!" else 0)
    shown = capsys.readouterr()
    assert [line for line in shown.out.splitlines() if line.startswith(mark) and said in line], shown.out
    assert shown.err == ""


# --- modules and packages that can't be loaded


CLASS = "import forge_env as fe\nclass Env(fe.SingleTurnEnvironment):\n    api_version = 1\n"


@pytest.mark.parametrize(
    ("source", "said", "fix"),
    [
        ("import nothing_there\n", "ModuleNotFoundError: No module named 'nothing_there'", ""),
        ("class Env(\n", "SyntaxError: '(' was never closed (careless.py, line 1)\n", ""),
        (
            f"{CLASS}    def reward(self, task, answr): return 1.0\n",
            "reward function 'reward' asks for 'answr'",
            "task,",
        ),
        (
            f"{CLASS}    def reward(self, response, answer): return float(answer in response)\n",
            "reward function 'reward' takes `response` and `answer`, which are both the agent's reply",
            "is `target`: take it instead of `answer`",
        ),
        (
            f"{CLASS}    reward = fe.rewards.ExactMatch\n",
            "reward function 'ExactMatch' is a class",
            "write ExactMatch()",
        ),
        (f"{CLASS}    reward = 1.0\n", "1.0 is not a reward function", "give a function"),
        (f"{CLASS}    rubric = fe.Rubric([])\n", "a rubric without a reward function gives every episode 0", "give it"),
        (f"{CLASS}    rubric = fe.Rubric(lambda x: 1)\n", "reward function '<lambda>' asks for 'x'", "task,"),
        (f"{CLASS}    rubric = fe.Rubric([len, len])\n", "reward function 'len' asks for 'obj'", "task,"),
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
        (
            "import forge_env as fe\nfe.ToolEnviroment\n",
            "'ToolEnviroment'; did you mean ToolEnvironment? [<module>",
            "",
        ),
        (f"{CLASS}    @fe.tools\n    def f(self): pass\n", "fe.tools are ready-made tools [Env (", "is @fe.tool"),
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
