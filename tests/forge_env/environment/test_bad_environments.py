"""What a new author may get wrong: each mistake is one message that names it, and the fix."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
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


class TasksMapping(TasksGenerator):
    def tasks(self, split: str) -> Any:
        return {"a": 1}


class TasksRows(TasksGenerator):
    def tasks(self, split: str) -> Any:
        return [{"prompt": "x"}]


class CountText(Sound):
    def num_tasks(self, split: str) -> Any:
        return "3"


class CountNegative(Sound):
    def num_tasks(self, split: str) -> Any:
        return -1


class CountFraction(Sound):
    def num_tasks(self, split: str) -> Any:
        return 3.0


class SplitsText(Sound):
    splits = "train"  # type: ignore[assignment]


class HighestText(Sound):
    max_reward = "1"  # type: ignore[assignment]


class FinalAsync(Sound):
    async def is_final(self, message: fe.Message) -> Any:  # type: ignore[override]
        return True


class TaskNone(Sound):
    def task(self, split: str, index: int) -> Any:
        return None


class TaskWithoutId(Sound):
    def task(self, split: str, index: int) -> Any:
        return fe.Task(prompt="x")  # type: ignore[call-arg]


class TaskUnknownField(Sound):
    def task(self, split: str, index: int) -> Any:
        return fe.Task(id="1", prompt="x", answer="x")  # type: ignore[call-arg]


class GoldNumber(Sound):
    def task(self, split: str, index: int) -> Any:
        return fe.Task(id="1", prompt="x", gold=3)  # type: ignore[arg-type]


class RewardNan(Sound):
    def reward(self) -> Any:
        return float("nan")


class RewardList(Sound):
    def reward(self) -> Any:
        return [1.0]


class PromptNone(Sound):
    def prompt(self, task: fe.Task) -> Any:
        return None


class PromptDictionaries(Sound):
    def prompt(self, task: fe.Task) -> Any:
        return [{"role": "user", "content": "x"}]


class PromptRole(Sound):
    def prompt(self, task: fe.Task) -> Any:
        return [fe.Message(role="human", content="x")]  # type: ignore[arg-type]


class RespondText(Sound):
    def is_final(self, message: fe.Message) -> bool:
        return False

    async def respond(self, message: fe.Message) -> Any:
        return "more"


class ConfigChanged(Sound):
    def task(self, split: str, index: int) -> Any:
        self.config.seed = 3
        return super().task(split, index)


class ToolAnyArguments(ToolObject):
    @fe.tool
    def find(self, *args: str) -> Any:
        """Find something."""


class ToolAnyNames(ToolObject):
    @fe.tool
    def find(self, **options: str) -> Any:
        """Find something."""


class ToolUntyped(ToolObject):
    @fe.tool
    def find(self, what) -> Any:  # type: ignore[no-untyped-def]
        """Find something."""


class ToolTwice(ToolObject):
    @fe.tool(name="find")
    def search(self) -> str:
        """Find something."""
        return "x"


class ToolCrash(ToolObject):
    @fe.tool
    def find(self) -> Any:
        """Find something."""
        return {}["x"]


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
        (TaskAsync, "TaskAsync.task is a coroutine function", "without `async`"),
        (TaskField, "id: should be a valid string, not 0 [", ""),
        (TaskCrash, "test_bad_environments.py:", ""),  # where the author's own code is, not the library's
        (TaskSignature, "TaskSignature.task: too many positional arguments", "write `def task(self, split, index)`"),
        (PromptHuge, "PromptHuge.prompt gave messages of 11,000,000 characters together", "keep them below 10,000,000"),
        (ToolObject, "tool 'find' returned a Sound, which a model can't read", "return text"),
        (TasksGenerator, "TasksGenerator.tasks returned a generator", "return a list"),
        (TasksMapping, "TasksMapping.tasks returned a dict", "return a list"),
        (TasksRows, "TasksRows.task returned a dict", "return an fe.Task"),
        (CountText, "CountText.num_tasks returned '3'", "None: endless"),
        (CountNegative, "CountNegative.num_tasks returned -1", "None: endless"),
        (CountFraction, "CountFraction.num_tasks returned 3.0", "None: endless"),
        (SplitsText, "splits is 'train'", '("train", "eval")'),
        (HighestText, "max_reward is '1'", "a number"),
        (FinalAsync, "FinalAsync.is_final is a coroutine function", "without `async`"),
        (TaskNone, "TaskNone.task returned a NoneType", "return an fe.Task"),
        (TaskWithoutId, "id: missing [", ""),
        (TaskUnknownField, "answer: unknown key [", ""),
        (GoldNumber, "gold: should be a valid string, not 3 [", ""),
        (RewardNan, "reward function 'reward' returned nan", "finite number"),
        (RewardList, "reward function 'reward' returned [1.0]", "finite number"),
        (PromptNone, "PromptNone.prompt gave a NoneType, None as messages", "give a list"),
        (PromptDictionaries, "PromptDictionaries.prompt gave a list, [{'role'", "give a list"),
        (PromptRole, "role: should be 'system', 'user', 'assistant' or 'tool', not 'human' [", ""),
        (RespondText, "RespondText.respond gave a str, 'more' as messages", "give a list"),
        (ConfigChanged, "seed: instance is frozen", ""),
        (ToolAnyArguments, "tool 'find': *args: 'str' is not a named parameter", "name every parameter"),
        (ToolAnyNames, "tool 'find': **options: 'str' is not a named parameter", "name every parameter"),
        (ToolUntyped, "tool 'find': parameter 'what' has no type hint", "add one"),
        (ToolTwice, "ToolTwice has two tools named 'find'", "rename one"),
        (ToolCrash, "-0': 'x' [find, ", ""),  # which of the two tasks was played first is not said
        (NoTasks, "NoTasks has no tasks", "define `task"),
        (RubricFunction, "RubricFunction.rubric is a builtin_function_or_method", "set `rubric"),
        (RewardNone, "reward function 'reward' returned None", "finite number"),
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
        (NoReward, "NoReward has no reward function", "define `reward(self, task, answer)`, or set `rubric"),
    ],
)
def test_a_mistake_is_named(cls: type, said: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(
        ["validate", f"tests.forge_env.environment.test_bad_environments:{cls.__name__}", "--num-tasks", "1"]
    ) in (
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
    assert main(["validate", "tests.forge_env.environment.test_bad_environments:SetupFirst", "--num-tasks", "1"]) == 1
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
    assert main(["validate", "tests.forge_env.environment.test_bad_environments:Sound", *arguments]) == 2
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
    assert "where 'nowhere:answer' is a function: there is no module 'nowhere' here" in error


def test_the_highest_reward_of_a_game_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--env_id", "CliffWalking-v1", "--env_options", "{}", "--max_turns", "2", "--num-tasks", "1"]
    assert main(["validate", "gymnasium", *options, "--max_reward", "-3"]) == 1
    assert re.search(r"scored \S+ of -3: set the option max_reward=\S+, or lower the reward", capsys.readouterr().out)
    assert main(["validate", "gymnasium", *options, "--max_reward", "1"]) == 0
    assert main(["validate", "gymnasium", *options]) == 1, (
        "answers without a move cost nothing, and the best game is -13"
    )


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
