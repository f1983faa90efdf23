"""Several seats in one episode: whose turn it is, what each is shown, earns and is trained on."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import forge_env as fe
from forge_env.environment.optional import demonstrate
from forge_env.errors import EnvironmentBugError, UsageError
from forge_env.policy import Policy, PolicySession, Reply
from forge_env.rollout.episode import EpisodeLimits, run_episode
from forge_env.rollout.scripted import FunctionPolicy
from forge_env.trajectory import SCHEMA, Trajectory
from forge_env.types import Message, Observation, ToolSpec

SEATS = ("red", "green", "blue")


class Round(fe.Environment):
    """Seats act in a given order, and are shown and paid what they are told to be."""

    def __init__(self, order: list[str], pay: list[dict[str, float]], *, seats: tuple[str, ...] = SEATS) -> None:
        super().__init__(fe.EnvironmentConfig(max_turns=1000))
        self.order, self.pay, self.seats = order, pay, seats
        self.heard: list[tuple[str, str]] = []

    def task(self, split: str, index: int) -> fe.Task:
        return fe.Task(id=f"{split}-{index}", prompt="Go.", split=split)

    @property
    def tools(self) -> list[ToolSpec]:
        return [ToolSpec(name=f"tool_of_{self.order[len(self.heard)]}")]

    def _next(self) -> tuple[list[Message], dict[str, Any]]:
        number = len(self.heard)
        if number == len(self.order):
            return [], {}
        seat = self.order[number]
        return [Message(role="user", content=f"{seat} {number}")], {"seat": seat}

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.heard = []
        return self._next()

    async def step(self, action: Any) -> Any:
        number = len(self.heard)
        seat = self.order[number]
        self.heard.append((seat, action.content))
        pay = self.pay[number]
        observation, info = self._next()
        if rewards := {other: value for other, value in pay.items() if other != seat}:
            info["rewards"] = rewards
        return observation, pay.get(seat, 0.0), not observation, False, info


class Counting(Policy):
    """Every token that it reads or says is another number, so that none can be mistaken for another."""

    def __init__(self) -> None:
        self.next = 0
        self.said: list[tuple[str, list[int]]] = []
        self.sessions: list[tuple[str, int | None]] = []

    def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
        self.sessions.append((tools[0].name, seed))
        return _Counting(self, tools[0].name.removeprefix("tool_of_"))

    def tokens(self, count: int) -> list[int]:
        self.next += count
        return list(range(self.next - count, self.next))


class _Counting(PolicySession):
    def __init__(self, owner: Counting, seat: str) -> None:
        self._owner, self._seat, self._length = owner, seat, 0

    async def reply(self, observation: Observation) -> Reply:
        assert all(message.content.split()[0] == self._seat for message in observation)
        owner = self._owner
        prompt, said = owner.tokens(2), owner.tokens(3)
        owner.said.append((self._seat, said))
        before, self._length = self._length, self._length + 5
        message = Message(role="assistant", content=f"{self._seat} says {said}")
        return Reply(message, prompt, said, [-0.5] * 3, [4] * 3, continues=before)


PAY = st.dictionaries(st.sampled_from(SEATS), st.integers(-4, 4).map(float), max_size=3)
ROUNDS = st.lists(st.tuples(st.sampled_from(SEATS), PAY), min_size=1, max_size=12)


@pytest.mark.asyncio(loop_scope="module")
@given(ROUNDS, st.sets(st.sampled_from(SEATS), max_size=2))
async def test_tokens_are_trained_at_their_seat(rounds: list[tuple[str, dict[str, float]]], others: set[str]) -> None:
    order, pay = [seat for seat, _ in rounds], [own for _, own in rounds]
    env, policy, opponent = Round(order, pay), Counting(), Counting()
    opponent.next = 1_000_000
    played = await run_episode(lambda: env, policy, seed=5, opponents=dict.fromkeys(others, opponent))
    assert [turn.seat for turn in played.turns] == order == [seat for seat, _ in env.heard]
    assert [turn.message.content for turn in played.turns] == [text for _, text in env.heard]
    earned = {seat: sum(own.get(seat, 0.0) for own in pay) for seat in SEATS}
    assert played.rewards == earned
    own = [seat for seat in SEATS if seat not in others]
    assert played.reward == pytest.approx(np.mean([earned[seat] for seat in own]))
    assert played.metrics == {f"reward_{seat}": reward for seat, reward in earned.items()}
    assert set(played.opponents) == others
    parts = played.by_seat()
    assert list(parts) == own
    for seat, part in parts.items():
        said = [token for name, tokens in policy.said if name == seat for token in tokens]
        segments = part.segments()
        assert len(segments) == bool(said)  # one sequence, whoever acted in between
        assert [int(token) for segment in segments for token in segment.token_ids[segment.mask]] == said
        assert part.reward == earned[seat]
        if seat in order:
            last = max(number for number, name in enumerate(order) if name == seat)
            late = sum(own.get(seat, 0.0) for own in pay[: order.index(seat)])  # before its first turn
            assert sum(turn.reward for turn in part.turns) == pytest.approx(earned[seat] - late)
            assert part.turns[-1] is played.turns[last]
    trained = [int(token) for segment in played.segments() for token in segment.token_ids[segment.mask]]
    assert sorted(trained) == sorted(token for _, tokens in policy.said for token in tokens)
    assert played.num_sampled_tokens == len(trained)
    assert Trajectory.from_dict(played.to_dict()).to_dict() == played.to_dict()
    seeds = [seed for _, seed in policy.sessions]
    assert len(set(seeds)) == len(seeds) == len(set(order) - others)


@pytest.mark.asyncio(loop_scope="module")
@given(st.lists(st.sampled_from(["", "sub-1", "sub-2"]), min_size=1, max_size=10))
async def test_conversations_without_a_reward_of_their_own_share_the_episodes(order: list[str]) -> None:
    pay: list[dict[str, float]] = [{seat: 1.0} for seat in order]
    policy = Counting()
    env = Round([seat or "main" for seat in order], [{}] * len(order), seats=())
    env.pay = [{seat or "main": 1.0} for seat in order]
    played = await run_episode(lambda: env, policy)
    assert played.reward == len(pay)
    assert played.rewards == {}
    (whole,) = played.by_seat().values()
    segments = whole.segments()
    assert len(segments) == len(set(order))
    in_turns = [int(token) for turn in whole.turns for token in turn.reply.token_ids]
    assert [int(token) for segment in segments for token in segment.token_ids[segment.mask]] == in_turns


async def test_an_episode_of_one_agent_is_as_it_was() -> None:
    played = await run_episode(lambda: fe.make("wordle"), FunctionPolicy(lambda messages, tools: "crane"), seed=1)
    assert played.by_seat() == {"": played}
    record = played.to_dict()
    assert record["schema"] == SCHEMA
    assert not {"rewards", "opponents"} & record.keys()
    assert all("seat" not in turn for turn in record["turns"])


async def test_what_a_limit_ends_is_scored_for_every_seat() -> None:
    class Scored(Round):
        async def truncate(self, reason: str) -> tuple[float, dict[str, float]]:
            return 0.5, {}

    env = Scored(["red", "green"] * 4, [{}] * 8, seats=("red", "green"))
    played = await run_episode(lambda: env, Counting(), limits=EpisodeLimits(max_turns=3))
    assert (played.truncation, len(played.turns)) == ("turns", 3)
    assert played.rewards == {"red": 0.5, "green": 0.5}


async def test_what_a_group_adds_is_added_to_every_seat() -> None:
    played = await run_episode(lambda: Round(["red", "green"], [{"red": 2.0}, {}]), Counting())
    played.reward += 0.25
    assert {seat: part.reward for seat, part in played.by_seat().items()} == {"red": 2.25, "green": 0.25, "blue": 0.25}


@pytest.mark.parametrize(
    ("opponents", "said"),
    [
        ({"rde": Counting()}, "has no seat 'rde' (did you mean 'red'?)"),
        (dict.fromkeys(SEATS, Counting()), "every seat of Round has an opponent"),
    ],
)
async def test_opponents_that_cannot_be(opponents: dict[str, Policy], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        await run_episode(lambda: Round(["red"], [{}]), Counting(), opponents=opponents)
    assert said.partition(" (")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({}, "Stray.step returned the seat"),
        ({"seat": "purple"}, "'purple'"),
        ({"seat": "red", "rewards": {"purple": 1.0}}, "as info['rewards']"),
        ({"seat": "red", "rewards": {"green": float("nan")}}, "as info['rewards']"),
    ],
)
async def test_a_turn_that_is_nobodys_is_a_bug(info: dict[str, Any], said: str) -> None:
    class Stray(Round):
        async def step(self, action: Any) -> Any:
            return [], 0.0, False, False, info

    with pytest.raises(EnvironmentBugError) as caught:
        await run_episode(lambda: Stray(["red"], [{}]), Counting())
    assert said in str(caught.value)


def test_a_demonstration_is_the_conversation_of_one_seat() -> None:
    class Taught(Round):
        def gold_actions(self, task: fe.Task) -> list[Any]:
            return ["a", "b", "c"]

    class Bare(Taught):  # made again by `demonstrate`, from its options alone
        def __init__(self, config: Any = None, **context: Any) -> None:
            super().__init__(["red", "green", "red"], [{}] * 3)

    seen = set()
    for number in range(8):
        env = Bare()
        shown = demonstrate(env, env.task("train", 0), random.Random(number))
        assert shown is not None
        seen.add(tuple(message.content for message in shown))
    assert seen == {("red 0", "a", "red 2", "c"), ("green 1", "b")}


def test_seats_stand_in_what_is_written() -> None:
    played = asyncio.run(
        run_episode(
            lambda: Round(["red", "green"], [{"green": 1.0}, {}]),
            Counting(),
            opponents={"green": FunctionPolicy(lambda messages, tools: "pass")},
        )
    )
    record = played.to_dict()
    assert record["schema"] == SCHEMA
    assert record["rewards"] == {"red": 0.0, "green": 1.0, "blue": 0.0}
    assert record["opponents"] == {"green": "FunctionPolicy"}
    assert [turn["seat"] for turn in record["turns"]] == ["red", "green"]
    assert "tokens" not in record["turns"][1]
