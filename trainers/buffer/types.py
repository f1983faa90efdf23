"""What the replay buffer holds, hands out and counts, and the interface that its two forms share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from forge_env.config.recipe import ReplaySection
from forge_env.errors import UsageError
from forge_env.trajectory import Segment
from trainers.buffer.sequences import BatchSizes, Computed


class Trainable(Protocol):
    """What the buffer asks of a group. Read once, when it is added."""

    @property
    def oldest_version(self) -> int:
        """Policy version of the oldest sampled token; -1: no token was sampled."""

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""

    @property
    def priority(self) -> float:
        """Mean size of the advantages."""

    @property
    def record(self) -> Any:
        """What goes with a reservation: small, and without tokens."""

    def segments(self) -> list[Segment]:
        """Its token sequences."""


G = TypeVar("G", bound=Trainable)


@dataclass(frozen=True, slots=True)
class Ticket:
    """A group's place in the buffer.

    Attributes:
        index: order of admission, which is also the position of its task.
        version: policy version of the generators when it was admitted; none of its tokens is older.
    """

    index: int
    version: int


class TicketDoneError(UsageError):
    """The group of a ticket is not in progress: added or discarded before, lost in a restart, or of another buffer."""


class Outcome(StrEnum):
    """What became of a group that was added."""

    KEPT = "kept"
    STALE = "stale"
    """It could not be trained within the bound any more."""


@dataclass(slots=True, eq=False)
class Held(Generic[G]):
    """A complete group in the buffer.

    Attributes:
        index: of its ticket.
        version: policy version of its oldest token.
        tokens: sampled tokens.
        priority: mean size of its advantages.
        group: itself.
        uses: training steps that it was handed out for.
    """

    index: int
    version: int
    tokens: int
    priority: float
    group: G
    uses: int = 0


@dataclass(slots=True)
class Reservation:
    """Which groups a training step was given; their data is with the buffer (`fetch`).

    Attributes:
        step: the policy version that trains on them.
        indices: of the groups' tickets, ascending, [P].
        versions: policy version of each group's oldest token, [P].
        uses: how often each was handed out, this time included, [P].
        tokens: sampled tokens of all groups.
        groups: what each group is, without its tokens (`Trainable.record`), [P].
    """

    step: int
    indices: list[int]
    versions: list[int]
    uses: list[int]
    tokens: int
    groups: list[Any] = field(default_factory=list, compare=False)

    @classmethod
    def of(cls, step: int, held: Sequence[Held[Any]]) -> Reservation:
        """What `step` was given."""
        return cls(
            step,
            [own.index for own in held],
            [own.version for own in held],
            [own.uses for own in held],
            sum(own.tokens for own in held),
            [own.group.record for own in held],
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
        """The policy version that trains on them."""
        return self.reservation.step


@dataclass(slots=True)
class Counters:
    """Groups and tokens since the start of the run.

    admitted = completed + discarded + those under way; completed = trained + discarded_stale + cleared + those
    held and not yet trained.
    """

    admitted: int = 0
    completed: int = 0
    trained: int = 0
    """Groups trained on, each counted once."""
    reused: int = 0
    """Further times that groups were trained on."""
    discarded: int = 0
    """Rollouts that failed."""
    discarded_stale: int = 0
    tokens_discarded_stale: int = 0
    """Sampled and then dropped because training them would break the bound; slots make this 0."""
    evicted: int = 0
    """Groups that were waiting for another use when there was no room for them."""
    cleared: int = 0
    max_staleness: int = 0
    """Age of the oldest token handed out, in policy updates."""

    def counts(self) -> dict[str, Any]:
        """By name; all of them are numbers, so nothing needs `dataclasses.asdict`'s deep copies."""
        return {name: getattr(self, name) for name in Counters.__slots__}


@dataclass(slots=True)
class BufferStats(Counters):
    """The counters, and what the buffer holds now."""

    rolling: int = 0
    """Groups admitted and not complete."""
    ready: int = 0
    """Groups complete and not yet handed out."""
    in_training: int = 0
    """Groups handed out whose weights have not reached the generators."""
    kept: int = 0
    """Groups that may be used once more."""
    tokens_held: int = 0
    """Sampled tokens of all groups held."""
    first_open: int = 0
    """All groups before this index are done with."""
    waiting_for: str | None = None
    """What the next training step waits for, in words; None: it can be had at once."""
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    """What the buffer did with its time since it was made; they sum to its age."""


@runtime_checkable
class GroupBuffer(Protocol[G]):
    """The buffer as the loop sees it: in this process (`LocalReplayBuffer`), or an actor (`RemoteReplayBuffer`).

    A call that waits takes nothing when it is cancelled.
    """

    async def admit(self) -> Ticket:
        """A place for a new group; waits until there is room."""

    async def add(self, group: G, ticket: Ticket | None = None) -> Outcome:
        """The group of `ticket` is complete. Without a ticket it waits for a place of its own."""

    async def in_progress(self, ticket: Ticket) -> bool:
        """Whether the group of `ticket` is still to be added or discarded."""

    async def discard(self, ticket: Ticket) -> None:
        """The rollout of `ticket` failed; its slot is free again."""

    async def sample(self, curr_policy_version: int) -> Batch[G]:
        """The groups that the trainer at this version trains on next; waits until they can be given."""

    async def reserve(self, curr_policy_version: int) -> Reservation:
        """As `sample`, and the data stays where it is until somebody calls `fetch`."""

    async def fetch(self, step: int) -> Batch[G]:
        """The groups handed out for `step`, any number of times until they are released."""

    async def batch_sizes(self, step: int, computed: Computed = "all") -> BatchSizes:
        """Sizes of the segments of `step`, with those that `computed` selects."""

    async def sequences(self, step: int, numbers: Sequence[int]) -> list[Segment]:
        """Token sequences of `step`, as often as they are asked for until they are released."""

    async def set_reference(self, step: int, logprobs: Mapping[int, NDArray[np.float32]]) -> None:
        """A reference model's log-probabilities of the target tokens of sequences of `step`, by number."""

    async def release(self, version: int) -> None:
        """The generators hold `version`: groups of earlier steps are done with, their slots are free."""

    async def evict(self, curr_policy_version: int) -> int:
        """Drop what the trainer, being at this version, can't train within the bound; returns how many groups."""

    async def clear(self) -> None:
        """Drop every complete group that has not been handed out."""

    async def restart(self, version: int) -> None:
        """Trainer and generators restart at `version`: groups in progress are rolled out again, under their index."""

    async def stats(self) -> BufferStats:
        """Counters and contents."""

    async def state_dict(self, trained: int = 0) -> dict[str, Any]:
        """Everything, random state included; groups of steps before `trained` are done with."""

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what `state_dict` described, to the last bit."""


@dataclass(frozen=True, slots=True)
class BufferSettings:
    """How a buffer is built.

    Attributes:
        per_step: P, groups of a training step.
        max_off_policy_steps: S, bound on the age of every trained token.
        steps: the run ends after this many; no group is admitted that could not be trained before. None: endless.
        first_index: index of the first group.
        version: policy version to begin at.
        replay: order, re-use and eviction.
        seed: of the draws of sampling rules.
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
                f"max_uses={self.replay.max_uses}: a group is young enough for {self.max_off_policy_steps + 1} steps",
                fix="at most max_off_policy_steps + 1",
            )
