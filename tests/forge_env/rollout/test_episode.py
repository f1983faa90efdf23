"""Playing episodes: what is recorded, limits, retries, cancellation."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import forge_env as fe
from forge_env.errors import ContextLengthExceeded, EnvironmentBugError, GeneratorError, InfrastructureError, UsageError
from forge_env.policy import Policy, PolicySession, Reply
from forge_env.rollout.episode import EpisodeLimits, Retry, run_episode
from forge_env.rollout.scripted import FunctionPolicy, GoldPolicy, RandomPolicy, ReplayPolicy, scripted_policy
from forge_env.trajectory import TrajectoryWriter, read_trajectories
from tests.forge_env.environment.test_tool_environment import Arithmetic, call, calls

MAKE: dict[str, Any] = {"make_env": Arithmetic, "environment_name": "arithmetic", "seed": 3}


class Tokens(Policy, PolicySession):
    """A policy that samples three tokens a turn and calls a tool until it is out of `turns`."""

    def __init__(self, turns: int = 100, fail: BaseException | None = None, failures: int = 0) -> None:
        self.turns, self.fail, self.failures = turns, fail, failures
        self.played = 0

    def session(self, tools: list[fe.ToolSpec], *, seed: int | None = None) -> Tokens:
        self.played = 0
        return self

    async def reply(self, observation: list[fe.Message]) -> Reply:
        self.played += 1
        if self.fail is not None and self.failures > 0 and self.played == 2:
            self.failures -= 1
            raise self.fail
        message = (
            calls(call("add", {"a": 3})) if self.played < self.turns else fe.Message(role="assistant", content="4")
        )
        start = 10 * self.played
        return Reply(message, list(range(start)), [1, 2, 3], [-0.5] * 3, [7] * 3)


class Delays:
    def __init__(self) -> None:
        self.slept: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.slept.append(seconds)


async def test_an_episode_is_recorded_turn_by_turn() -> None:
    trajectory = await run_episode(policy=Tokens(turns=3), **MAKE)
    assert (trajectory.id, trajectory.task_id, trajectory.environment) == ("train-3", "train-3", "arithmetic")
    assert (trajectory.reward, trajectory.terminated, trajectory.truncated, trajectory.valid) == (
        1.0,
        True,
        False,
        True,
    )
    assert [len(turn.reply.token_ids) for turn in trajectory.turns] == [3, 3, 3]
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 1.0]
    assert [message.content for message in trajectory.turns[1].observation] == ["4"]
    assert trajectory.metrics["turns"] == 3
    assert trajectory.oldest_version == 7


@pytest.mark.parametrize(
    ("limits", "name", "turns"),
    [
        (EpisodeLimits(max_tokens=6), "tokens", 2),
        (EpisodeLimits(max_turns=3), "turns", 3),
        (EpisodeLimits(), "turns", 8),
    ],
)
async def test_limits_truncate_and_what_there_is_is_scored(limits: EpisodeLimits, name: str, turns: int) -> None:
    trajectory = await run_episode(policy=Tokens(), limits=limits, **MAKE)
    assert (trajectory.terminated, trajectory.truncated, trajectory.truncation) == (False, True, name)
    assert len(trajectory.turns) == turns
    assert trajectory.valid
    assert "correct" in trajectory.metrics


@pytest.mark.parametrize(("cut", "truncation"), [(3, "reply_tokens"), (1, None)])
async def test_an_episode_whose_last_reply_was_cut_is_truncated_and_scored(cut: int, truncation: str | None) -> None:
    class Cut(Tokens):
        async def reply(self, observation: list[fe.Message]) -> Reply:
            reply = await super().reply(observation)
            reply.stop_reason = "length" if self.played == cut else "stop"
            return reply

    trajectory = await run_episode(policy=Cut(turns=3), **MAKE)
    ended = (trajectory.truncation, trajectory.truncated, trajectory.terminated)
    assert ended == (truncation, truncation is not None, truncation is None)
    assert (trajectory.reward, len(trajectory.turns), trajectory.cut_replies) == (1.0, 3, 1)


async def test_a_full_context_truncates() -> None:
    trajectory = await run_episode(policy=Tokens(fail=ContextLengthExceeded("full"), failures=1), **MAKE)
    assert (trajectory.truncation, len(trajectory.turns), trajectory.retries) == ("context", 1, 0)


def test_a_string_of_actions_is_refused() -> None:
    with pytest.raises(UsageError, match=r"are a string \(give a list of actions, one a turn\)"):
        ReplayPolicy("42")


async def test_prompts_that_were_spelled_anew_are_counted() -> None:
    class Anew(Tokens):
        async def reply(self, observation: list[fe.Message]) -> Reply:
            reply = await super().reply(observation)
            reply.forked = self.played == 2
            return reply

    assert (await run_episode(policy=Anew(turns=3), **MAKE)).metrics["fork/rendered_anew"] == 1.0
    assert "fork/rendered_anew" not in (await run_episode(policy=Tokens(turns=3), **MAKE)).metrics


async def test_wall_time_cancels_the_turn_and_scores() -> None:
    entered = asyncio.Event()

    async def never(messages: Any, tools: Any) -> str:
        entered.set()
        await asyncio.Event().wait()
        return ""

    env = Arithmetic()
    limits = EpisodeLimits(wall_s=0.001)
    trajectory = await run_episode(lambda: env, FunctionPolicy(never), seed=1, limits=limits)
    assert entered.is_set()
    assert (trajectory.truncation, trajectory.reward, trajectory.valid) == ("time", 0.0, True)
    assert env.log == ["setup", "cleanup"]


async def test_infrastructure_failure_is_retried_on_a_fresh_environment() -> None:
    made: list[Arithmetic] = []

    def make() -> Arithmetic:
        made.append(Arithmetic())
        return made[-1]

    delays = Delays()
    policy = Tokens(turns=3, fail=GeneratorError("died"), failures=2)
    trajectory = await run_episode(make, policy, seed=3, sleep=delays)
    assert (trajectory.valid, trajectory.retries, trajectory.reward, trajectory.error) == (True, 2, 1.0, None)
    assert len(trajectory.turns) == 3
    assert [env.log for env in made] == [["setup", "cleanup"]] * 3
    assert 0.25 <= delays.slept[0] <= 0.75
    assert 0.5 <= delays.slept[1] <= 1.5


async def test_a_cleanup_that_fails_after_a_failure_of_infrastructure_prevents_no_retry() -> None:
    class Server(Arithmetic):
        async def setup(self, task: fe.Task) -> None:
            raise InfrastructureError("no server")

        async def cleanup(self) -> None:
            raise AttributeError("server")

    trajectory = await run_episode(Server, Tokens(), seed=3, sleep=Delays(), retry=Retry(attempts=1))
    assert (trajectory.valid, trajectory.retries, trajectory.error) == (False, 1, "InfrastructureError: no server")


async def test_a_persistent_failure_is_invalid_and_never_a_zero_without_a_name() -> None:
    policy = Tokens(fail=GeneratorError("died"), failures=9)
    trajectory = await run_episode(policy=policy, sleep=Delays(), retry=Retry(attempts=1), **MAKE)
    assert (trajectory.valid, trajectory.retries, trajectory.error) == (False, 1, "GeneratorError: died")
    assert len(trajectory.turns) == 1  # what happened before is kept for the viewer


async def test_a_bug_is_raised_with_its_task_after_closing() -> None:
    env = Arithmetic()
    with pytest.raises(EnvironmentBugError, match="train-3"):
        await run_episode(lambda: env, ReplayPolicy([calls(call("broken"))]), seed=3)
    assert env.log == ["setup", "cleanup"]


async def test_cancellation_waits_for_close() -> None:
    closing, release, waiting = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Slow(Arithmetic):
        async def cleanup(self) -> None:
            closing.set()
            await release.wait()
            await super().cleanup()

    async def never(messages: Any, tools: Any) -> str:
        waiting.set()
        await asyncio.Event().wait()
        return ""

    env = Slow()
    episode = asyncio.ensure_future(run_episode(lambda: env, FunctionPolicy(never), seed=1))
    await waiting.wait()
    episode.cancel()
    await closing.wait()
    episode.cancel()
    await asyncio.sleep(0)
    assert not episode.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert env.log == ["setup", "cleanup"]


class Golden(Arithmetic):
    def task(self, split: str, index: int) -> fe.Task:
        return super().task(split, index).model_copy(update={"gold": str(index + 1)})


async def test_scripted_policies() -> None:
    assert (await run_episode(Golden, GoldPolicy(), seed=5)).reward == 1.0
    with pytest.raises(fe.UsageError, match="no gold"):
        await run_episode(Arithmetic, GoldPolicy(), seed=5)
    named = scripted_policy("tests.forge_env.rollout.test_episode:say_four")
    assert named is not None
    assert (await run_episode(Golden, named, seed=3)).reward == 1.0
    assert scripted_policy("qwen3") is None
    with pytest.raises(fe.UsageError, match="can't be imported"):
        scripted_policy("tests.nowhere:x")


def say_four(messages: list[fe.Message], tools: list[fe.ToolSpec]) -> str:
    return "4"


class Tame(Arithmetic):
    @fe.tool
    async def broken(self) -> None:
        """Fail no more."""

    @fe.tool
    async def lost(self) -> None:
        """Nothing is lost."""


async def test_the_random_policy_is_determined_by_its_seed_and_never_breaks_an_episode() -> None:
    for seed in range(100):
        one, two = [await run_episode(Tame, RandomPolicy(), seed=seed) for _ in range(2)]
        assert one.valid
        assert one.terminated != one.truncated
        assert [turn.message for turn in one.turns] == [turn.message for turn in two.turns]


async def test_trajectories_survive_the_disk(tmp_path: Any) -> None:
    trajectory = await run_episode(policy=Tokens(turns=3), **MAKE)
    trajectory.turns[0].message.content = "\u00e9 \U0001f40d \ud800 \n"
    path = tmp_path / "run" / "a.jsonl"
    with TrajectoryWriter(path) as writer:
        writer.write(trajectory)
        writer.write(trajectory)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])  # killed while writing
    assert list(read_trajectories(path)) == [trajectory]
    with TrajectoryWriter(path) as writer:
        writer.write(trajectory)
    assert path.read_bytes() == whole
    path.write_bytes(b"{}\n" + whole)
    with pytest.raises(fe.UsageError, match="line 1 is not a trajectory"):
        list(read_trajectories(path))
