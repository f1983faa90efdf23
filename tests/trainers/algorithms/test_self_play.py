"""Self-play through the trainer's own data path, with a table in the place of the model: it learns the strategy."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

import forge_env as fe
from environments.nim import Perfect
from environments.nim.game import read_state, said
from forge_env.config import RunConfig
from forge_env.config.reader import Source, build
from forge_env.policy import Policy, PolicySession, Reply
from forge_env.rollout.episode import run_episode
from forge_env.types import Message, Observation, ToolSpec
from trainers.algorithms.grpo import Weighing
from trainers.rollout.types import Group

LARGEST, MOST = 15, 3
STEPS, TASKS, EPISODES, RATE = 25, 5, 12, 3.0


class Table(Policy):
    """How likely each number of sticks is taken from each pile; a token is both."""

    def __init__(self) -> None:
        self.logits = np.zeros((LARGEST + 1, MOST + 1))
        self.logits[:, 0] = -np.inf
        for sticks in range(1, MOST):
            self.logits[sticks, sticks + 1 :] = -np.inf

    def chances(self, sticks: int) -> NDArray[np.float64]:
        likely = np.exp(self.logits[sticks] - self.logits[sticks].max())
        chances: NDArray[np.float64] = likely / likely.sum()
        return chances

    def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
        return _Player(self, Random(seed))

    def learn(self, token: int, advantage: float) -> None:
        """A step up the gradient of the log-probability."""
        sticks, taken = divmod(token, MOST + 1)
        step = -self.chances(sticks)
        step[taken] += 1.0
        self.logits[sticks] += RATE * advantage * step / EPISODES


class _Player(PolicySession):
    def __init__(self, table: Table, rng: Random) -> None:
        self._table, self._rng = table, rng
        self._shown: list[str] = []
        self._length = 0

    async def reply(self, observation: Observation) -> Reply:
        self._shown += [message.content for message in observation]
        (sticks,), _ = read_state(self._shown)
        chances = self._table.chances(sticks)
        taken = self._rng.choices(range(MOST + 1), chances)[0]
        before, self._length = self._length, self._length + 2
        token = sticks * (MOST + 1) + taken
        message = Message(role="assistant", content=said((0, taken)))
        return Reply(message, [0], [token], [float(np.log(chances[taken]))], [0], continues=before)


async def score(table: Table) -> float:
    """Of the seat that can force a win, against a perfect player."""
    env = fe.make("nim", levels=[1])
    played = [
        await run_episode(lambda: env, table, task=env.task("eval", index), seed=index, opponents={"second": Perfect()})
        for index in range(50)
    ]
    return sum(episode.reward for episode in played) / len(played)


@pytest.mark.slow
async def test_a_table_learns_the_strategy_by_playing_against_itself() -> None:
    async def nobody(segments: object) -> list[NDArray[np.float32]]:
        raise AssertionError("there is no reference model")

    weigh = Weighing(build(RunConfig, Source("", {"environment": {"name": "nim"}})), nobody)
    table, env = Table(), fe.make("nim", levels=[1])
    before = await score(table)
    for step in range(STEPS):
        batch = []
        for number in range(step * TASKS, (step + 1) * TASKS):
            task = env.task("train", number)
            group = [
                await run_episode(lambda: env, table, task=task, seed=number * EPISODES + member)
                for member in range(EPISODES)
            ]
            packed = await weigh(Group(group))
            batch += packed.segments()
        for segment in batch:
            for token, advantage in zip(segment.token_ids[segment.mask], segment.advantages[segment.mask], strict=True):
                table.learn(int(token), float(advantage))
    after = await score(table)
    assert before < 0.2
    assert after > 0.9, (before, after)
    assert [int(np.argmax(table.logits[sticks])) for sticks in (1, 2, 3, 5, 6, 7)] == [1, 2, 3, 1, 2, 3]
