"""How small the contract is that an author inherits, and what an environment can opt into."""

from __future__ import annotations

import random
from typing import Any

import pytest

import forge_env as fe
from forge_env.environment import optional
from forge_env.environment.definition import check_definition
from forge_env.environment.optional import (
    gold_actions,
    hand_in,
    luck_of,
    random_action,
    scores_groups,
    seats_of,
    unplayable,
)
from forge_env.environment.tool_environment import given_answer
from forge_env.errors import EnvironmentBugError, PluginError
from forge_env.tools.schema import OPTIONAL_NAMES

NAMES = {
    fe.Environment: 14,
    fe.SingleTurnEnvironment: 25,
    fe.ToolEnvironment: 25,
    fe.SandboxEnvironment: 35,
    fe.ProgramEnvironment: 41,
}
"""Maximum number of public names that an author inherits."""


class Plain(fe.ToolEnvironment):
    rubric = fe.Rubric(lambda: 1.0)

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", prompt="Say 1.", gold="1", split=split)


class Offering(Plain):
    seats = ("first", "second")
    luck = 0.5

    def gold_files(self, task: fe.Task) -> dict[str, str]:
        return {"a.py": "x = 1"}

    def hand_in(self, task: fe.Task, files: Any) -> list[Any]:
        return [f"hand in {name}" for name in files]

    def random_action(self, rng: random.Random) -> str:
        return "left"

    async def unplayable(self, tasks: Any) -> dict[str, str]:
        return {"a": "no image"}

    async def score_group(self, task: fe.Task, trajectories: Any) -> None: ...

    def given_answer(self) -> str:
        return "42"


@pytest.mark.parametrize(("base", "most"), NAMES.items())
def test_authors_inherit_few_names(base: type, most: int) -> None:
    names = [name for name in dir(base) if not name.startswith("_")]
    assert len(names) <= most, names


async def test_an_environment_that_opts_into_nothing_has_the_defaults() -> None:
    env = Plain()
    task = env.task("train", 0)
    assert gold_actions(env, task) == ["1"]
    assert (seats_of(env), luck_of(env), scores_groups(env)) == ((), 0.0, False)
    assert await unplayable(env, [task]) == {}
    assert random_action(env, random.Random(0)) is None
    with pytest.raises(EnvironmentBugError, match="Plain has gold_files but no hand_in"):
        hand_in(env, task, {})


async def test_methods_of_a_protocol_are_called() -> None:
    env = Offering()
    task = env.task("train", 0)
    assert gold_actions(env, task) == ["hand in a.py"]
    assert (seats_of(env), luck_of(env), scores_groups(env)) == (("first", "second"), 0.5, True)
    assert await unplayable(env, [task]) == {"a": "no image"}
    assert random_action(env, random.Random(0)) == "left"
    assert given_answer(env) == "42"


def test_tools_can_have_no_name_of_a_protocol() -> None:
    protocols = [*optional.PROTOCOLS, optional.HasSeats, optional.HasLuck]
    names = {name for one in protocols for name in (*vars(one), *one.__annotations__) if not name.startswith("_")}
    assert set(OPTIONAL_NAMES) == {*names, "given_answer"}


@pytest.mark.parametrize("protocol", optional.PROTOCOLS)
def test_signatures_of_optional_methods_are_checked(protocol: type) -> None:
    name = next(name for name in vars(protocol) if not name.startswith("_"))
    wrong = type("Wrong", (Plain,), {name: lambda self, one, two, three, four: None})
    with pytest.raises(PluginError, match=rf"Wrong\.{name}"):
        check_definition(wrong)
