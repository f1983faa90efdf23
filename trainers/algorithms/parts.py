"""Exchangeable parts of an algorithm: advantage estimators, group filters and masks of learned tokens.

Each part is a class whose constructor takes its options. The recipe names it, or has `module:Class`:

    grpo.advantage   entry points `forge_env.advantages`      group -> advantages
    grpo.filter      entry points `forge_env.group_filters`   group -> whether it is trained on
    grpo.mask        entry points `forge_env.masks`           episode -> which sampled tokens are learned

docs/algorithms.md has an example of each. The order of tasks is `tasks.order` (`forge_env.tasks.order`), the loss is
`grpo.loss` (`trainers.losses`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from forge_env.config.reader import make_plugin
from forge_env.config.recipe import PartSection
from forge_env.errors import PluginError
from forge_env.trajectory import Trajectory
from trainers.rollout.types import Cut, Group

Weight = float | Sequence[float] | NDArray[np.float32]
"""Weight of one episode: a number, one number per turn, or one per sampled token in the order of the turns."""


# --- advantages


class AdvantageEstimator:
    """Base class of advantage estimators, which compute advantages from the rewards of a group."""

    def __call__(self, group: Group) -> Sequence[Weight]:
        """Advantages of each episode in `group.valid`, in order: for the episode, for each turn, or for each token."""
        raise NotImplementedError

    def cuts(self, group: Group) -> Sequence[Cut]:
        """Turns from which episodes of the group are continued; `Group.continued` then has the rewards."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """State carried from group to group, as JSON; empty by default."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""


class GroupMean(AdvantageEstimator):
    """A_i = r_i - mean(r): Dr. GRPO (arXiv 2503.20783), without the bias towards tasks whose rewards vary little."""

    def __call__(self, group: Group) -> Sequence[Weight]:
        """One advantage per episode."""
        return list(group.rewards - group.rewards.mean())


class GroupNormalized(AdvantageEstimator):
    """A_i = (r_i - mean(r)) / (std(r) + epsilon): GRPO (arXiv 2402.03300)."""

    def __init__(self, epsilon: float = 1e-4) -> None:
        if epsilon <= 0:
            raise ValueError(f"epsilon={epsilon} must be above 0")
        self.epsilon = epsilon

    def __call__(self, group: Group) -> Sequence[Weight]:
        """One advantage per episode."""
        rewards = group.rewards
        return list((rewards - rewards.mean()) / (rewards.std() + self.epsilon))


class LeaveOneOut(AdvantageEstimator):
    """A_i = r_i - mean of the other rewards: RLOO (arXiv 2402.14740), unbiased. 0 in a group of one episode."""

    def __call__(self, group: Group) -> Sequence[Weight]:
        """One advantage per episode."""
        rewards = group.rewards
        return list((rewards - rewards.mean()) * (len(rewards) / max(len(rewards) - 1, 1)))


