"""Counterfactual advantages: what they give, that they are unbiased, and what their continuations cost."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="NOT RUN: the training stack is not installed")

import forge_env as fe
from forge_env.config import load_config
from forge_env.config.recipe import PartSection
from forge_env.errors import UsageError
from forge_env.policy import Policy, PolicySession, Reply
from forge_env.types import Message, Task, ToolSpec
from tests.trainers.algorithms.test_parts import episode
from tests.trainers.rollout.test_rollouts import Make, made
from trainers.algorithms.counterfactual import Counterfactual
from trainers.algorithms.grpo import GRPO
from trainers.algorithms.parts import LeaveOneOut, make_advantage, token_advantages
from trainers.rollout.player import Player
from trainers.rollout.types import LATE, Cut, Group

__all__ = ["made"]


def group_of(*rewards: float, turns: int = 4) -> Group:
    return Group([episode(reward, (1,) * turns) for reward in rewards])


def test_without_continuations_it_leaves_one_out() -> None:
    group = group_of(1.0, 0.0, 0.5)
    for one, other in zip(Counterfactual()(group), LeaveOneOut()(group), strict=True):
        assert one == pytest.approx([other] * 4)
    assert Counterfactual()(group_of(1.0)) == [0.0]


def test_a_continuation_divides_the_credit() -> None:
    group = group_of(1.0, 0.0, 0.0)
    group.continued = {(0, 2): [1.0, 1.0, 1.0], (1, 1): [0.0], (1, 3): [1.0]}
    good, bad, other = Counterfactual()(group)
    assert good == pytest.approx([1.0, 1.0, 0.25, 0.25])  # all is decided after two turns
    assert bad == pytest.approx([-0.5, 0.5 - 0.25, 0.5 - 0.25, -0.75])  # the last turn lost it
    assert other == [-0.5] * 4
    tokens = token_advantages(Counterfactual(), group)
    assert tokens[1].tolist() == pytest.approx([-0.5, 0.25, 0.25, -0.75])


@pytest.mark.parametrize(
    ("rewards", "cuts"),
    [
        ([0.0] * 8, []),
        ([1.0] + [0.0] * 7, [Cut(index, 2, 1) for index in range(1, 8)]),  # the first one's others don't differ
        ([1.0] * 4 + [0.0] * 4, [Cut(index, 2, 2) for index in range(8)]),
        ([1.0, 0.0], []),
    ],
)
def test_continuations_are_spent_where_the_rewards_differ(rewards: list[float], cuts: list[Cut]) -> None:
    assert Counterfactual(budget=16, each=2).cuts(group_of(*rewards)) == cuts


def test_a_larger_budget_has_more_turns() -> None:
    cuts = Counterfactual(budget=24, each=1).cuts(group_of(*[1.0, 0.0] * 4))
    assert [cut.turn for cut in cuts if cut.episode == 0] == [1, 2, 3]
    short = Group([*group_of(*[1.0, 0.0] * 4).episodes, episode(0.0, (1,))])
    assert not [cut for cut in Counterfactual().cuts(short) if cut.episode == 8]


def test_a_short_episode_has_one_cut_for_each_turn() -> None:
    assert Counterfactual().cuts(group_of(1.0, 0.0, 1.0, turns=2)) == [Cut(0, 1, 4), Cut(2, 1, 4)]


def test_late_episodes_are_not_continued() -> None:
    group = group_of(1.0, 0.0, 1.0, 0.0)
    group.episodes[1].truncation = LATE
    assert {cut.episode for cut in Counterfactual().cuts(group)} == {0, 2, 3}


def test_options_are_checked() -> None:
    assert isinstance(make_advantage(PartSection(name="counterfactual", options={"budget": 4})), Counterfactual)
    with pytest.raises(UsageError, match="budget=0 and each=2 must be 1 or more"):
        make_advantage(PartSection(name="counterfactual", options={"budget": 0}))


Play = tuple[float, tuple[bool, ...], float]
"""Reward, choices and probability of an episode."""
GO = (0.3, 0.6)
"""Probability of choosing 1 at each of two turns. Choosing 1 at the first turn ends the episode with 0.4."""


def reward_of(choices: tuple[bool, ...]) -> float:
    return 0.4 if len(choices) == 1 else {(False, False): 0.0, (False, True): 1.0}[choices[0], choices[1]]


def plays() -> list[Play]:
    every = [(True,), (False, False), (False, True)]
    chances = [float(np.prod([GO[i] if c else 1 - GO[i] for i, c in enumerate(one)])) for one in every]
    return [(reward_of(one), one, chance) for one, chance in zip(every, chances, strict=True)]


def gradient(choices: tuple[bool, ...], advantages: Any) -> np.ndarray[Any, Any]:
    """Of the logits of both turns."""
    score = np.zeros(2)
    for turn, (choice, advantage) in enumerate(zip(choices, advantages, strict=True)):
        score[turn] += advantage * ((1 - GO[turn]) if choice else -GO[turn])
    return score


def test_the_gradient_is_exact() -> None:
    """Over all groups of three and all continuations; cuts that depend on their own episode would show."""
    exact = sum(chance * reward * gradient(choices, [1.0] * len(choices)) for reward, choices, chance in plays())
    total, estimator, cut = np.zeros(2), Counterfactual(budget=3, each=1), 0
    for members in itertools.product(plays(), repeat=3):
        group = Group([episode(reward, (1,) * len(choices)) for reward, choices, _ in members])
        cuts = estimator.cuts(group)
        cut += len(cuts)
        for ends in itertools.product((False, True), repeat=len(cuts)):
            group.continued = {
                (c.episode, c.turn): [reward_of((False, end))] for c, end in zip(cuts, ends, strict=True)
            }
            chance = np.prod([member[2] for member in members]) * np.prod([GO[1] if end else 1 - GO[1] for end in ends])
            weights = zip(members, estimator(group), strict=True)
            total += chance * sum(gradient(choices, advantages) for (_, choices, _), advantages in weights) / 3
    assert cut > 0
    np.testing.assert_allclose(total, exact, atol=1e-12)


class Steps(fe.ToolEnvironment):
    """Three numbers; their sum is the reward, as a share of the largest."""

    api_version = 1

    def __init__(self, *args: Any, **context: Any) -> None:
        self.rubric = fe.Rubric(total)
        super().__init__(*args, **context)

    def num_tasks(self, split: str) -> int:
        return 20

    def task(self, split: str, index: int) -> Task:
        return Task(id=f"{split}-{index}", prompt="Three numbers.", split=split)

    async def setup(self, task: Task) -> None:
        self.given: list[int] = []

    def is_final(self, message: Message) -> bool:
        return False

    async def respond(self, message: Message) -> list[Message]:
        self.given.append(int(message.content))
        if len(self.given) == 3:
            self.submit("done")
        return [Message(role="user", content=self.word())]

    def word(self) -> str:
        return f"{len(self.given)} of 3"


async def total(env: Steps, task: Task) -> float:
    return sum(env.given) / 3


class Unsteady(Steps):
    """Answers differently each time."""

    count = itertools.count()

    def word(self) -> str:
        return str(next(self.count))


class Compared(Steps):
    """Scores groups."""

    async def score_group(self, task: Task, trajectories: Any) -> None:
        """Nothing."""


class Coins(Policy):
    """Says 0 or 1 by seed, with one token, and counts the replies."""

    def __init__(self) -> None:
        self.replies = 0

    def session(self, tools: list[ToolSpec], *, seed: int | None = None) -> PolicySession:
        return _Coin(self, np.random.default_rng(seed))


class _Coin(PolicySession):
    def __init__(self, owner: Coins, rng: np.random.Generator) -> None:
        self.owner, self.rng, self.heard = owner, rng, 0

    async def reply(self, observation: list[Message]) -> Reply:
        self.owner.replies += 1
        self.heard += len(observation)
        content = str(self.rng.integers(0, 2))
        assert content in "01"
        message = Message(role="assistant", content=content)
        tokens: dict[str, Any] = {"prompt_ids": [1] * self.heard, "token_ids": [2], "logprobs": [-1.0], "versions": [0]}
        return Reply(message, **tokens)


async def test_a_worker_continues_a_group_and_counts_the_tokens(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[Group] = []
    original = Player.continue_group

    async def watched(self: Player, group: Group, *rest: Any) -> None:
        await original(self, group, *rest)
        groups.append(group)

    monkeypatch.setattr(Player, "continue_group", watched)
    section = {"advantage": {"name": "counterfactual", "options": {"budget": 8, "each": 1}}}
    policy = Coins()
    played = await made(Steps, policy=policy, grpo=section)
    reports = [await played.group(position) for position in range(3)]
    recorded = await played.close()
    assert len(recorded) == 12
    assert groups
    for group in groups:
        for (index, turn), rewards in group.continued.items():
            before = sum(int(step.message.content) for step in group.valid[index].turns[:turn])
            assert all(before / 3 <= reward <= (before + 3 - turn) / 3 for reward in rewards)
    continued = sum(report.totals.tokens_continued for report in reports)
    assert continued == sum((3 - turn) * len(each) for group in groups for (_, turn), each in group.continued.items())
    assert sum(report.totals.tokens_generated for report in reports) == 12 * 3 + continued == policy.replies


def player(make: type[fe.Environment]) -> tuple[Player, list[str]]:
    warnings: list[str] = []
    return Player(load_config("coding_rlvr", ["grpo.group_size=4"]), make, warn=warnings.append), warnings


async def test_continuations_that_differ_do_not_count() -> None:
    plays, warnings = player(Unsteady)
    group = await plays.group(0, 0, Coins())
    await plays.continue_group(group, 0, [Cut(0, 1, 3), Cut(1, 2, 1)], Coins())
    assert group.continued == {}
    assert len(warnings) == 1
    assert "the environment answers differently" in warnings[0]


async def test_continuations_of_equal_cuts_have_seeds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    original = Player._episode

    async def named(self: Player, task: Task, place: tuple[int, int], name: str, *rest: Any, **more: Any) -> Any:
        names.append(name)
        return await original(self, task, place, name, *rest, **more)

    plays, _ = player(Steps)
    group = await plays.group(0, 0, Coins())
    monkeypatch.setattr(Player, "_episode", named)
    await plays.continue_group(group, 0, [Cut(0, 1, 2), Cut(0, 1, 2)], Coins())
    assert sorted(names) == [f"train-0-0+1.{number}" for number in range(4)]


def test_environments_that_score_groups_are_refused_early() -> None:
    def check(env: str, advantage: str) -> None:
        GRPO.check(
            load_config("coding_rlvr", [f"environment.name={__name__}:{env}", f"grpo.advantage.name={advantage}"])
        )

    check("Steps", "counterfactual")
    check("Compared", "leave_one_out")
    with pytest.raises(UsageError, match="scores groups"):
        check("Compared", "counterfactual")
