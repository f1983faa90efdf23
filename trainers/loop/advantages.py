"""From the rewards of a group to advantages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forge_env.trajectory import Trajectory
from trainers.buffer.packed import PackedGroup, pack


@dataclass(slots=True)
class Group:
    """Episodes of one task. Only valid ones count; `advantages` belongs to them, in order."""

    episodes: list[Trajectory]

    @property
    def valid(self) -> list[Trajectory]:
        """Episodes that infrastructure did not spoil and that sampled anything."""
        return [episode for episode in self.episodes if episode.valid and episode.num_sampled_tokens]

    @property
    def mean_reward(self) -> float:
        """The baseline."""
        rewards = [episode.reward for episode in self.valid]
        return sum(rewards) / len(rewards) if rewards else 0.0


def advantages(rewards: list[float], *, normalize_std: bool) -> list[float]:
    """Reward minus the group's mean (Dr. GRPO, arXiv 2503.20783), over its deviation on request (GRPO)."""
    mean = sum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize_std:
        return centred
    deviation = (sum(value * value for value in centred) / len(centred)) ** 0.5
    return [value / (deviation + 1e-4) for value in centred]


def packed(group: Group, *, normalize_std: bool) -> PackedGroup:
    """The group's valid episodes with their advantages, as the replay buffer holds them."""
    episodes = group.valid
    values = advantages([episode.reward for episode in episodes], normalize_std=normalize_std)
    return pack(
        episodes,
        [
            np.full(episode.num_sampled_tokens, value, np.float32)
            for episode, value in zip(episodes, values, strict=True)
        ],
    )