class ReinforcePlusPlus(AdvantageEstimator):
    """A_i = (r_i - mean(r)) / std over many groups: REINFORCE++ with a group baseline (arXiv 2501.03262).

    The paper normalises over the batch. Here groups arrive one by one, so the variance is a weighted mean over previous
    groups, in which the weight halves every `half_life` groups.
    """

    def __init__(self, half_life: float = 100.0, epsilon: float = 1e-4) -> None:
        if half_life <= 0 or epsilon <= 0:
            raise ValueError(f"half_life={half_life} and epsilon={epsilon} must be above 0")
        self.epsilon = epsilon
        self._decay = 0.5 ** (1.0 / half_life)
        self._sum = self._weight = 0.0

    def __call__(self, group: Group) -> Sequence[Weight]:
        """One advantage per episode."""
        centred = group.rewards - group.rewards.mean()
        self._sum = self._sum * self._decay + float((centred**2).mean())
        self._weight = self._weight * self._decay + 1.0
        return list(centred / ((self._sum / self._weight) ** 0.5 + self.epsilon))

    def state_dict(self) -> dict[str, Any]:
        """The running variance."""
        return {"sum": self._sum, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the running variance."""
        self._sum, self._weight = float(state.get("sum", 0.0)), float(state.get("weight", 0.0))


class TurnReturns(AdvantageEstimator):
    """A_{i,t} = G_{i,t} - mean of G_{j,t} over others j, G_t = r_t + gamma G_{t+1}: credit by turn, without a critic.

    `Turn.reward` is the reward of each step of the environment; the rest of the episode's reward (a rubric's score,
    what `score_group` added) counts for its last turn. The mean is over the other episodes that have a turn t; if there
    are none, it is the mean of the others' whole returns. In a group of one, advantages are 0.

    An episode's own return is excluded from its baseline: at a late turn that few episodes reach, it would be a large
    part of the mean and shrink the gradient, by 31 % in groups of 4 (docs/algorithms.md). With gamma 1 the
    gradient is unbiased.
    """

    def __init__(self, gamma: float = 1.0) -> None:
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"gamma={gamma} is not within [0, 1]")
        self.gamma = gamma

    def __call__(self, group: Group) -> Sequence[Weight]:
        """One advantage per turn."""
        returns = [self._returns(episode) for episode in group.valid]
        if len(returns) == 1:
            return [[0.0] * len(group.valid[0].turns)]
        return [
            [each[turn] - self._baseline(returns[:i] + returns[i + 1 :], turn) for turn in range(len(episode.turns))]
            for i, (each, episode) in enumerate(zip(returns, group.valid, strict=True))
        ]

    def _baseline(self, others: Sequence[Sequence[float]], turn: int) -> float:
        """Mean return of the other episodes at a turn."""
        at_turn = [episode[turn] for episode in others if len(episode) > turn]
        return float(np.mean(at_turn or [episode[0] for episode in others]))

    def _returns(self, episode: Trajectory) -> list[float]:
        rewards = [turn.reward for turn in episode.turns] or [0.0]  # no turns if the episode was late in its first turn
        rewards[-1] += episode.reward - sum(rewards)
        total, result = 0.0, []
        for reward in reversed(rewards):
            total = reward + self.gamma * total
            result.append(total)
        return result[::-1]


class ByConversation(AdvantageEstimator):
    """A_{i,c} = r_{i,c} - mean over the group of mean over c of r_{i,c}: credit by conversation of an episode.

    r_{i,c} is the reward that the environment assigns to conversation c (`credits`), or else the episode's
    reward. Without any such rewards this is `GroupMean`. Each episode has the same weight in the mean, however many
    conversations it has.
    """

    def __call__(self, group: Group) -> Sequence[Weight]:
        """One advantage per turn."""
        earned = [self._earned(episode) for episode in group.valid]
        mean = float(np.mean([np.mean(list(each.values()) or [0.0]) for each in earned]))  # without turns: 0
        return [
            [each[turn.seat] - mean for turn in episode.turns]
            for each, episode in zip(earned, group.valid, strict=True)
        ]

    def _earned(self, episode: Trajectory) -> dict[str, float]:
        credits = episode.info.get("credits", {})
        return {turn.seat: credits.get(turn.seat, episode.reward) for turn in episode.turns}


def token_advantages(estimator: AdvantageEstimator, group: Group) -> list[NDArray[np.float32]]:
    """Expand the estimator's weights to the sampled tokens of each valid episode, float32 [sampled] each.

    Raises:
        PluginError: the number of weights is not that of the episodes, turns or tokens, or a weight is not finite.
    """
    name, episodes = type(estimator).__name__, group.valid
    weights = list(estimator(group))
    if len(weights) != len(episodes):
        raise PluginError(f"grpo.advantage: {name} returned {len(weights)} weights for {len(episodes)} episodes")
    result = []
    for weight, episode in zip(weights, episodes, strict=True):
        spread = over_tokens(np.asarray(weight, np.float32), episode, f"grpo.advantage: {name}")
        if not np.isfinite(spread).all():
            raise PluginError(
                f"grpo.advantage: {name} returned a weight that is not finite on task {episode.task_id!r}"
            )
        result.append(spread)
    return result


def over_tokens(values: NDArray[Any], episode: Trajectory, whose: str) -> NDArray[Any]:
    """Expand values to one per sampled token of an episode, given one value, one per turn, or one per token."""
    counts = [len(turn.reply.token_ids) for turn in episode.turns]
    total = sum(counts)
    if values.ndim == 0:
        return np.full(total, values)
    if values.shape == (total,):
        return values
    if values.shape == (len(counts),):
        return np.repeat(values, counts)
    raise PluginError(
        f"{whose} returned {len(values)} values for an episode of {len(counts)} turns and {total} sampled tokens",
        fix="give one number, one for each turn, or one for each sampled token",
    )


# --- masks of learned tokens


class Mask(Protocol):
    """Selection of the sampled tokens to learn. Others stay context, and the reward stays in the group's baseline."""

    def __call__(self, episode: Trajectory) -> bool | Sequence[bool]:
        """Whether the episode, each turn, or each sampled token is learned."""


