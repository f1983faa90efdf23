"""What rollout workers are asked and what they answer: all of it small, since it passes through the controller."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_env.config.recipe import RunConfig
from forge_env.run.clock import Reading
from forge_env.run.timeline import Span
from forge_env.trajectory import Segment, Trajectory
from trainers.buffer.packed import PackedGroup
from trainers.buffer.types import GroupBuffer, Ticket
from trainers.generator.client import Member
from trainers.rollout.opening import Opening

BUG = "EnvironmentBugError: "
"""How the error of an episode begins that the environment's own code has ended, as in an evaluation's record."""

LATE = "group_time"
"""`Trajectory.truncation` of an episode that missed `grpo.group_timeout_s` and has reward 0."""
VERSIONS = "versions"
"""In `Trajectory.info` of a held-out episode as the controller gets it: sampled tokens by policy version."""


@dataclass(slots=True)
class Group:
    """Episodes of one task.

    Attributes:
        episodes: that are recorded, in order.
        late: how many missed `grpo.group_timeout_s`, whether they are among `episodes` or not.
    """

    episodes: list[Trajectory]
    late: int = 0

    @property
    def valid(self) -> list[Trajectory]:
        """Episodes whose outcome was up to the agent, and in which it sampled something.

        An episode that was too late and counts as 0 (`grpo.on_timeout=zero`) may have sampled nothing, and have no
        turns.
        """
        return [own for own in self.episodes if own.valid and (own.num_sampled_tokens or own.truncation == LATE)]

    @property
    def finished(self) -> list[Trajectory]:
        """Valid episodes that were not too late."""
        return [episode for episode in self.valid if episode.truncation != LATE]

    @property
    def rewards(self) -> NDArray[np.float64]:
        """Of the valid episodes, [E]."""
        return np.array([episode.reward for episode in self.valid], np.float64)

    @property
    def mean_reward(self) -> float:
        """Of the valid episodes; 0 without any."""
        return float(self.rewards.mean()) if self.valid else 0.0

    def by_seat(self) -> list[Group]:
        """What is compared with each other: the valid episodes as each seat played them, a group for each seat."""
        if not any(turn.seat for episode in self.valid for turn in episode.turns):
            return [self]
        found: dict[str, Group] = {}
        for episode in self.valid:
            for seat, own in episode.by_seat().items():
                found.setdefault(seat, Group([])).episodes.append(own)
        return [group for group in found.values() if group.valid]


# --- what an algorithm does in the workers

ScoreFunction = Callable[[list[Segment]], Awaitable[list[NDArray[np.float32]]]]
"""The reference model's log-probabilities of the target tokens of each segment, float32 [N] each."""


class Preparation(ABC):
    """An algorithm's part in the rollout workers: from a group to what is trained on. Each worker has its own.

    Args:
        config: the recipe.
        score: asks the reference model, where the recipe has one.
    """

    def __init__(self, config: RunConfig, score: ScoreFunction) -> None:
        self.config = config
        self.score = score

    @abstractmethod
    async def __call__(self, group: Group) -> PackedGroup | None:
        """What is trained on of a group that has valid episodes; None: nothing, another takes its place."""

    def state_dict(self) -> dict[str, Any]:
        """What is remembered from group to group, as JSON; it goes to the controller with every group."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        return


# --- what is asked


@dataclass(frozen=True, slots=True)
class Links:
    """Whom a worker calls by itself.

    Attributes:
        generators: the replicas, as they are now.
        buffer: where groups go.
        reference: the `ReferenceModel` actor, where there is one.
    """

    generators: Sequence[Member]
    buffer: GroupBuffer[Any]
    reference: Any = None


@dataclass(frozen=True, slots=True)
class RollOut:
    """A group to be played.

    Attributes:
        ticket: its place in the buffer, and its position in the order of tasks.
        task: index of its task in the training split.
        set_aside: ids of tasks that this worker hasn't been told of yet; they are not played again.
        again: another worker had begun with it, and may have come to its end.
    """

    ticket: Ticket
    task: int
    set_aside: tuple[str, ...] = ()
    again: bool = False


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A held-out episode to be played.

    Attributes:
        split: whose task.
        task: its index.
        kind: name of the file that it is recorded in.
        held: the `Member.key` of the replica whose weights are held for it; None: any.
        again: as in `RollOut`.
    """

    split: str
    task: int
    kind: str
    held: tuple[int, int] | None = None
    again: bool = False


