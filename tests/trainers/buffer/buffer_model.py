"""A model of the replay buffer's world: drives a core through any interleaving and checks what must always hold."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forge_env.trajectory import Segment
from trainers.buffer.core import BufferCore
from trainers.buffer.types import BufferSettings, Outcome, Reservation, Ticket


@dataclass(frozen=True)
class FakeGroup:
    """A group of members that must stay together."""

    index: int
    oldest_version: int
    num_tokens: int = 10
    priority: float = 0.5
    members: tuple[str, ...] = ()

    @property
    def record(self) -> tuple[str, ...]:
        return self.members

    def segments(self) -> list[Segment]:
        """A sequence for each member; the first has no advantage."""
        return [segment(100 * self.index + place, float(place)) for place in range(len(self.members))]

    @classmethod
    def of(cls, index: int, version: int, **fields: Any) -> FakeGroup:
        return cls(index, version, members=tuple(f"{index}-{member}" for member in range(3)), **fields)


def segment(first: int, advantage: float) -> Segment:
    """Three tokens, the last two of them sampled."""
    return Segment(
        token_ids=np.arange(first, first + 3, dtype=np.int32),
        mask=np.array([False, True, True]),
        logprobs=np.array([0, -1, -2], np.float32),
        advantages=np.array([0, advantage, advantage], np.float32),
    )


class World:
    """Rollouts, trainer and generators around one core. Every method is one event; all check the invariants.

    `rough` allows what the loop never does: skipped versions, tokens older than their ticket, `clear`. Then groups may
    be dropped as stale, and the bound must hold all the same.
    """

    def __init__(self, settings: BufferSettings, *, rough: bool = False) -> None:
        self.settings = settings
        self.rough = rough
        self.core: BufferCore[FakeGroup] = BufferCore(settings)
        self.twin: BufferCore[FakeGroup] | None = None
        self.rolling: list[Ticket] = []
        self.groups: dict[int, FakeGroup] = {}
        self.uses: dict[int, int] = {}
        self.tokens_stale = 0

    # --- events

    @property
    def trainer(self) -> int:
        return self.core.window.next_step

    @property
    def generators(self) -> int:
        return self.core.window.generator_version

    @property
    def over(self) -> bool:
        return self.settings.steps is not None and self.trainer >= self.settings.steps

    def both(self, name: str, *arguments: Any) -> Any:
        """Call a method of the core, and of a restored copy: they do the same."""
        outcomes = [getattr(core, name)(*arguments) for core in (self.core, self.twin) if core is not None]
        assert outcomes[0] == outcomes[-1]
        return outcomes[0]

    def admit(self) -> Ticket | None:
        ticket: Ticket | None = self.both("admit")
        if ticket is not None:
            assert ticket.version == self.generators
            assert ticket.index not in self.groups, "a group that is complete was admitted again"
            self.rolling.append(ticket)
        return ticket

    def complete(self, choice: int, *, younger: int = 0, priority: float = 0.5) -> Outcome | None:
        if not self.rolling:
            return None
        ticket = self.rolling.pop(choice % len(self.rolling))
        version = min(ticket.version + younger, max(self.generators, ticket.version))
        if self.rough and choice % 7 == 0:
            version = max(0, ticket.version - 1 - choice % 3)
        group = FakeGroup.of(ticket.index, version, priority=priority, num_tokens=1 + choice % 50)
        outcome: Outcome = self.both("add", group, ticket)
        self._added(group, outcome)
        return outcome

    def add_unasked(self, choice: int) -> Outcome | None:
        if self.over:
            return None
        version = max(0, self.trainer - choice % (self.settings.max_off_policy_steps + 1 + self.rough))
        group = FakeGroup.of(self.core.next_index, version, num_tokens=1 + choice % 50)
        outcome: Outcome | None = self.both("add_unasked", group)
        if outcome is not None:
            self._added(group, outcome)
        return outcome

    def _added(self, group: FakeGroup, outcome: Outcome) -> None:
        self.groups[group.index] = group
        if outcome is Outcome.STALE:
            self.tokens_stale += group.num_tokens

    def discard(self, choice: int) -> None:
        if self.rolling:
            self.both("discard", self.rolling.pop(choice % len(self.rolling)))

    def take(self, skip: int = 0) -> Reservation | None:
        if self.over:
            return None
        step = self.trainer + (skip if self.rough else 0)
        if self.settings.steps is not None:
            step = min(step, self.settings.steps - 1)
        before = {held.index for held in self.core.ready}
        reserved: Reservation | None = self.both("take", step)
        left = {held.index for held in self.core.ready}
        if reserved is None:
            self._dropped(before - left)
            return None
        self._dropped(before - left - set(reserved.indices))
        self._check_batch(reserved)
        return reserved

    def _dropped(self, indices: set[int]) -> None:
        assert self.rough or not indices
        self.tokens_stale += sum(self.groups[index].num_tokens for index in indices)

    def _check_batch(self, reserved: Reservation) -> None:
        settings = self.settings
        batch = self.core.batch(reserved.step)
        assert len(batch.groups) == len(set(reserved.indices)) == settings.per_step
        new = 0
        for index, group, uses in zip(reserved.indices, batch.groups, reserved.uses, strict=True):
            assert group is self.groups[index], "another group, or a part of one"
            assert reserved.step - group.oldest_version <= settings.max_off_policy_steps, "older than the bound"
            self.uses[index] = self.uses.get(index, 0) + 1
            assert uses == self.uses[index] <= settings.replay.max_uses
            new += uses == 1
        assert new * settings.replay.max_uses >= settings.per_step

    def release(self) -> None:
        if self.generators < self.trainer:
            self.both("release", self.generators + 1)

    def clear(self) -> None:
        if self.rough:
            self.both("clear")

    def save(self) -> None:
        """From here on a restored copy goes along; the copy before it has."""
        if self.twin is not None:
            assert self.twin.state_dict() == self.core.state_dict()
        saved = self.core.state_dict()
        memo = {id(group): group for group in self.groups.values()}  # the copy holds the very groups, as `is` asks
        self.twin = BufferCore(replace(self.settings, seed=self.settings.seed + 1, first_index=99))
        self.twin.load_state_dict(_copy(saved, memo))
        assert self.twin.stats() == self.core.stats()

    def restart(self, choice: int) -> None:
        """Everything but the weights of some version is lost; the buffer comes from its state."""
        version = self.generators + choice % (self.trainer - self.generators + 1)
        for step, held in self.core.in_training.items():
            if step >= version:
                for own in held:
                    self.uses[own.index] -= 1
        self.core.restart(version)
        if self.twin is not None:
            self.twin.restart(version)
        self.rolling = []
        assert not self.core.rolling
        assert self.generators == self.trainer == version

    def undo(self, choice: int) -> None:
        """A caller went away just when it was granted what it asked for."""
        before = self.core.stats()
        if choice % 2:
            ticket = self.core.admit()
            if ticket is not None:
                self.core.undo_admit(ticket)
        elif not self.over:
            reserved = self.core.take(self.trainer)
            if reserved is not None:
                self.core.undo_take(reserved.step)
        after = self.core.stats()
        assert after.ready == before.ready
        assert after.rolling == before.rolling
        self.twin = None  # the draws of the rules went on

    # --- what always holds

    def check(self) -> None:
        settings, core, stats = self.settings, self.core, self.core.stats()
        bound, per_step = settings.max_off_policy_steps, settings.per_step
        waiting = [*(held.version for held in core.ready), *(ticket.version for ticket in core.rolling.values())]
        assert sorted(waiting) == sorted(core.window.pending.elements())
        assert core.window.excess() == []
        assert len(waiting) <= per_step * (bound + 1)
        assert len(core.in_training) <= bound + 1
        assert stats.kept <= (per_step * bound if settings.replay.capacity is None else settings.replay.capacity)
        under_way = stats.rolling + len(core.again)
        assert stats.admitted == stats.completed + stats.discarded + under_way
        fresh = sum(held.uses == 1 for batch in core.in_training.values() for held in batch)
        done = stats.trained + stats.discarded_stale + stats.cleared
        assert stats.completed == done + stats.ready + fresh
        assert stats.max_staleness <= bound
        assert stats.tokens_discarded_stale == self.tokens_stale
        assert self.rough or self.tokens_stale == 0
        stuck = not core.rolling and self.generators == self.trainer and not core.has_room() and not self.over
        assert not stuck or stats.waiting_for is None, f"nothing can move: {stats.waiting_for}"

    def drain(self) -> None:
        """Everything under way comes to its end; every group that was kept has been trained on."""
        for _ in range((self.settings.max_off_policy_steps + 2) * 3):
            while self.rolling:
                self.complete(1)
            while self.generators < self.trainer:
                self.release()
            if self.over:
                break
            while self.take() is None:
                assert self.admit() is not None, "no batch, and no room for a group: a deadlock"
                self.complete(1)
            self.check()
        while self.generators < self.trainer:
            self.release()
        self.check()
        assert self.rough or not self.over or not len(self.core.ready), "rolled out in vain"
        trained = {index for index, uses in self.uses.items() if uses}
        kept = set(self.groups) - {held.index for held in self.core.ready}
        assert trained == kept or self.rough


def _copy(saved: Any, memo: dict[int, Any]) -> Any:
    """As written to disk and read again, but for the identity of the groups."""
    if isinstance(saved, FakeGroup):
        return memo[id(saved)]
    if isinstance(saved, dict):
        return {key: _copy(value, memo) for key, value in saved.items()}
    if isinstance(saved, list):
        return [_copy(value, memo) for value in saved]
    if isinstance(saved, int | float | str):
        return saved
    return pickle.loads(pickle.dumps(saved))
