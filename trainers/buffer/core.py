"""Synchronous core of the replay buffer: the state and its transitions, without waiting.

A group is admitted (it gets a ticket), completed, handed out to a training step, and finished once the weights that it
helped to train have reached the generators. Until then it can be fetched again for its step.

    admit -> rolling --add--> ready --take--> in training --release--> done, or kept for another use
               |                |
            discard          stale

`trainers.buffer.window` has the bound on staleness and its proof. Invariant, with t the next step:

    the steps t, t + 1, ... can train all pending groups (rolling and ready) in time

`admit` and `take` preserve it. If it is broken by other causes (the trainer skipped versions, a checkpoint of another
recipe was loaded, a group has tokens older than its ticket), the excess groups are dropped and counted, so no group is
ever trained beyond the bound and no step waits forever.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterable
from typing import Any, Generic

from forge_env.errors import UsageError
from trainers.buffer.pool import Pool
from trainers.buffer.rules import make_rules
from trainers.buffer.types import (
    Batch,
    BufferSettings,
    BufferStats,
    Counters,
    G,
    Held,
    Outcome,
    Reservation,
    Ticket,
    TicketDoneError,
)
from trainers.buffer.window import Window

FORMAT = 1
"""Format version of `BufferCore.state_dict`."""


class BufferCore(Generic[G]):
    """State of a replay buffer: admits groups, stores complete ones, hands out batches within the staleness bound."""

    def __init__(self, settings: BufferSettings) -> None:
        self.settings = settings
        self.window = Window(settings.per_step, settings.max_off_policy_steps, settings.steps, settings.version)
        """Counts of pending groups, rolling and ready."""
        self.rolling: dict[int, Ticket] = {}
        self.again: list[int] = []
        """Indices whose rollout was lost in a restart or whose ticket was taken back; they are admitted first."""
        self.late: dict[int, Ticket] = {}
        """Groups in progress that can no longer be trained within the bound; not counted as pending."""
        self.ready: Pool[G] = Pool()
        self.in_training: dict[int, list[Held[G]]] = {}
        self.next_index = settings.first_index
        self.counters = Counters()
        self.random = random.Random(settings.seed)
        self._new_per_step = -(-settings.per_step // settings.replay.max_uses)
        self._sampling, self._eviction = make_rules(settings.replay)
        self.used: Pool[G] = Pool()
        """Groups trained on that have a use left and are young enough for it."""

    # --- admission

    def has_room(self) -> bool:
        """Whether a group may be admitted: it can be trained in time and is needed.

        If groups are used k times, a step needs ceil(P / k) new groups, or more if there are too few used ones.
        """
        window, version = self.window, self.window.generator_version
        pending = window.total
        wanted = self._new_per_step * window.steps_left(version)
        if pending >= wanted and pending + self._expected_again() >= self.settings.per_step:
            return False
        return window.fits(version)

    def admit(self) -> Ticket | None:
        """Admit a new group; returns its ticket, or None if there is no room."""
        if not self.has_room():
            return None
        ticket = Ticket(self._take_index(), self.window.generator_version)
        self.rolling[ticket.index] = ticket
        self.window.add(ticket.version)
        return ticket

    def _take_index(self) -> int:
        if self.again:
            return heapq.heappop(self.again)
        self.next_index += 1
        self.counters.admitted += 1
        return self.next_index - 1

    # --- completion

    def add(self, group: G, ticket: Ticket) -> Outcome:
        """Add the complete group of `ticket`."""
        if self.late.pop(ticket.index, None) is not None:
            self.counters.completed += 1
            return self._stale(group.num_tokens)
        self._end_rollout(ticket, "added")
        self.counters.completed += 1
        held = self._held(group, ticket)
        if held.version < ticket.version and not self.window.fits(held.version):
            return self._stale(held.tokens)
        self.put_ready(held)
        return Outcome.KEPT

    def add_unasked(self, group: G) -> Outcome | None:
        """Admit and add a group without a ticket; None if there is no room or its policy version isn't released yet."""
        if group.oldest_version > self.window.generator_version:
            return None
        held = self._held(group, Ticket(self.next_index, self.window.generator_version))
        if self.window.steps_left(held.version) > 0 and not self.window.fits(held.version):
            return None
        self.next_index += 1
        self.counters.admitted += 1
        self.counters.completed += 1
        if not self.window.steps_left(held.version):
            return self._stale(held.tokens)
        self.put_ready(held)
        return Outcome.KEPT

    def discard(self, ticket: Ticket) -> None:
        """Free the slot of `ticket`, whose rollout failed."""
        if self.late.pop(ticket.index, None) is None:
            self._end_rollout(ticket, "discarded")
        self.counters.discarded += 1

    def in_progress(self, ticket: Ticket) -> bool:
        """Whether the group of `ticket` has been neither added nor discarded."""
        return ticket in (self.rolling.get(ticket.index), self.late.get(ticket.index))

    def _end_rollout(self, ticket: Ticket, what: str) -> None:
        if self.rolling.get(ticket.index) != ticket:
            raise TicketDoneError(
                f"group {ticket.index} can't be {what}: it is not in progress", fix="add or discard each ticket once"
            )
        del self.rolling[ticket.index]
        self.window.remove(ticket.version)

    def _held(self, group: G, ticket: Ticket) -> Held[G]:
        version = ticket.version
        if group.oldest_version >= 0:  # versions not released yet count as the last released one
            version = min(group.oldest_version, self.window.generator_version)
        return Held(ticket.index, version, group.num_tokens, group.priority, group)

    def put_ready(self, held: Held[G]) -> None:
        """Make a complete group available to the next steps."""
        self.window.add(held.version)
        self.ready.put(self._sampling(held, self.random), held)

    def _stale(self, tokens: int) -> Outcome:
        self.counters.discarded_stale += 1
        self.counters.tokens_discarded_stale += tokens
        return Outcome.STALE

    # --- training

    def check_step(self, step: int) -> None:
        """Raise `UsageError` if `step` already has its groups, or is after the end of the run."""
        if step < self.window.next_step:
            raise UsageError(
                f"step {step} already has its groups: the next is {self.window.next_step}",
                fix="`fetch` returns them again",
            )
        if self.settings.steps is not None and step >= self.settings.steps:
            raise UsageError(f"there is no step {step}: the run has {self.settings.steps}, counted from 0")

    def take(self, step: int) -> Reservation | None:
        """Hand out the groups of `step`, in order of admission; None if they are not available yet."""
        self.check_step(step)
        self.evict(step)
        quotas = self.window.quotas()
        if not self.enough() or self.late_version(quotas) is not None:
            return None
        size = self.settings.per_step
        picked = self.ready.pick(min(size, len(self.ready)), quotas)
        for held in picked:
            self.window.remove(held.version)
        picked += self.used.pick(size - len(picked))
        picked.sort(key=lambda held: held.index)
        for held in picked:
            held.uses += 1
        self.in_training[step] = picked
        self.window.next_step = step + 1
        self._drop_old_used()
        if self.window.overdue():
            self.drop_old()  # defensive: the quotas leave no overdue group
        reserved = Reservation.of(step, picked)
        self.counters.max_staleness = max(self.counters.max_staleness, *reserved.staleness)
        return reserved

    def enough(self) -> bool:
        """Whether there are enough groups for the next step: new ones, and used ones for the rest."""
        return len(self.ready) >= self._new_per_step and len(self.ready) + len(self.used) >= self.settings.per_step

    def late_version(self, quotas: list[tuple[int, int]]) -> int | None:
        """The first version with fewer complete groups than its quota, or None."""
        if not self.rolling:
            return None
        complete, versions = 0, deque(sorted(self.window.pending))
        for version, count in quotas:
            while versions and versions[0] <= version:
                complete += self.ready.count(versions.popleft())
            if complete < count:
                return version
        return None

    def batch(self, step: int) -> Batch[G]:
        """The groups handed out for `step`; `UsageError` if there are none or they are finished."""
        held = self._given(step)
        return Batch(Reservation.of(step, held), [each.group for each in held])

    def _given(self, step: int) -> list[Held[G]]:
        if step not in self.in_training:
            steps = ", ".join(map(str, sorted(self.in_training))) or "none"
            raise UsageError(f"no groups are in training for step {step}", fix=f"steps in training: {steps}")
        return self.in_training[step]

    def undo_admit(self, ticket: Ticket) -> None:
        """Take back a ticket whose caller was cancelled; the next admission reuses its index."""
        self._end_rollout(ticket, "taken back")
        heapq.heappush(self.again, ticket.index)

    def undo_take(self, step: int) -> None:
        """Make the groups of `step`, the last one handed out, ready again after its caller was cancelled."""
        groups = self._given(step)
        self.window.next_step = step
        del self.in_training[step]
        for held in groups:
            self.hand_back(held)

    def hand_back(self, held: Held[G]) -> None:
        """Return a group that was handed out but not trained on to the groups that are available."""
        held.uses -= 1
        if held.uses:
            self._keep(held)
        else:
            self.put_ready(held)

    def release(self, version: int) -> None:
        """Set the generators' policy version to `version` and finish the groups of earlier steps."""
        window = self.window
        if not window.generator_version <= version <= window.next_step:
            raise UsageError(
                f"version {version} can't be released: the current version is {window.generator_version}, "
                f"and steps up to {window.next_step - 1} have their groups",
                fix="release(step + 1) when the weights of that step have reached the generators",
            )
        window.generator_version = version
        self.finish(version)

    def finish(self, version: int) -> None:
        """Finish the groups in training for steps before `version`; those that may be used again are kept."""
        for step in sorted(step for step in self.in_training if step < version):
            for held in self.in_training.pop(step):
                self.counters.trained += held.uses == 1
                self.counters.reused += held.uses > 1
                self._keep(held)
        self._trim()

    # --- re-use

    def _usable(self, held: Held[G]) -> bool:
        """Whether the next step could use the group again."""
        return held.uses < self.settings.replay.max_uses and self.window.steps_left(held.version) > 0

    def _expected_again(self) -> int:
        """Number of used groups available to the next step once the groups in training are released."""
        count = len(self.used) + sum(map(self._usable, self._handed_out()))
        capacity = self.settings.replay.capacity
        return count if capacity is None else min(count, capacity)

    def _keep(self, held: Held[G]) -> None:
        if self._usable(held):
            self.used.put(self._sampling(held, self.random), held)

    def _trim(self) -> None:
        """Drop used groups in excess of the capacity."""
        capacity = self.settings.replay.capacity
        excess = 0 if capacity is None else max(0, len(self.used) - capacity)
        if excess:
            worst = heapq.nsmallest(excess, self.used, key=lambda held: (self._eviction(held), held.index))
            self.used.drop({held.index for held in worst})
        self.counters.evicted += excess

    def _drop_old_used(self) -> None:
        if self.used:
            self.used.drop_before(self.window.next_step - self.window.max_off_policy_steps)

    def _handed_out(self) -> Iterable[Held[G]]:
        return (held for batch in self.in_training.values() for held in batch)

    # --- eviction

    def evict(self, step: int) -> int:
        """Advance to `step` and drop groups that can't be trained within the bound; return how many were pending."""
        if step <= self.window.next_step:
            return 0
        self.window.next_step = step
        return self.drop_old()

    def drop_old(self) -> int:
        """Drop used groups that are too old, and pending ones too late to train; return the number of the latter."""
        self._drop_old_used()
        excess = self.window.excess()
        for version, count in excess:
            rolling = [ticket for ticket in self.rolling.values() if ticket.version == version][-count:]
            for ticket in rolling:  # the last admitted: least work is lost
                self.late[ticket.index] = self.rolling.pop(ticket.index)
            for held in self.ready.drop_last(version, count - len(rolling)):
                self._stale(held.tokens)
            self.window.remove(version, count)
        return sum(count for _, count in excess)

    def clear(self) -> None:
        """Drop every complete group that has not been handed out."""
        for held in self.ready:
            self.window.remove(held.version)
        self.counters.cleared += len(self.ready)
        self.ready.clear()
        self.used.clear()

    # --- statistics, saving and restoring

    def stats(self) -> BufferStats:
        """Counters and current contents."""
        handed_out = list(self._handed_out())
        unfinished = [held.index for held in [*self.ready, *handed_out]]
        return BufferStats(
            **self.counters.counts(),
            rolling=len(self.rolling) + len(self.late),
            ready=len(self.ready),
            in_training=len(handed_out),
            kept=len(self.used),
            tokens_held=sum(held.tokens for held in [*self.ready, *self.used, *handed_out]),
            first_open=min([*self.rolling, *self.late, *self.again, *unfinished], default=self.next_index),
            waiting_for=self.missing(),
        )

    def missing(self) -> str | None:
        """Description of what blocks the next step; None if nothing does or there is no next step."""
        if self.settings.steps is not None and self.window.next_step >= self.settings.steps:
            return None
        if not self.enough():
            used = len(self.used)
            usable = f"{len(self.ready)} ready" + (f" and {used} to reuse" if used else "")
            return f"groups: {usable}, {len(self.rolling)} in progress, {self.settings.per_step} needed"
        late = self.late_version(self.window.quotas())
        if late is None:
            return None
        index = min(ticket.index for ticket in self.rolling.values() if ticket.version <= late)
        return f"group {index}, to keep the staleness bound"

    def restart(self, version: int) -> None:
        """Restart at policy version `version`, with no rollout in progress.

        The next admissions repeat the lost rollouts with the same indices. Groups handed out for steps from `version`
        on, which these weights don't contain, become available again.
        """
        self.window.next_step = self.window.generator_version = version
        for step in sorted(step for step in self.in_training if step >= version):
            for held in self.in_training.pop(step):
                self.hand_back(held)
        self.finish(version)
        for ticket in self.rolling.values():
            self.window.remove(ticket.version)
        self.counters.discarded += len(self.late)
        self.again = sorted([*self.again, *self.rolling])
        self.rolling, self.late = {}, {}
        self.drop_old()

    def state_dict(self, trained: int = 0) -> dict[str, Any]:
        """Complete state, including the random state; groups of steps before `trained` count as finished."""
        counters, in_training = self.counters.counts(), self.in_training
        if self.settings.replay.max_uses == 1:
            in_training = {step: batch for step, batch in self.in_training.items() if step >= trained}
            counters["trained"] += sum(len(batch) for step, batch in self.in_training.items() if step < trained)
        return {
            "format": FORMAT,
            "generator_version": self.window.generator_version,
            "next_step": self.window.next_step,
            "next_index": self.next_index,
            "rolling": [[ticket.index, ticket.version] for ticket in self.rolling.values()],
            "late": [[ticket.index, ticket.version] for ticket in self.late.values()],
            "again": sorted(self.again),
            "ready": _pool_state(self.ready),
            "kept": _pool_state(self.used),
            "in_training": {step: [_held_state(held) for held in batch] for step, batch in in_training.items()},
            "counters": counters,
            "random": _as_lists(self.random.getstate()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state written by `state_dict`. With the same settings the buffer continues identically.

        With other settings (more steps, another bound), groups that violate them are dropped and counted.
        """
        if state.get("format") != FORMAT:
            raise UsageError(
                f"the replay buffer's state has format {state.get('format')!r}, this version reads {FORMAT}",
                fix="continue from the checkpoint without it, or with the version that wrote it",
            )
        self.window.generator_version = state["generator_version"]
        self.window.next_step = state["next_step"]
        self.next_index = state["next_index"]
        self.rolling = _tickets(state["rolling"])
        self.late = _tickets(state["late"])
        self.again = sorted(state["again"])
        self.ready, self.used = _pool(state["ready"]), _pool(state["kept"])
        self.in_training = {int(step): [Held(*held) for held in batch] for step, batch in state["in_training"].items()}
        self.counters = Counters(**state["counters"])
        version, internal, gauss = state["random"]
        self.random.setstate((version, tuple(internal), gauss))
        rolling = (ticket.version for ticket in self.rolling.values())
        self.window.set_pending([*rolling, *(held.version for held in self.ready)])
        self.drop_old()


def _pool_state(pool: Pool[G]) -> list[list[Any]]:
    return [[key, *_held_state(held)] for key, held in pool.entries()]


def _held_state(held: Held[G]) -> list[Any]:
    return [getattr(held, name) for name in Held.__slots__]


def _pool(state: Iterable[list[Any]]) -> Pool[Any]:
    pool: Pool[Any] = Pool()
    for key, *held in state:
        pool.put(key, Held(*held))
    return pool


def _tickets(state: Iterable[list[int]]) -> dict[int, Ticket]:
    return {index: Ticket(index, version) for index, version in state}


def _as_lists(value: Any) -> Any:
    return [_as_lists(item) for item in value] if isinstance(value, tuple) else value
