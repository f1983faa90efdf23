"""Episodes played by another trainer's loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import forge_env as fe
from forge_env import registry
from forge_env.environment.host import get_host
from forge_env.errors import EnvironmentBugError, InfrastructureError, UsageError
from forge_env.integrations import needs
from forge_env.integrations.episode import Episode

run = get_host().run
CLOSED: list[str] = []


class Count(fe.ToolEnvironment):
    """Says how far it is; the answer is the number of the task."""

    rubric = fe.Rubric(fe.rewards.exact_match)

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", prompt=f"Count to {index}.", data={"answer": str(index)}, split=split)

    @fe.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        if a == 13:
            raise fe.InfrastructureError("the adder is away")
        if a == 14:
            raise ZeroDivisionError
        return a + b

    async def close(self) -> None:
        CLOSED.append(self.current_task.id)
        await super().close()


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    registry.register("count", Count)
    CLOSED.clear()
    yield
    registry.unregister("count")


def call(a: int) -> fe.Message:
    return fe.call_tool("add", a=a, b=1)


def test_a_caller_plays_an_episode_turn_by_turn() -> None:
    episode = Episode("count", index=3)
    first = run(episode.start())
    assert "Count to 3." in first[-1].content
    assert [tool.name for tool in episode.tools] == ["add"]
    [answer] = run(episode.answer(call(2))) or []
    assert (answer.role, answer.content) == ("tool", "3")
    assert run(episode.answer("3")) is None
    assert (episode.trajectory.reward, len(episode.trajectory.turns), CLOSED) == (1.0, 2, ["train-3"])
    with pytest.raises(UsageError, match="not running"):
        run(episode.answer("3"))


def test_a_limit_of_the_caller_truncates_and_scores() -> None:
    episode = Episode("count", split="eval", index=3)
    run(episode.start())
    run(episode.answer(call(2)))
    run(episode.truncate("tokens"))
    assert (episode.trajectory.truncation, episode.trajectory.reward) == ("tokens", 0.0)
    assert CLOSED == ["eval-3"]
    run(episode.truncate("tokens"))


def test_an_answer_that_was_cut_truncates() -> None:
    episode = Episode("count", index=3)
    run(episode.start())
    assert run(episode.answer("3", cut=True)) is None
    assert (episode.trajectory.truncation, episode.trajectory.terminated) == ("reply_tokens", False)


@pytest.mark.parametrize(("a", "error"), [(13, InfrastructureError), (14, EnvironmentBugError)])
def test_a_failure_outside_the_agent_is_raised(a: int, error: type[Exception]) -> None:
    episode = Episode("count", index=3)
    run(episode.start())
    with pytest.raises(error):
        run(episode.answer(call(a)))
    assert not episode.over
    assert CLOSED == ["train-3"]


async def test_a_cancelled_caller_leaves_nothing() -> None:
    episode = Episode("count", index=3)
    await get_host().call(episode.start())
    await get_host().call(episode.close())
    assert CLOSED == ["train-3"]


async def test_many_are_played_at_once_from_one_event_loop() -> None:
    async def play(index: int) -> float:
        episode = Episode("count", index=index)
        await get_host().call(episode.start())
        await get_host().call(episode.answer("3"))
        return episode.trajectory.reward

    assert await asyncio.gather(*map(play, range(5))) == [0.0, 0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [("nim", {}, "has the seats"), ("nothing_like_it", {}, "no environment"), ("count", {"nothing": 1}, "nothing")],
)
def test_what_cannot_be_played_is_refused_at_once(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Episode(name, **options)


def test_a_missing_package_is_named_with_what_installs_it() -> None:
    with pytest.raises(UsageError, match="this adapter needs verl") as caught, needs("verl", "verl==0.9.1"):
        import no_such_package_as_this  # noqa: F401
    assert caught.value.fix == "pip install verl==0.9.1"