# --- what is answered


class Fate(StrEnum):
    """What became of a group."""

    KEPT = "kept"
    """It is in the buffer."""
    STALE = "stale"
    """The buffer had no use for it any more."""
    DROPPED = "dropped"
    """The algorithm doesn't want it (`grpo.filter`)."""
    LOST = "lost"
    """It has no episode that counts."""


@dataclass(slots=True)
class Totals:
    """Counts of what was played; of the run, since its start."""

    tokens_generated: int = 0
    episodes: int = 0
    episodes_invalid: int = 0
    episodes_bugs: int = 0
    """Those that the environment's own code failed on; they are none of the invalid ones."""
    episodes_late: int = 0
    forks: int = 0
    groups_filtered: int = 0
    tokens_filtered: int = 0

    @classmethod
    def of(cls, group: Group, fate: Fate) -> Totals:
        """The counts of one group."""
        dropped = fate == Fate.DROPPED
        return cls(
            tokens_generated=sum(episode.num_sampled_tokens for episode in group.episodes),
            episodes=len(group.episodes),
            episodes_invalid=sum(not (episode.valid or is_bug(episode)) for episode in group.episodes),
            episodes_bugs=sum(map(is_bug, group.episodes)),
            episodes_late=group.late,
            forks=sum(turn.reply.forked for episode in group.episodes for turn in episode.turns),
            groups_filtered=int(dropped),
            tokens_filtered=dropped * sum(episode.num_sampled_tokens for episode in group.valid),
        )

    def add(self, more: Totals, times: int = 1) -> None:
        """Count these too; -1 times: no more."""
        for name, value in asdict(more).items():
            setattr(self, name, getattr(self, name) + times * value)

    def summary(self) -> dict[str, int]:
        """For summary.json."""
        return asdict(self)

    def metrics(self) -> dict[str, float]:
        """What is not trained on so far."""
        return {
            "episode/invalid": float(self.episodes_invalid),
            "episode/bugs": float(self.episodes_bugs),
            "episode/late": float(self.episodes_late),
            "episode/forks": float(self.forks),
            "groups/filtered": float(self.groups_filtered),
        }


@dataclass(slots=True)
class Report:
    """What a worker has to say with every answer.

    Attributes:
        warnings: what a person should know.
        set_aside: ids of tasks whose environment has raised.
    """

    warnings: list[str] = field(default_factory=list)
    set_aside: list[str] = field(default_factory=list)


@dataclass(slots=True)
class GroupReport(Report):
    """What became of a group.

    Attributes:
        fate: the buffer has it, or why not.
        totals: its counts.
        success: mean reward, as a share of the environment's highest; None where no episode counts.
        bug: what the environment's own code raised, if it did.
        why_lost: why no episode counts, and what to do about it.
        state: of the worker's `Preparation`.
        opening: how it begins, of a worker's first groups.
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
    """A held-out episode.

    Attributes:
        episode: without its messages and tokens; None: the replica died whose weights were held.
    """

    episode: Trajectory | None = None


@dataclass(slots=True)
class WorkerStatus(Report):
    """How a worker is.

    Attributes:
        running: episodes under way.
        ended: episodes ended, since it was started.
        oldest: of the episode that has done one thing for the longest: name, what it does, seconds.
        seconds: of all episodes by what was done, since it was started.
        busy_s: seconds that its event loop has worked.
        age_s: seconds since it was started.
        began: when that was, by its own clock: another life has another time.
        spans: for the timeline, since the last answer; times by its own clock.
        engine: name of its sandbox engine.
        clock: what its clocks say.
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
    """Whether the environment's own code failed in it."""
    return not episode.valid and (episode.error or "").startswith(BUG)


def bug_of(episodes: Sequence[Trajectory]) -> str | None:
    """What the environment's own code raised in one of these episodes."""
    return next(((episode.error or "").removeprefix(BUG) for episode in episodes if is_bug(episode)), None)


def why_nothing(group: Group) -> tuple[str, str]:
    """Why a group has no episode to train on, and what to do about it."""
    if error := next((episode.error for episode in group.episodes if not episode.valid), None):
        return error, "run.log has the errors of all episodes"
    if group.episodes:
        return "the first prompt leaves no room for a token", "raise model.max_length"
    return "no episode finished in time", "raise grpo.group_timeout_s, or lower grpo.max_tokens_per_turn"