class LearnAll:
    """Learns all sampled tokens."""

    def __call__(self, episode: Trajectory) -> bool:
        """True."""
        return True


class MaskTruncated:
    """Doesn't learn from truncated episodes: a limit ended them, so their reward says little about their tokens.

    Args:
        limits: which limits ("reply_tokens", "context", "turns", "time", ...); empty: any.
            `["reply_tokens", "context"]` is the overlong filter of DAPO (arXiv 2503.14476).
    """

    def __init__(self, limits: Sequence[str] = ()) -> None:
        self.limits = frozenset(limits)

    def __call__(self, episode: Trajectory) -> bool:
        """True unless the episode was truncated by one of these limits."""
        return not episode.truncated or bool(self.limits and episode.truncation not in self.limits)


def learned(mask: bool | Sequence[bool], episode: Trajectory) -> NDArray[np.bool_]:
    """Expand the result of a mask to the sampled tokens of an episode, bool [sampled]."""
    return over_tokens(np.asarray(mask, np.bool_), episode, "grpo.mask")


# --- group filters


class GroupFilter(Protocol):
    """Selection of the groups to train on. For each dropped group another one is rolled out."""

    def __call__(self, group: Group) -> bool:
        """Whether the group is trained on."""


class KeepAll:
    """Keeps every group; those without signal are computed only if the loss has a gradient there (KL, entropy)."""

    def __call__(self, group: Group) -> bool:
        """True."""
        return True


class WithSignal:
    """Keeps groups whose rewards differ: DAPO's dynamic sampling (arXiv 2503.14476).

    Every step trains on `groups_per_step` such groups.
    """

    def __call__(self, group: Group) -> bool:
        """Whether two rewards differ."""
        return bool(np.ptp(group.rewards) > 1e-8)


class RewardRange:
    """Keeps groups whose mean reward is within [low, high]: neither too hard nor too easy."""

    def __init__(self, low: float = 0.0, high: float = 1.0) -> None:
        if not low <= high:
            raise ValueError(f"low={low} is above high={high}")
        self.low, self.high = low, high

    def __call__(self, group: Group) -> bool:
        """Whether the group's mean reward is within the range."""
        return self.low <= group.mean_reward <= self.high


# --- from the recipe


def make_advantage(section: PartSection) -> AdvantageEstimator:
    """Create the advantage estimator named in a recipe."""
    made = _make("advantage", "forge_env.advantages", section)
    if not isinstance(made, AdvantageEstimator):
        raise PluginError(
            f"grpo.advantage.name: {section.name!r} is not an advantage estimator",
            fix="derive its class from trainers.algorithms.parts.AdvantageEstimator",
        )
    return made


def make_filter(section: PartSection) -> GroupFilter:
    """Create the group filter named in a recipe."""
    made: GroupFilter = _make("filter", "forge_env.group_filters", section)
    return made


def make_mask(section: PartSection) -> Mask:
    """Create the mask named in a recipe."""
    made: Mask = _make("mask", "forge_env.masks", section)
    return made


def _make(key: str, group: str, section: PartSection) -> Any:
    key = f"grpo.{key}"
    return make_plugin(group, section.name, section.options, name_at=f"{key}.name", options_at=f"{key}.options")
