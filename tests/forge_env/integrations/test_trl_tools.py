"""The class of tools for TRL's own loop, without TRL."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import forge_env as fe
from forge_env import registry
from forge_env.errors import UsageError
from forge_env.integrations.trl import Rollouts, environment_factory, reward


class Judged(fe.ToolEnvironment):
    """Is lost when it is scored."""

    splits = ("practice",)

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", prompt="?", split=split)

    def lose(self, answer: str) -> float:
        raise fe.InfrastructureError("the judge is away")

    rubric = fe.Rubric(lose)

    @fe.tool
    def look(self) -> str:
        """Look around."""
        return "a door"


@pytest.fixture
def register() -> Iterator[Callable[[type[fe.Environment]], None]]:
    yield lambda cls: registry.register("judged", cls)
    registry.unregister("judged")


def test_episode_lost_at_its_end_has_no_reward(register: Callable[[type[fe.Environment]], None]) -> None:
    register(Judged)
    episode = environment_factory("judged")()
    episode.reset()
    assert episode.look() == "a door"
    assert reward([[{"role": "tool", "content": "a door"}]], environments=[episode]) == [None]


def test_rows_without_a_split_are_of_the_first(register: Callable[[type[fe.Environment]], None]) -> None:
    register(Judged)
    rollouts = Rollouts("judged")
    [[message]] = [row["prompt"] for row in rollouts.rows(1)]
    assert message["content"] == "/0"


@pytest.mark.parametrize(
    ("name", "argument", "message"),
    [
        ("reset", "text", "'reset' has a name"),
        ("_call", "text", "'_call' has a name"),
        ("look", "from", "'look' has the argument 'from'"),
        ("look", "self", "'look' has the argument 'self'"),
        ("look", "a-b", "'look' has the argument 'a-b'"),
    ],
)
def test_a_tool_that_cannot_be_a_method_is_refused(
    register: Callable[[type[fe.Environment]], None],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    argument: str,
    message: str,
) -> None:
    register(Judged)
    tool = fe.ToolSpec(name=name, parameters={"type": "object", "properties": {argument: {"type": "string"}}})
    monkeypatch.setattr(Judged, "tools", [tool])
    with pytest.raises(UsageError, match=message) as caught:
        environment_factory("judged")
    assert "Rollouts" in str(caught.value.fix)
