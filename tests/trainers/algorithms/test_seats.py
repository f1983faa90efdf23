"""Each trained seat is a sequence of its own, compared with the same seat of the same task."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_env.config import RunConfig
from forge_env.config.reader import Source, build
from forge_env.errors import UsageError
from forge_env.policy import Reply
from forge_env.trajectory import Trajectory, Turn
from forge_env.types import Message
from trainers.algorithms.grpo import Weighing
from trainers.buffer.packed import pack
from trainers.rollout.types import Group

SEATS = ("first", "second")
EPISODE = st.tuples(st.integers(1, 7), st.sampled_from([(1.0, 0.0), (0.0, 1.0)]))
"""Turns, and what the seats earned."""


def episodes(drawn: list[tuple[int, tuple[float, float]]], *, opponents: tuple[str, ...] = ()) -> list[Trajectory]:
    """Turns in alternation; a token says which episode, seat and turn it is of."""
    made = []
    for number, (count, rewards) in enumerate(drawn):
        turns = []
        for turn in range(count):
            seat, name = turn % 2, SEATS[turn % 2]
            token = 1000 * number + 100 * seat + turn
            reply = Reply(Message(role="assistant"))
            if name not in opponents:
                reply = Reply(reply.message, [9999], [token], [-0.1], [0], continues=2 * (turn // 2))
            turns.append(Turn([], reply, seat=name))
        scores = dict(zip(SEATS, rewards, strict=True))
        episode = Trajectory(f"e{number}", "nim", "t", turns=turns, rewards=scores)
        episode.opponents = dict.fromkeys(opponents, "other")
        own = [reward for seat, reward in scores.items() if seat not in opponents]
        episode.reward = sum(own) / len(own)
        made.append(episode)
    return made


def weighing(**grpo: object) -> Weighing:
    async def score(segments: object) -> list[object]:
        raise AssertionError("there is no reference model")

    config = build(RunConfig, Source("", {"environment": {"name": "nim"}, "grpo": grpo}))
    return Weighing(config, score)


@pytest.mark.asyncio(loop_scope="module")
@given(st.lists(EPISODE, min_size=2, max_size=6))
async def test_advantages_are_within_the_seat(drawn: list[tuple[int, tuple[float, float]]]) -> None:
    group = Group(episodes(drawn))
    packed = await weighing()(group)
    found = {
        int(token): float(advantage)
        for segment in packed.segments()
        for token, advantage in zip(segment.token_ids[segment.mask], segment.advantages[segment.mask], strict=True)
    }
    assert len(found) == sum(count for count, _ in drawn) == packed.num_tokens
    for seat in (0, 1):
        acted = [number for number, (count, _) in enumerate(drawn) if count > seat]
        if not acted:
            continue
        mean = np.mean([drawn[number][1][seat] for number in acted])
        for token, advantage in found.items():
            if token % 1000 // 100 == seat:
                assert advantage == pytest.approx(drawn[token // 1000][1][seat] - mean, abs=1e-6)
    lengths = [len(segment) for segment in packed.segments()]
    assert sum(lengths) == 2 * packed.num_tokens  # a seat's tokens are one sequence: what it read, and what it said


async def test_an_opponents_turns_are_not_trained() -> None:
    group = Group(episodes([(4, (1.0, 0.0)), (5, (0.0, 1.0))], opponents=("second",)))
    packed = await weighing()(group)
    tokens = [int(token) for segment in packed.segments() for token in segment.token_ids[segment.mask]]
    assert tokens == [0, 2, 1000, 1002, 1004]


async def test_a_filter_sees_each_seat_although_the_whole_is_always_even() -> None:
    keeps = weighing(filter={"name": "with_signal"})
    assert await keeps(Group(episodes([(3, (1.0, 0.0)), (3, (1.0, 0.0))]))) is None
    packed = await keeps(Group(episodes([(3, (1.0, 0.0)), (3, (0.0, 1.0))])))
    assert packed.record.table.shape[0] == 4


def test_mixed_turns_are_refused() -> None:
    mixed = episodes([(3, (1.0, 0.0))])
    with pytest.raises(UsageError, match="mixes turns of several seats"):
        pack(mixed, [np.zeros(3, np.float32)])
