"""Advantages by counterfactual: parts of an episode are compared with other continuations of the same episode.

Some episodes of a group are played again up to a turn, and the policy goes on from there (`forge_env.credit`). With the
rewards c of m such continuations from turn b, own reward r, and the mean v of the other episodes' rewards, the turns
have the advantages

    before b     (sum(c) + r) / (m + 1) - v         did the episode get to a good state?
    from b on    r - (sum(c) + v) / (m + 1)         was this better than other ways from there?

Without continuations both are r - v (`leave_one_out`). The gradient is unbiased: whether and where an episode is
continued depends on the other episodes only, and continuations from turn b don't depend on what was done there. This
assumes that no episode is cut at the group's deadline (`grpo.on_timeout=zero`): those are never continued.
VinePPO (arXiv 2410.01679) continues from every step, without a group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from forge_env.trajectory import Trajectory
from trainers.algorithms.parts import AdvantageEstimator, Weight
from trainers.rollout.types import LATE, Cut, Group


class Counterfactual(AdvantageEstimator):
    """Credit for parts of episodes, by continuations that are spent where the rewards of the group differ.

    Args:
        budget: number of continuations of a group whose rewards differ as much as possible (half of them 0, half 1).
            Groups with less variance get fewer, in proportion; those with equal rewards get none.
        each: number of continuations from one turn; an episode with more has several such turns, if it is long enough.
    """

    def __init__(self, budget: int = 16, each: int = 2) -> None:
        if budget < 1 or each < 1:
            raise ValueError(f"budget={budget} and each={each} must be 1 or more")
        self.budget, self.each = budget, each

    def cuts(self, group: Group) -> list[Cut]:
        """The turns of the group's episodes to continue from."""
        episodes = group.valid
        if len(episodes) < 3 or any(turn.seat for episode in episodes for turn in episode.turns):
            return []
        rewards, lengths = group.rewards, np.array([len(episode.turns) for episode in episodes])
        numbers: Counter[tuple[int, int]] = Counter()  # several shares fall on one turn of a short episode
        for index, episode in enumerate(episodes):
            others = np.arange(len(episodes)) != index
            span = float(np.ptp(rewards[others]))
            if span <= 1e-8 or episode.truncation == LATE:
                continue
            share = 4.0 * float(rewards[others].var()) / span**2
            number = round(self.budget * share / len(episodes))
            turns = math.ceil(number / self.each)
            for k in range(turns):
                turn = math.ceil(lengths[others].mean() * (k + 1) / (turns + 1))
                if 0 < turn < len(episode.turns):
                    numbers[index, turn] += number // turns + (k < number % turns)
        return [Cut(index, turn, number) for (index, turn), number in numbers.items()]

    def __call__(self, group: Group) -> Sequence[Weight]:
        """One advantage per turn."""
        rewards = group.rewards
        total = float(rewards.sum())
        if len(rewards) < 2:
            return [0.0] * len(rewards)
        result: list[Weight] = []
        for index, episode in enumerate(group.valid):
            mean = (total - episode.reward) / (len(rewards) - 1)
            result.append(self._advantages(episode, mean, group.continued_from(index)))
        return result

    def _advantages(self, episode: Trajectory, mean: float, continued: dict[int, list[float]]) -> list[float]:
        """Advantages of an episode's turns, given the others' mean reward, and rewards of continuations by turn."""
        reward, baseline, start = episode.reward, mean, 0
        advantages: list[float] = []
        for turn, rewards in sorted(continued.items()):
            value, count = math.fsum(rewards), len(rewards) + 1
            advantages += [(value + reward) / count - baseline] * (turn - start)
            baseline, start = (value + mean) / count, turn
        return advantages + [reward - baseline] * (len(episode.turns) - start)
