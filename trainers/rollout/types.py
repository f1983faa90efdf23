"""Requests to the rollout workers and their reports, kept small since they pass through the controller."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forge_env.config.recipe import RunConfig
from forge_env.run.clock import Reading
from forge_env.run.timeline import Span
from forge_env.trajectory import Segment, Trajectory
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.packed import PackedGroup
from trainers.buffer.types import Ticket
from trainers.generator.client import Member
from trainers.rollout.opening import Opening

BUG = "EnvironmentBugError: "
"""Prefix of `Trajectory.error` when the environment's own code failed, as in an evaluation's record."""

LATE = "group_time"
"""`Trajectory.truncation` of an episode that missed `grpo.group_timeout_s` and counts with reward 0."""
VERSIONS = "versions"
"""Key in `Trajectory.info` of held-out episodes sent to the controller: number of sampled tokens by policy version."""


class Cut(NamedTuple):
    """A turn of an episode from which it is continued by the policy, for an advantage estimator."""

    episode: int
    """Index of the episode in `Group.valid`."""
    turn: int
    """Index of the first turn that is sampled anew, at least 1."""
    number: int
    """Number of continuations."""


@dataclass(slots=True)
class Group:
    """Episodes of one task.

    Attributes:
        late: number of episodes that missed `grpo.group_timeout_s`, including those not in `episodes`.
        continued: rewards of continuations, by episode (index in `valid`) and turn.
        continued_tokens: number of tokens that the policy sampled in continuations.
    """

    episodes: list[Trajectory]
    late: int = 0
    continued: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    continued_tokens: int = 0

    def continued_from(self, episode: int) -> dict[int, list[float]]:
        """Rewards of an episode's continuations, by turn."""
        return {turn: rewards for (index, turn), rewards in self.continued.items() if index == episode}

    @property
    def valid(self) -> list[Trajectory]:
        """Episodes that no failure outside the agent ended, and in which the agent sampled tokens.

        Late episodes that count with reward 0 (`grpo.on_timeout=zero`) are included, even without tokens or turns.
        """
        return [each for each in self.episodes if each.valid and (each.num_sampled_tokens or each.truncation == LATE)]

    @property
    def finished(self) -> list[Trajectory]:
        """Valid episodes that met `grpo.group_timeout_s`."""
        return [episode for episode in self.valid if episode.truncation != LATE]

    @property
    def rewards(self) -> NDArray[np.float64]:
        """Rewards of the valid episodes, float64 [E]."""
        return np.array([episode.reward for episode in self.valid], np.float64)

    @property
    def mean_reward(self) -> float:
        """Mean reward of the valid episodes; 0 if there are none."""
        return float(self.rewards.mean()) if self.valid else 0.0

    def by_seat(self) -> list[Group]:
        """Split into one group per seat, each with the valid episodes as that seat played them.

        Only episodes of the same seat are compared with each other. Returns `[self]` if no turn has a seat.
        """
        if not any(turn.seat for episode in self.valid for turn in episode.turns):
            return [self]
        groups: dict[str, Group] = {}
        for episode in self.valid:
            for seat, part in episode.by_seat().items():
                groups.setdefault(seat, Group([])).episodes.append(part)
        return [group for group in groups.values() if group.valid]


# --- the algorithm's part in the workers

ScoreFunction = Callable[[list[Segment]], Awaitable[list[NDArray[np.float32]]]]
"""Returns the reference model's log-probabilities of each segment's target tokens, one float32 [N] per segment."""


class Preparation(ABC):
    """An algorithm's part in the rollout workers: turns groups into training data. Each worker has its own instance."""

    def __init__(self, config: RunConfig, score: ScoreFunction) -> None:
        self.config = config
        self.score = score

    @abstractmethod
    async def __call__(self, group: Group) -> PackedGroup | None:
        """Turn a group with valid episodes into training data; None drops the group, and another one replaces it."""

    def cuts(self, group: Group) -> Sequence[Cut]:
        """The turns from which the group's episodes are continued before it is prepared (`Group.continued`)."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Return the state carried from group to group, as JSON values; every group report has a copy."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        return


# --- requests


@dataclass(frozen=True, slots=True)
class Links:
    """Actors that a worker calls directly."""

    generators: Sequence[Member]
    buffer: LocalReplayBuffer[Any]
    reference: Any = None


@dataclass(frozen=True, slots=True)
class RollOut:
    """Request to play a group.

    Attributes:
        ticket: the group's reservation in the buffer; its index is the position in the order of tasks.
        set_aside: ids of tasks set aside since the last request to this worker; they are not played again.
        again: the request is a retry: the worker died during the first one, and may have completed the group.
    """

    ticket: Ticket
    task: int
    set_aside: tuple[str, ...] = ()
    again: bool = False


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Request to play a held-out episode.

    Attributes:
        kind: stem of the trajectory file to record the episode in.
        held: `Member.key` of the replica that holds its weights for this evaluation; None: any replica.
    """

    split: str
    task: int
    kind: str
    held: tuple[int, int] | None = None
    again: bool = False


