"""Saving a run, and continuing it: after the death of an actor, and in another session.

An actor that dies is restarted, and the run continues from its newest checkpoint. Generators and rollout workers heal
by themselves (`trainers.actors.replicas`); `Healing` is about the trainer, the buffer, the reference and the weight
store, whose state the rest of the run depends on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from forge_env.run.outcome import save_progress
from trainers.loop.checkpoints import Checkpoints, Saved
from trainers.loop.stack import RoleDiedError, Stack, unless_stopped
from trainers.rollout.types import Totals

if TYPE_CHECKING:
    from trainers.loop.system import System

MAX_DEATHS_IN_A_ROW = 3
"""Actor deaths that a run survives without completing a training step in between."""
REPORTS_S = 1.0
"""Seconds that a checkpoint waits for the reports of groups that the buffer already holds."""
LAST_SAVE_S = 60.0
"""Seconds that saving a checkpoint may take when a failure ends the run."""
logger = logging.getLogger(__name__)


class Healing:
    """Checkpoints of a run, and its recovery from the death of an actor.

    Attributes:
        unsettled: whether trainer or buffer may not be at `System.step`: during a training step, and while both are
            being restored.
        at_rest: state collected when no group was in progress; only synchronous mode has such a moment, in every step.
    """

    def __init__(self, system: System, stack: Stack) -> None:
        self._system, self._stack, self._run = system, stack, system.run
        self.checkpoints = Checkpoints(system.run)
        self.unsettled = False
        self.at_rest: Saved | None = None
        self._beginning: Saved
        """State of the session's beginning."""
        self._deaths_in_a_row = 0
        """Actor deaths since the last training step."""
        self._dead: set[str] = set()
        """Roles whose actors must be restarted."""

    # --- deaths

    async def run(self, train: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `train` to its end. Any failure but an actor's death ends it.

        A dead actor is restarted, and the run continues from the newest checkpoint, or from its beginning without one.
        After a stop request nothing is restarted: the run ends with its last checkpoint.
        """
        self._beginning = await self._stack.unless_one_dies(self.collect())
        work = train
        while True:
            try:
                await self._stack.unless_one_dies(work())
                if work is train or self._dead:
                    return
                work = train
            except RoleDiedError as death:
                if not self._dead or death.role in self._dead:  # otherwise one cause killed several: a lost host
                    self._deaths_in_a_row += 1
                if self._deaths_in_a_row > MAX_DEATHS_IN_A_ROW:
                    raise
                self._dead.add(death.role)
                then = "The run ends without it" if self._run.stop.is_set() else "It is being restarted"
                self._run.warn(f"{death.message}. {then}")
                work = self._recover
            except BaseException:  # save for any cause, if the trainer is between two steps
                await self.save_at_the_end()
                raise

    async def save_at_the_end(self) -> None:
        """Save the current step before the run ends with an error, if trainer and buffer agree on it."""
        if self.unsettled or not self._system.step:
            return
        try:
            async with asyncio.timeout(LAST_SAVE_S):
                await self.save(patient=False)
        except Exception:  # boundary: it must not mask the error that ended the run
            logger.exception("step %d could not be saved", self._system.step)

    async def _recover(self) -> None:
        """Save a checkpoint if possible, then restart dead actors unless the run was asked to stop."""
        await self.checkpoints.settled()
        if self.unsettled:  # its progress is unknown, and it may still wait for the dead actor
            self._dead.add("trainer")
        if not self._dead & {"trainer", "buffer"}:
            await self._system.record.log_pending(self._system.step)
            await self.save(patient=False)  # so that no step is lost
        if not self._run.stop.is_set():
            await unless_stopped(self._run, self._start_again())

    async def _start_again(self) -> None:
        """Restart dead actors and restore everything from the newest checkpoint, or from the session's beginning."""
        if not self.checkpoints.step:
            self._dead.add("trainer")  # without a checkpoint, only a new trainer has the initial weights
        system = self._system
        before, self.unsettled = system.step, True
        for role in sorted(self._dead):
            await self._stack.restart(role)
        reference = system.trainer.reference
        await system.rollouts.reconnect(system.buffer, reference and reference.actor)
        await system.configure()
        await asyncio.to_thread(self.checkpoints.verify)
        await self._restore(await self.checkpoints.restore(system.trainer) or self._beginning)
        self.unsettled = False
        self._dead.clear()  # last: if another actor dies during the restore, these are restarted too
        lost = f"; {before - system.step} steps are trained again" if before > system.step else ""
        self._run.note(f"Continuing after step {system.step}{lost}")

    def step_trained(self) -> None:
        """Note that a training step is complete: trainer and buffer agree, and deaths before it no longer count."""
        self.unsettled, self._deaths_in_a_row = False, 0

    # --- checkpoints

    async def save_if_due(self) -> None:
        """Start a checkpoint of the current step if one is due and none is being written."""
        if not self.checkpoints.due(self._system.step) or self.checkpoints.busy:
            return
        with self._system.account.during("save"):
            await self.checkpoints.begin(self._system.trainer, self.at_rest or await self.collect())
        self._save_counts()

    async def save(self, *, patient: bool = True) -> None:
        """Save a checkpoint of the current step and wait for it."""
        system = self._system
        with system.account.during("save"):
            await self.checkpoints.settled()
            at_rest = self.at_rest if self.at_rest is not None and self.at_rest.step == system.step else None
            await self.checkpoints.save(system.trainer, at_rest or await self.collect(), patient=patient)
        self._save_counts()

    def _save_counts(self) -> None:
        """Write the run's counts, for a process that continues this one or finds it complete."""
        self._system.record.summarise(self._system.step)
        save_progress(self._run)

    async def collect(self) -> Saved:
        """Collect a checkpoint's state besides the trainer's: the buffer's first, then the rest, consistent with it."""
        system = self._system
        first_open, buffer = (await system.buffer.stats()).first_open, await system.buffer.state_dict(system.step)
        # groups that will be rolled out again
        lost = {index for index, _ in [*buffer["rolling"], *buffer["late"]]} | set(buffer["again"])

        def known(position: int) -> bool:
            return bool(position < buffer["next_index"]) and position not in lost

        with suppress(TimeoutError):  # workers report a group right after adding it to the buffer
            async with asyncio.timeout(REPORTS_S):
                await system.all_settled(known)
        results = {position: result for position, result in system.results.items() if known(position)}
        state = {  # collected after the buffer's, so that it covers every admitted position
            "order": system.rollouts.order.state_dict(first_open),
            "results": sorted(results.items()),
            "set_aside": sorted(system.rollouts.set_aside),
            "workers": system.rollouts.state_dict(),
            "totals": asdict(system.rollouts.totals_of(known, first_open)),
            "in_a_row": [system.lost_in_a_row, system.dropped_in_a_row],
            "algorithm": system.algorithm.state_dict(),
        }
        return Saved(system.step, state, buffer)

    async def resume(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        saved = await self.checkpoints.restore(self._system.trainer)
        if saved is None:
            self._system.rollouts.count_from(Totals())
            return
        self._run.note(f"Resuming after step {saved.step}")
        await self._restore(saved)

    async def _restore(self, saved: Saved) -> None:
        """Restore everything but the trainer from `saved`; the trainer already has its weights."""
        system = self._system
        system.rollouts.count_from(Totals(**saved.state["totals"]))
        system.step = saved.step
        self.at_rest = system.record.pending = None
        system.contract.begin_again()
        system.under_way.clear()
        self._run.saved(system.step)
        system.rollouts.order.load_state_dict(saved.state["order"])
        await system.rollouts.load_state_dict(saved.state["workers"], set(saved.state["set_aside"]))
        system.results = {int(position): float(result) for position, result in saved.state["results"]}
        system.lost_in_a_row, system.dropped_in_a_row = saved.state["in_a_row"]
        system.algorithm.load_state_dict(saved.state["algorithm"])
        await system.buffer.load_state_dict(saved.buffer)
        await system.buffer.restart(system.step)
        system.record.counters = await system.buffer.stats()
        if system.trainer.reference is not None:
            system.trainer.reference.version = 0  # a lagging copy loads the next weights that are pushed
        published = await system.trainer.push_weights(system.step)
        await system.generators.set_back(system.step, published)
