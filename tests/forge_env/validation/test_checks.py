"""What `forge-env validate` proves, and what it catches."""

from __future__ import annotations

import asyncio
import math
from typing import Literal

import pytest

import forge_env as fe
from forge_env.cli.main import main
from forge_env.cli.validate import verdict
from forge_env.errors import EnvironmentBugError, ForgeError
from forge_env.validation.checks import CONCURRENCY, Check, TaskRange, Validator, _chance
from tests.forge_env.rollout.test_episode import Golden, Tame


class Sound(Tame, Golden):
    """Adding numbers, soundly."""


class Whole(Sound):
    """Hides a text that is long enough to be looked for."""

    def task(self, split: str, index: int) -> fe.Task:
        task = super().task(split, index)
        return task.model_copy(update={"data": {**task.data, "note": "the butler did it"}})


def test_a_sound_environment_validates(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", f"{__name__}:Whole", "--num-tasks", "4"]) == 0
    assert capsys.readouterr().out.endswith(f"{__name__}:Whole: sound\n")


def test_what_nothing_was_checked_of_is_not_called_sound(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", f"{__name__}:Sound", "--num-tasks", "4"]) == 0
    shown = capsys.readouterr().out
    unmade = ("the agent is shown no hidden data", "hidden data can't be found with the tools")
    assert shown.endswith(f"{__name__}:Sound: no check failed; not checked: {'; '.join(unmade)}\n")
    for name in unmade:
        assert f"?? {name}: no hidden text is as long as 12 characters" in shown


def test_a_failed_check_comes_first() -> None:
    checks = [Check("open", "a", ""), Check("failed", "b", ""), Check("ok", "c", "")]
    assert verdict(checks) == "1 check(s) failed"
    assert verdict(checks[2:]) == "sound"


class Guess(Sound):
    """A number from 0 to 9, which an answer may hit."""

    tools = []

    def task(self, split: str, index: int) -> fe.Task:
        number = (index * 7 + 3) % 10
        return fe.Task(id=f"{split}-{index}", split=split, prompt="Guess.", data={"answer": str(number)})

    def gold_actions(self, task: fe.Task) -> list[fe.Action] | None:
        return [task.data["answer"]]

    rubric = fe.Rubric(lambda answer, task: float(answer == task.data["answer"]))


class Declared(Guess):
    luck = 0.1


class Bribed(Declared):
    rubric = fe.Rubric(lambda answer, task: float(answer in ("0", task.data["answer"])))


async def test_luck_is_declared() -> None:
    async def wrong(cls: type[Guess]) -> Check:
        name = "empty and wrong answers score below maximum"
        return next(
            check for check in [check async for check in Validator(cls, num_tasks=10).run()] if check.name == name
        )

    assert (await wrong(Guess)).detail.endswith("as 2 of 20 tasks do; if that is chance, declare it: luck=0.1")
    assert (await wrong(Declared)) == Check(
        "ok",
        "empty and wrong answers score below maximum",
        "4 answers to 20 tasks, of which one answer solves 2 by chance (luck=0.1)",
    )
    assert (await wrong(Bribed)).status == "failed"


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
    async def look_up(self, door: int) -> str:
        """Look behind a door."""
        return self.current_task.data["key"] if door == 2 else "nothing there"


class Switch(Careless):
    @fe.tool
    async def look_up(self, verbose: bool = True, level: Literal[1, 5] | None = 1) -> str:
        """Look around."""
        return self.current_task.data["key"] if not verbose or level == 5 else "nothing there"


class Level(Switch):
    @fe.tool
    async def look_up(self, level: Literal[1, 5] | None = 1, text: str = "") -> str:
        """Look around."""
        return self.current_task.data["key"] if level == 5 else "nothing there"


class Bare(Careless):
    @fe.tool
    async def look_up(self) -> str:
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


async def test_of_a_hundred_million_tasks_a_few_are_under_way() -> None:
    """They were all made, and each had a task of the event loop, before the first was played."""
    played: list[str] = []

    class Counted(Sound):
        made = 0

        def task(self, split: str, index: int) -> fe.Task:
            type(self).made += 1
            return super().task(split, index)

        async def setup(self, task: fe.Task) -> None:
            played.append(task.id)
            if len(played) == 20:
                raise ForgeError("that is enough")

    validator = Validator(Counted)
    tasks = TaskRange(validator.env, {"train": 100_000_000})
    assert len(tasks) == 100_000_000
    with pytest.raises(ForgeError, match="enough"):
        await validator._wrong(tasks)
    assert 20 <= len(played) <= 20 + CONCURRENCY
    assert Counted.made <= 20 + 2 * CONCURRENCY


def test_tasks_are_made_when_they_are_asked_for() -> None:
    tasks = TaskRange(Sound(), {"train": 3, "eval": 2}, {"train-1"})
    ids = ["train-0", "train-2", "eval-0", "eval-1"]
    assert [task.id for task in tasks] == ids
    assert len(tasks) == 4
    assert [task.id for task in tasks[1:3]] == ids[1:3]
    assert (tasks[0].id, tasks[-1].id) == (ids[0], ids[-1])


@pytest.mark.parametrize(
    ("hits", "count", "luck"), [(1, 10, 0.1), (3, 20, 0.25), (0, 5, 0.0), (2, 5, 0.0), (5, 5, 1.0)]
)
def test_the_chance_of_hits_is_binomial(hits: int, count: int, luck: float) -> None:
    exact = sum(math.comb(count, k) * luck**k * (1 - luck) ** (count - k) for k in range(hits, count + 1))
    assert _chance(hits, count, luck) == pytest.approx(exact)


def test_the_chance_of_hits_among_very_many_tasks() -> None:
    """Their binomial coefficients are no floats."""
    assert _chance(500, 100_000, 0.005) == pytest.approx(0.51, abs=0.02)
    assert _chance(100_000, 100_000, 0.005) == 0.0


async def test_an_environment_without_gold_is_open_not_failed() -> None:
    checks = {check.name: check async for check in Validator(Tame, num_tasks=2).run()}
    assert checks["gold solutions score full marks"] == Check(
        "open", "gold solutions score full marks", "no task has one (set Task.gold, or define gold_actions)"
    )