# --- reports


class Fate(StrEnum):
    """Outcome of a group."""

    KEPT = "kept"
    """It was added to the buffer."""
    STALE = "stale"
    """The buffer rejected it as too old."""
    DROPPED = "dropped"
    """The algorithm filtered it out (`grpo.filter`)."""
    LOST = "lost"
    """It has no valid episode."""


@dataclass(slots=True)
class Totals:
    """Counts of the episodes played, for one group or for the run since its start."""

    tokens_generated: int = 0
    episodes: int = 0
    episodes_invalid: int = 0
    episodes_bugs: int = 0
    """Episodes in which the environment's own code failed; not included in `episodes_invalid`."""
    episodes_late: int = 0
    forks: int = 0
    groups_filtered: int = 0
    tokens_filtered: int = 0
    tokens_continued: int = 0
    """Tokens of continuations for advantages (`grpo.advantage.name=counterfactual`), included in `tokens_generated`."""

    @classmethod
    def of(cls, group: Group, fate: Fate) -> Totals:
        """Count the episodes of one group."""
        dropped = fate == Fate.DROPPED
        return cls(
            tokens_generated=sum(episode.num_sampled_tokens for episode in group.episodes) + group.continued_tokens,
            episodes=len(group.episodes),
            episodes_invalid=sum(not (episode.valid or is_bug(episode)) for episode in group.episodes),
            episodes_bugs=sum(map(is_bug, group.episodes)),
            episodes_late=group.late,
            forks=sum(turn.reply.forked for episode in group.episodes for turn in episode.turns),
            groups_filtered=int(dropped),
            tokens_filtered=dropped * sum(episode.num_sampled_tokens for episode in group.valid),
            tokens_continued=group.continued_tokens,
        )

    def add(self, more: Totals, times: int = 1) -> None:
        """Add `more`, multiplied by `times`; -1 subtracts it."""
        for name, value in asdict(more).items():
            setattr(self, name, getattr(self, name) + times * value)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of episodes and groups that are not trained on, and of forks."""
        return {
            "episode/invalid": float(self.episodes_invalid),
            "episode/bugs": float(self.episodes_bugs),
            "episode/late": float(self.episodes_late),
            "episode/forks": float(self.forks),
            "groups/filtered": float(self.groups_filtered),
        }


@dataclass(slots=True)
class Report:
    """Messages for the user, and ids of tasks newly set aside because their environment raised."""

    warnings: list[str] = field(default_factory=list)
    set_aside: list[str] = field(default_factory=list)


@dataclass(slots=True)
class GroupReport(Report):
    """Report on a group.

    Attributes:
        success: mean reward as a share of the environment's maximum; None if no episode is valid or the maximum is
            unknown or 0.
        bug: error that the environment's own code raised, or None.
        why_lost: why no episode is valid, and a suggested fix; two empty strings unless `fate` is LOST.
        opening: first prompt and replies; None except for a worker's first groups.
    """

    fate: Fate = Fate.LOST
    totals: Totals = field(default_factory=Totals)
    success: float | None = None
    bug: str | None = None
    why_lost: tuple[str, str] = ("", "")
    state: dict[str, Any] = field(default_factory=dict)
    opening: Opening | None = None


@dataclass(slots=True)
class HeldOutReport(Report):
    """A held-out episode without messages and tokens; None if the replica that held the weights died."""

    episode: Trajectory | None = None


@dataclass(slots=True)
class WorkerStatus(Report):
    """Status of a worker.

    Attributes:
        ended: episodes ended since the worker's start.
        oldest: the episode that has been in one phase for the longest: its name, the phase, and seconds in it.
        seconds: seconds spent in each phase since the worker's start, summed over all episodes.
        busy_s: CPU seconds of its event loop's thread.
        began: time of the worker's start by its own clock; differs after each restart.
    """

    running: int = 0
    ended: int = 0
    oldest: tuple[str, str, float] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    busy_s: float = 0.0
    age_s: float = 0.0
    began: float = 0.0
    spans: list[Span] = field(default_factory=list)
    engine: str = ""
    clock: Reading | None = None


def is_bug(episode: Trajectory) -> bool:
    """Whether the environment's own code failed in an episode."""
    return not episode.valid and (episode.error or "").startswith(BUG)


def bug_of(episodes: Sequence[Trajectory]) -> str | None:
    """Return the first error that the environment's own code raised in these episodes, or None."""
    return next(((episode.error or "").removeprefix(BUG) for episode in episodes if is_bug(episode)), None)


def why_nothing(group: Group) -> tuple[str, str]:
    """Explain why a group has no episode to train on: the reason and a suggested fix."""
    if error := next((episode.error for episode in group.episodes if not episode.valid), None):
        return error, "run.log has the errors of all episodes"
    if group.episodes:
        return "the first prompt leaves no room for a token", "raise model.max_length"
    return "no episode finished in time", "raise grpo.group_timeout_s, or lower grpo.max_tokens_per_turn"
