"""Data types of the replay buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from forge_env.config.recipe import ReplaySection
from forge_env.errors import UsageError
from forge_env.trajectory import Segment


class Trainable(Protocol):
    """Interface of a group in the buffer. The properties are read once, when the group is added."""

    @property
    def oldest_version(self) -> int:
        """Policy version of the oldest sampled token; -1 if no token was sampled."""

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""

    @property
    def priority(self) -> float:
        """Mean absolute advantage."""

    @property
    def record(self) -> Any:
        """Small summary of the group, without tokens, that is sent with a reservation."""

    def segments(self) -> list[Segment]:
        """The group's token sequences."""


G = TypeVar("G", bound=Trainable)


@dataclass(frozen=True, slots=True)
class Ticket:
    """Permission to roll out one group, which has a slot in the buffer.

    Attributes:
        index: sequence number of the admission, which is also the position of the group's task.
        version: policy version of the generators at admission; none of the group's tokens is older.
    """

    index: int
    version: int


class TicketDoneError(UsageError):
    """A ticket's group is not in progress: already added or discarded, lost in a restart, or of another buffer."""


class Outcome(StrEnum):
    """Result of adding a group."""

    KEPT = "kept"
    STALE = "stale"
    """The group could no longer be trained within the staleness bound."""


@dataclass(slots=True, eq=False)
class Held(Generic[G]):
    """A complete group in the buffer.

    Attributes:
        version: policy version of the oldest token.
        priority: mean absolute advantage.
        uses: number of training steps that the group was handed out for.
    """

    index: int
    version: int
    tokens: int
    priority: float
    group: G
    uses: int = 0


@dataclass(slots=True)
class Reservation:
    """The groups of a training step, without their data, which stays in the buffer (`fetch`).

    Attributes:
        step: policy version that trains on the groups.
        indices: ticket indices of the groups, ascending, [P].
        versions: policy version of each group's oldest token, [P].
        uses: number of times each group was handed out, including this one, [P].
        groups: summary of each group, without its tokens (`Trainable.record`), [P].
    """

    step: int
    indices: list[int]
    versions: list[int]
    uses: list[int]
    tokens: int
    groups: list[Any] = field(default_factory=list, compare=False)

    @classmethod
    def of(cls, step: int, held: Sequence[Held[Any]]) -> Reservation:
        """Reservation of the groups `held` for `step`."""
        return cls(
            step,
            [each.index for each in held],
            [each.version for each in held],
            [each.uses for each in held],
            sum(each.tokens for each in held),
            [each.group.record for each in held],
        )

    @property
    def staleness(self) -> list[int]:
        """Age of each group's oldest token, in policy updates, [P]."""
        return [self.step - version for version in self.versions]


@dataclass(slots=True)
class Batch(Generic[G]):
    """A reservation with its groups, [P]."""

    reservation: Reservation
    groups: list[G]

    @property
    def step(self) -> int:
        """Policy version that trains on the groups."""
        return self.reservation.step


@dataclass(slots=True)
class Counters:
    """Numbers of groups and tokens since the start of the run.

    admitted = completed + discarded + groups in progress; completed = trained + discarded_stale + cleared + groups
    in the buffer that are not trained yet.
    """

    admitted: int = 0
    completed: int = 0
    trained: int = 0
    """Groups trained on, each counted once."""
    reused: int = 0
    """Uses of groups after their first."""
    discarded: int = 0
    """Groups whose rollout failed."""
    discarded_stale: int = 0
    tokens_discarded_stale: int = 0
    """Tokens sampled and then dropped because training them would break the bound; 0 by design of the slots."""
    evicted: int = 0
    """Groups dropped before another use because the capacity was exceeded."""
    cleared: int = 0
    max_staleness: int = 0
    """Age of the oldest token handed out, in policy updates."""

    def counts(self) -> dict[str, Any]:
        """Counters by name. All are numbers, so the deep copies of `dataclasses.asdict` are not needed."""
        return {name: getattr(self, name) for name in Counters.__slots__}


@dataclass(slots=True)
class BufferStats(Counters):
    """The counters, and the current contents of the buffer."""

    rolling: int = 0
    """Groups admitted but not complete."""
    ready: int = 0
    """Complete groups that have not been handed out."""
    in_training: int = 0
    """Groups handed out whose weights have not reached the generators."""
    kept: int = 0
    """Groups that may be used again."""
    tokens_held: int = 0
    """Sampled tokens of all complete groups in the buffer."""
    first_open: int = 0
    """All groups with a smaller index are finished."""
    waiting_for: str | None = None
    """Description of what blocks the next training step; None if its groups are available."""
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    """Seconds that the buffer spent on each activity since it was created; they sum to its age."""


@dataclass(frozen=True, slots=True)
class BufferSettings:
    """Settings of a replay buffer.

    Attributes:
        per_step: P, groups per training step.
        max_off_policy_steps: S, bound on the age of every trained token, in policy updates.
        steps: training steps of the run; a group is admitted only if it can be trained before the end. None: endless.
        first_index: index of the first group.
        version: initial policy version.
        replay: order, re-use and eviction.
        seed: seed of the sampling rules' draws.
    """

    per_step: int
    max_off_policy_steps: int
    steps: int | None = None
    first_index: int = 0
    version: int = 0
    replay: ReplaySection = field(default_factory=ReplaySection)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.per_step < 1 or self.max_off_policy_steps < 0:
            raise UsageError(
                f"per_step={self.per_step}, max_off_policy_steps={self.max_off_policy_steps}: out of range",
                fix="per_step is at least 1, max_off_policy_steps at least 0",
            )
        if self.replay.max_uses > self.max_off_policy_steps + 1:
            raise UsageError(
                f"max_uses={self.replay.max_uses}: a group may be used for {self.max_off_policy_steps + 1} steps",
                fix="at most max_off_policy_steps + 1",
            )
