"""The replay buffer for callers in the same process: the core, with asynchronous waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from forge_env.run.account import Account
from forge_env.trajectory import Segment
from trainers.buffer.core import BufferCore
from trainers.buffer.sequences import BatchSizes, Computed, at_targets, in_batch
from trainers.buffer.types import Batch, BufferSettings, BufferStats, G, Outcome, Reservation, Ticket

P = ParamSpec("P")
T = TypeVar("T")


def _changing(
    method: Callable[Concatenate[BufferCore[Any], P], T],
) -> Callable[Concatenate[LocalReplayBuffer[Any], P], Coroutine[Any, Any, T]]:
    """Method that changes the core without waiting, and then wakes the calls that wait for a change."""

    async def change(self: LocalReplayBuffer[Any], /, *args: P.args, **options: P.kwargs) -> T:
        result = method(self._core, *args, **options)
        self._changed()
        return result

    change.__name__, change.__doc__ = method.__name__, method.__doc__
    return change


class LocalReplayBuffer(Generic[G]):
    """The replay buffer of one event loop. Waiting calls are woken by changes of the buffer; nothing polls.

    `trainers.buffer.actor` derives an actor and its client from it. Cancelling a waiting call takes nothing.

    buffer = LocalReplayBuffer(BufferSettings(per_step=24, max_off_policy_steps=2))
    ticket = await buffer.admit()                    # rollout worker, once per group
    await buffer.add(group, ticket)
    batch = await buffer.sample(version)             # trainer, once per step
    await buffer.release(version + 1)                # once the weights trained on it are in the generators
    """

    def __init__(self, settings: BufferSettings) -> None:
        self._core: BufferCore[G] = BufferCore(settings)
        self._account = Account("buffer", "wait for calls")
        self._waiting: dict[asyncio.Future[None], None] = {}  # in order of arrival
        self._opened: dict[int, list[Segment]] = {}
        """Token sequences of steps in training, by step."""

    async def _change(self) -> None:
        """Wait for the next change of the buffer."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[waiting] = None
        try:
            await waiting
        finally:
            del self._waiting[waiting]

    def _changed(self) -> None:
        self._opened = {step: segments for step, segments in self._opened.items() if step in self._core.in_training}
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    async def admit(self) -> Ticket:
        """Admit a new group, waiting until there is room."""
        while (ticket := self._core.admit()) is None:
            await self._change()
        return ticket

    async def add(self, group: G, ticket: Ticket | None = None) -> Outcome:
        """Add the complete group of `ticket`. Without a ticket, wait until the group can be admitted.

        Raises:
            TicketDoneError: the ticket's group is not in progress (added twice, discarded, lost in a restart).
        """
        if ticket is None:
            while (outcome := self._core.add_unasked(group)) is None:
                await self._change()
        else:
            with self._account.during("add"):
                outcome = self._core.add(group, ticket)
        self._changed()
        return outcome

    async def in_progress(self, ticket: Ticket) -> bool:
        """Whether the group of `ticket` has been neither added nor discarded."""
        return self._core.in_progress(ticket)

    async def sample(self, curr_policy_version: int) -> Batch[G]:
        """Return the groups that the trainer at this policy version trains on, waiting until they are available.

        Raises:
            UsageError: the step already has its groups, or is after the end of the run.
        """
        return await self.fetch((await self.reserve(curr_policy_version)).step)

    async def reserve(self, curr_policy_version: int) -> Reservation:
        """Choose groups as `sample` does, but leave their data in the buffer until `fetch`."""
        self._core.check_step(curr_policy_version)
        if self._core.evict(curr_policy_version):
            self._changed()  # dropped groups may have made room
        while True:
            with self._account.during("sample"):
                reserved = self._core.take(curr_policy_version)
            if reserved is not None:
                self._changed()
                return reserved
            await self._change()

    async def fetch(self, step: int) -> Batch[G]:
        """Return the groups handed out for `step`. Can be repeated until they are released.

        Raises:
            UsageError: no groups are in training for that step.
        """
        with self._account.during("sample"):
            return self._core.batch(step)

    async def batch_sizes(self, step: int, computed: Computed = "all") -> BatchSizes:
        """Sizes of the segments of `step`, with the segments that `computed` selects."""
        return BatchSizes.of(self._open(step), computed)

    async def sequences(self, step: int, numbers: Sequence[int]) -> list[Segment]:
        """Return the token sequences of `step` with these numbers. Can be repeated until they are released."""
        opened = self._open(step)
        return [opened[number] for number in numbers]

    async def set_reference(self, step: int, logprobs: Mapping[int, NDArray[np.float32]]) -> None:
        """Store a reference model's log-probabilities of the target tokens of sequences of `step`, by number."""
        opened = self._open(step)
        for number, values in logprobs.items():
            opened[number].ref_logprobs = at_targets(opened[number], values)

    def _open(self, step: int) -> list[Segment]:
        if step not in self._opened:
            with self._account.during("sample"):
                self._opened[step] = in_batch(group.segments() for group in self._core.batch(step).groups)
        return self._opened[step]

    async def release(self, version: int) -> None:
        """Finish the groups of steps before `version`, which the generators have loaded, and free their slots.

        Raises:
            UsageError: the version is lower than the current one, or higher than the steps handed out can produce.
        """
        with self._account.during("release"):
            self._core.release(version)
        self._changed()

    discard = _changing(BufferCore.discard)
    evict = _changing(BufferCore.evict)
    clear = _changing(BufferCore.clear)
    restart = _changing(BufferCore.restart)
    load_state_dict = _changing(BufferCore.load_state_dict)

    async def undo(self, granted: Ticket | Reservation | Batch[G]) -> None:
        """Take back a result granted to a cancelled caller, as if the call had never been made."""
        if isinstance(granted, Ticket):
            self._core.undo_admit(granted)
        else:
            self._core.undo_take(granted.step)
        self._changed()

    async def stats(self) -> BufferStats:
        """Counters and current contents."""
        return replace(self._core.stats(), seconds=self._account.seconds())

    async def state_dict(self, trained: int = 0) -> dict[str, Any]:
        """Complete state, including the random state; groups of steps before `trained` count as finished."""
        with self._account.during("save"):
            return self._core.state_dict(trained)
