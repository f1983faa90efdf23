"""What a new author may get wrong: each mistake is one message that names it, and the fix."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

import forge_env as fe
from forge_env.cli.main import main
from forge_env.errors import UsageError
from forge_env.types import as_message


class Sound(fe.SingleTurnEnvironment):
    """Say a number."""

    api_version = 1

    def task(self, split: str, index: int) -> Any:
        return fe.Task(id=f"{split}-{index}", split=split, prompt=f"Say {index}", gold=str(index))

    def reward(self, task: fe.Task, answer: str) -> Any:
        return float(answer == task.gold)


class TaskDict(Sound):
    def task(self, split: str, index: int) -> Any:
        return {"id": "x"}


class TaskAsync(Sound):
    async def task(self, split: str, index: int) -> Any:
        return None


class TaskField(Sound):
    def task(self, split: str, index: int) -> Any:
        return fe.Task(id=index, prompt="x")  # type: ignore[arg-type]


class TaskCrash(Sound):
    def task(self, split: str, index: int) -> Any:
        import random

        return random.Random(0).randint(2, 1)


class TaskSignature(Sound):
    def task(self, split: str) -> Any:  # type: ignore[override]
        return fe.Task(id=split, prompt="x")


class PromptHuge(Sound):
    def task(self, split: str, index: int) -> Any:
        return fe.Task(id=f"{split}-{index}", split=split, prompt="x" * 11_000_000, gold="x")


class ToolObject(fe.ToolEnvironment):
    rubric = fe.Rubric([fe.rewards.ExactMatch()])

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", split=split, prompt="x", gold="x")

    def gold_actions(self, task: fe.Task) -> list[fe.Action] | None:
        return [fe.call_tool("find"), "x"]

    @fe.tool
    def find(self) -> Any:
        """Find something."""
        return [{"found": Sound()}]


class TasksGenerator(fe.SingleTurnEnvironment):
    reward = fe.rewards.ExactMatch()

    def tasks(self, split: str) -> Any:
        yield fe.Task(id="1", prompt="x")


class TasksEmpty(TasksGenerator):
    def tasks(self, split: str) -> Any:
        return []


class NoTasks(fe.SingleTurnEnvironment):
    reward = fe.rewards.ExactMatch()


class NoReward(fe.SingleTurnEnvironment):
    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=str(index), prompt="x")


class RubricFunction(NoReward):
    rubric = len  # type: ignore[assignment]


class RewardNone(Sound):
    def reward(self) -> Any:
        return None


class RewardExits(Sound):
    def reward(self) -> Any:
        sys.exit("no grader")


class RewardCancels(Sound):
    async def reward(self) -> Any:  # nobody cancelled the episode
        raise asyncio.CancelledError


class PromptText(Sound):
    def prompt(self, task: fe.Task) -> Any:
        return "hello"


class GoldText(Sound):
    def gold_actions(self, task: fe.Task) -> Any:
        return "hello"


class NoInit(Sound):
    def __init__(self, config: Any = None, sandboxes: Any = None) -> None:
        self.x = 1


class InitArguments(Sound):
    def __init__(self) -> None:
        super().__init__()


class InitCrash(Sound):
    def __init__(self, config: Any = None, **context: Any) -> None:
        raise RuntimeError("no database")


class SetupFirst(Sound):
    async def setup(self, task: fe.Task) -> None:
        raise RuntimeError("no server")

    async def cleanup(self) -> None:
        self.server.close()  # type: ignore[attr-defined]


class ApiText(Sound):
    api_version = "1"  # type: ignore[assignment]


class ConfigDict(Sound):
    config_class = dict  # type: ignore[assignment]


class NoStep(fe.Environment):
    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", split=split, prompt="x")


class Whole(NoStep):
    given: Any = ([], 0.0, True, False, {})

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return [fe.Message(role="user", content="x")], {}

    async def step(self, action: Any) -> Any:
        return self.given


class ResetList(Whole):
    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return [fe.Message(role="user", content="x")]


class ResetSync(Whole):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return [], {}


class StepFour(Whole):
    given = ([], 0.0, True, {})


class StepText(Whole):
    given = ("text", 0.0, True, False, {})


class StepNan(Whole):
    given = ([], float("nan"), True, False, {})


class StepBoth(Whole):
    given = ([], 0.0, True, True, {})


class StepInfo(Whole):
    given = ([], 0.0, True, False, None)


class Endless(Whole):
    given = ([fe.Message(role="user", content="again")], 0.0, False, False, {})


@pytest.mark.parametrize(
    ("cls", "said", "fix"),
    [
        (TaskDict, "TaskDict.task returned a dict", "return an fe.Task"),
        (TaskAsync, "TaskAsync.task returned a coroutine", "not async"),
        (TaskField, "id: should be a valid string, not 0 [", ""),
        (TaskCrash, "test_bad_environments.py:", ""),  # where the author's own code is, not the library's
        (TaskSignature, "TaskSignature.task: too many positional arguments", "write `def task(self, split, index)`"),
        (PromptHuge, "PromptHuge.prompt gave messages of 11,000,000 characters together", "keep them below 10,000,000"),
        (ToolObject, "tool 'find' returned a Sound, which a model can't read", "return text"),
        (TasksGenerator, "TasksGenerator.tasks returned a generator", "return a list"),
        (NoTasks, "NoTasks has no tasks", "define `task"),
        (NoReward, "NoReward has no rubric", "define `reward(self, task, answer)`, or set `rubric"),
        (RubricFunction, "RubricFunction.rubric is a builtin_function_or_method", "set `rubric"),
        (RewardNone, "reward function 'reward' returned 'None'", "finite number"),
        (RewardExits, "reward function 'reward' raised SystemExit on task 'train-0': no grader [", ""),
        (RewardCancels, "reward function 'reward' raised CancelledError on task 'train-0'", ""),
        (PromptText, "PromptText.prompt gave a str, 'hello' as messages", "give a list"),
        (GoldText, "GoldText.gold_actions returned a str", "return a list"),
        (NoInit, "NoInit.__init__ does not call its base's", "super().__init__"),
        (InitArguments, "InitArguments.__init__: too many", "super().__init__"),
        (InitCrash, "InitCrash.__init__ raised RuntimeError: no database [", ""),
        (ApiText, "api_version is '1'", "write 1"),
        (ConfigDict, "config_class is <class 'dict'>", "derive it"),
        (NoStep, "NoStep lacks reset, step", "define them"),
        (ResetList, "ResetList.reset returned a list", "(messages, info)"),
        (ResetSync, "ResetSync.reset is a plain function", "async def reset"),
        (StepFour, "StepFour.step returned a tuple, ([], 0.0, True, {})", "(messages, reward"),
        (StepText, "StepText.step gave a str, 'text' as messages", "give a list"),
        (StepNan, "StepNan.step gave the reward a float, nan", "finite"),
        (StepBoth, "StepBoth.step returned terminated and truncated together", "a limit's"),
        (StepInfo, "StepInfo.step gave a NoneType, None as info", "a dictionary"),
        (Endless, "has not ended after 1000 turns", "config.max_turns"),
    ],
)
def test_a_mistake_is_named(cls: type, said: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", f"tests.forge_env.environment.test_bad_environments:{cls.__name__}", "--tasks", "1"]) in (
        1,
        2,
    )
    error = capsys.readouterr().err
    assert said in error
    assert fix in error
    assert len(error.splitlines()) == 1 + bool(fix)
    assert "this is a bug" not in error


@pytest.mark.parametrize("name", [":", "module:", ":Class", "a b:C"])
def test_what_is_no_import_path_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", name]) == 2
    assert "is not an import path\n  -> write module:Class" in capsys.readouterr().err


def test_a_cleanup_that_fails_after_setup_hides_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "tests.forge_env.environment.test_bad_environments:SetupFirst", "--tasks", "1"]) == 1
    assert "forge-env: SetupFirst.setup raised RuntimeError on task 'train-0': no server" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tasks", "0"], "at least one task"),
        (["--tasks", "-3"], "at least one task"),
        (["--tasks", "many"], "invalid int value"),
        (["max_turns=0"], "max_turns"),
        (["nothing=1"], "--nothing: unknown key"),
        (["seed.x=1"], "seed"),
        (["seed=1", "seed.x=1"], "--seed.x: 'seed' is a value, not a section"),
        (["--tasks", "1", "--seed"], "needs a value"),
        (["--sandbox", "dokcer"], "did you mean 'docker'"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "tests.forge_env.environment.test_bad_environments:Sound", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_no_tasks_at_all_are_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "tests.forge_env.environment.test_bad_environments:TasksEmpty"]) == 1
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
