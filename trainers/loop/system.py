"""The loops of a training run, which an algorithm (for example `trainers.algorithms.grpo`) is written with.

    loop         consumes                         produces                            unblocked by
    generate     slots of the buffer, tasks       tickets for the workers             groups released or discarded
    a worker     a ticket of version v            a group in the buffer, a report     a generator with version >= v
    learn        a batch of groups                version c + 1 of the weights        the last group that is due
    publish      version c + 1 of the trainer     generators with it, released slots  arrival of version c
    evaluation   held weights of a generator      a score                             a generator that can be held
    checkpoint   a copy of the trainer's state    a folder                            room on the disk

Those of the controller run in one task group: the first failure cancels the rest and ends the run with its cause,
except for the death of an actor (`trainers.loop.healing`). Nothing polls. The buffer alone limits how far `generate`
runs ahead (`trainers.buffer.window`), only one version of the weights is in transit, and an evaluation or checkpoint
that is due during the previous one is skipped. `trainers.loop.record` logs the steps, `trainers.loop.contract` checks
them.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from forge_env.concurrency import gather_or_cancel
from forge_env.config.recipe import RunConfig
from forge_env.errors import ContractError, ForgeError
from forge_env.evaluation.estimates import Estimate
from forge_env.run import Run
from forge_env.run.recording import settings
from forge_env.visible import one_line
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.types import Reservation, Ticket
from trainers.generator.pool import GeneratorPool
from trainers.loop.contract import Contract
from trainers.loop.evaluation import Evaluator
from trainers.loop.healing import Healing
from trainers.loop.prepare import Actors
from trainers.loop.record import Record, split_audit
from trainers.loop.stack import Stack, unless_stopped
from trainers.loop.status import Status
from trainers.loop.trainer import TrainerHandle
from trainers.rollout.types import Fate, GroupReport, Preparation

if TYPE_CHECKING:
    from trainers.weights.checksum import Sums
    from trainers.weights.transport import Published

MAX_LOST_IN_A_ROW = 20
PATIENCE = 20
"""Consecutive batches' worth of groups dropped by the filter after which the run fails."""
logger = logging.getLogger(__name__)


class Algorithm(ABC):
    """Base class of training algorithms: how to sample groups and learn from them. Each session creates an instance."""

    @abstractmethod
    def __init__(self, system: System) -> None: ...

    preparation: ClassVar[type[Preparation] | None] = None
    """Class that rollout workers apply to each group."""

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Reject a recipe that the algorithm can't run, before anything is started."""
        return

    @abstractmethod
    async def generate(self) -> None:
        """Add groups to the buffer until cancelled."""

    @abstractmethod
    async def learn(self) -> None:
        """Train until `System.batches` ends."""

    def state_dict(self) -> dict[str, Any]:
        """Return the algorithm's state for a checkpoint, as JSON."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        return


class System:
    """Interface between an algorithm and the actors of a run, from the first rollout to the last training step."""

    def __init__(self, run: Run, stack: Stack, actors: Actors) -> None:
        self.run = run
        self._stack = stack
        self.config = run.config
        self.trainer, self.generators, self.buffer, self.rollouts = actors
        self.generators.tell = run.warn
        self.evaluator = Evaluator(run, self.rollouts, self.generators)
        self.step = 0
        self.contract = Contract(run, self.trainer, self.generators, self.buffer)
        self.account = run.account("trainer", "start")
        self._status = Status(run, self.generators, self.rollouts, self.account, self.trainer.reference)
        self.healing = Healing(self, stack)
        self.record = Record(
            run,
            self.buffer,
            self.rollouts,
            [lambda: self._publisher.take_metrics(), self._status.metrics, stack.host_metrics],
        )
        self.algorithm: Algorithm
        self.lost_in_a_row = self.dropped_in_a_row = 0
        self._warned_late = False
        """Whether a warning about dropped late episodes was logged."""
        self._lost_warnings: dict[str, str] = {}
        """Warnings about lost groups by kind of reason: an identical text is shown once per run and counted."""
        self.results: dict[int, float] = {}
        """Success of groups by position, not yet passed to the task order."""
        self.under_way: set[int] = set()
        """Positions of groups that were admitted and are not settled yet."""
        self._changed = asyncio.Event()
        self._evaluation: asyncio.Task[Estimate | None] | None = None

    # --- methods for algorithms

    async def admit(self) -> Ticket:
        """Wait for a buffer slot and for free memory, then return the ticket of a group to roll out."""
        ticket = await self.buffer.admit()
        self.under_way.add(ticket.index)
        await self.rollouts.gate.room()
        return ticket

    async def settle(self, ticket: Ticket, report: GroupReport) -> None:
        """Process the report of a group: if it was lost or dropped, free its slot for a replacement."""
        self.contract.opened(report.opening)
        if report.totals.episodes_late and self.config.grpo.on_timeout == "leave_out" and not self._warned_late:
            self._warned_late = True
            self.run.warn(
                f"{report.totals.episodes_late} episodes of a group missed grpo.group_timeout_s="
                f"{self.config.grpo.group_timeout_s:g} and were dropped, so its baseline is that of faster episodes "
                "(episode/late counts them); raise it, or set grpo.on_timeout to zero or wait"
            )
        if report.fate == Fate.LOST:  # infrastructure or the environment failed, so no reward of 0 is recorded
            await self._replace(ticket, report)
        elif report.fate == Fate.DROPPED:
            await self._drop(ticket)
        else:
            self.lost_in_a_row = self.dropped_in_a_row = 0
        if report.fate != Fate.KEPT:
            self.run.not_trained(ticket.index, report.fate, report.why_lost[0])
        if report.fate == Fate.STALE:
            self.run.warn("a group was dropped as stale: this should not happen, please report it")
        if report.success is not None:  # recorded last and once, after the buffer knows the outcome
            self.results[ticket.index] = report.success
        self.under_way.discard(ticket.index)
        self._changed.set()

    async def _replace(self, ticket: Ticket, report: GroupReport) -> None:
        reason, fix = report.why_lost
        logger.info("group %d was replaced: %s", ticket.index, reason)
        self.lost_in_a_row += 1
        message = f"no episode of a group can be trained on, so the group was replaced: {one_line(reason)}; {fix}"
        self.run.warn(self._lost_warnings.setdefault(reason.partition(":")[0], message))
        if self.lost_in_a_row >= MAX_LOST_IN_A_ROW:
            text = f"{MAX_LOST_IN_A_ROW} groups in a row could not be trained on; the last because: {reason}"
            raise ForgeError(text, fix=fix)
        await self.buffer.discard(ticket)

    async def _drop(self, ticket: Ticket) -> None:
        self.lost_in_a_row = 0
        self.dropped_in_a_row += 1
        if self.dropped_in_a_row >= PATIENCE * self.config.grpo.groups_per_step:
            raise ForgeError(
                f"{self.dropped_in_a_row} groups in a row were dropped by grpo.filter "
                f"({self.config.grpo.filter.name}): there is nothing to train on",
                fix="choose tasks that are sometimes solved (tasks.order=curriculum), or set grpo.filter.name=all",
            )
        await self.buffer.discard(ticket)

    async def batches(self) -> AsyncIterator[Reservation]:
        """Yield the batch of each step until the recipe's last step or until the run is asked to stop."""
        steps = self.config.grpo.steps
        while self.step < steps and not self.run.stop.is_set():
            self.account.enter("wait for episodes")
            self.run.status(waiting={"trainer": "episodes"})
            batch = await unless_stopped(self.run, self.buffer.reserve(self.step))
            if batch is None:
                return
            self.run.status(waiting={})
            yield batch
        if self.step >= steps:
            self.run.note(f"Reached training limit ({steps} steps)")

    async def train(self, batch: Reservation) -> dict[str, float]:
        """Update the weights from a batch and return metrics; the data goes directly from the buffer to the trainer."""
        self.account.enter("book-keeping")
        await self.contract.before_training(batch)
        self.healing.unsettled = True
        logger.info("step %d trains groups %s", batch.step + 1, sorted(batch.indices))
        try:
            async with self._alone():
                trained = await self.trainer.train_on(self.buffer, batch, self.account)
        except ForgeError as error:  # raised by the trainer itself, between two updates: its state is consistent
            self.healing.unsettled = False
            if isinstance(error, ContractError):
                raise self.contract.tokens_differ(error) from error
            raise
        fingerprint = await self.trainer.fingerprint()
        audit, metrics = split_audit(trained)
        self.step = batch.step + 1
        self.healing.step_trained()
        self.record.pending, self.record.fingerprint = (batch, metrics), fingerprint
        self.contract.trained(batch.groups, metrics | audit)
        self.account.enter("book-keeping")
        if self.synchronous:  # every group is in the batch or gone; wait for the last reports
            await self.all_settled()
        for position in sorted(self.results):  # between steps and sorted, so that timing has no influence
            self.rollouts.order.record(position, self.results[position])
        self.results.clear()
        if self.synchronous:
            self.healing.at_rest = await self.healing.collect()
        for what, name in (("updates", "skipped_updates"), ("sequences", "sequences_not_finite")):
            if count := int(metrics.get(f"trainer/{name}", 0)):
                self.run.warn(f"{count} {what} of step {batch.step + 1} were skipped: loss or gradient was not finite")
        return metrics

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Let the generators sleep inside the block, so that the trainer has the GPU or CPUs, if the recipe says so."""
        if not self.config.generator.sleep:
            yield
            return
        self.account.enter("wait for generators")
        async with self.generators.asleep():
            yield
            self.account.enter("wait for generators")
            if self.config.trainer.with_gpus:
                await self.trainer.release_memory()

    async def publish(self, version: int) -> None:
        """Push the weights to the generators as `version` if a push is due, after the previous version has arrived.

        A push is due every `grpo.sync_interval` versions, and for a version that is evaluated. After a stop request
        none is, because the weights would not be used.
        """
        every = self.config.evaluation.every
        evaluated = version >= self.config.grpo.steps or (every and version % every == 0)
        if version % self.config.grpo.sync_interval and not evaluated:
            return
        await self._settled()
        if self.run.stop.is_set():
            return
        self.account.enter("push weights")
        await self._publisher.publish(version)
        self.account.enter("book-keeping")

    async def finish_step(self, batch: Reservation, metrics: dict[str, float]) -> None:
        """Log a completed step, and start a held-out evaluation and a checkpoint if they are due."""
        await self.record.log(self.step, batch, metrics)
        every, last = self.config.evaluation.every, self.step >= self.config.grpo.steps
        if every and self.step % every == 0 and not last:
            self._evaluate_beside()
        if not last:
            await self.healing.save_if_due()

    async def all_settled(self, of: Callable[[int], bool] = lambda position: True) -> None:
        """Wait until no group is in progress whose position satisfies `of`."""
        while any(map(of, self.under_way)):
            self._changed.clear()
            await self._changed.wait()

    # --- a session

    async def run_to_end(self, algorithm: Algorithm) -> None:
        """Run an algorithm until the recipe's last step or a stop request, report status meanwhile, and save."""
        self.algorithm = algorithm
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._status.report(self.buffer))
            await self._run_to_end()
            watching.cancel()

    async def _run_to_end(self) -> None:
        config = self.config
        await unless_stopped(self.run, self._stack.unless_one_dies(self._begin()))
        if self.run.stop.is_set():
            self.run.note("stopped before training began: nothing to save")
            return
        self.run.stage("training", f"{config.grpo.steps} steps")
        try:
            await self.healing.run(self._train_and_score)
            self.run.check_folder()
            if self.run.gone is not None:  # earlier checkpoints were removed with the folder
                await self.healing.save_at_the_end()
        finally:
            self.record.summarise(self.step)

    async def _begin(self) -> None:
        self.run.saved(self.healing.checkpoints.step)
        await self.configure()
        if self.run.resume:
            await self.healing.resume()
        if not self.step:
            await self._evaluate_all("held-out score before training")

    async def configure(self) -> None:
        """Configure the trainer for the recipe's steps."""
        from trainers.losses.load import make_loss  # takes seconds: torch

        config = self.config
        await self.trainer.configure(
            config.trainer.optimizer,
            loss=make_loss(config.grpo.loss),
            steps=config.grpo.steps,
            microbatch_tokens=config.trainer.microbatch_tokens,
            share_prefixes=config.trainer.share_prefixes,
            minibatches=config.trainer.minibatches,
            temperature=config.grpo.temperature,
            threads=config.trainer.threads,
        )

    async def _train_and_score(self) -> None:
        """Train, then score the last policy.

        Dead actors are restarted during final scoring too: a new generator gets its weights from the trainer.
        """
        await self._side_by_side()
        if self.step >= self.config.grpo.steps:
            await self._evaluate_all("held-out score after training")

    async def _side_by_side(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._tasks = group
            self._publisher = Publisher(self.trainer, self.generators, self.buffer, group, self.contract)
            await self.contract.before_weights()
            await self.record_beginning()
            self.healing.checkpoints.start_clock()
            self._evaluate_what_was_lost()
            generating = group.create_task(self.algorithm.generate())
            await self.algorithm.learn()
            generating.cancel()
            await asyncio.wait([generating])
            await self.healing.save()  # before evaluations are awaited: one that hangs must not lose trained steps
            await self._settled()
            self._publisher.close()
            self.contract.close()

    async def record_beginning(self) -> None:
        """Record what a replay of the steps from here on needs."""
        folder, root = self.trainer.folder, self.run.folder.root
        model = folder.relative_to(root) if folder.is_relative_to(root) else folder.absolute()
        beginning = await self.trainer.fingerprint()
        self.run.began(self.step, beginning, model=str(model), recipe=settings(self.config))

    async def _settled(self) -> None:
        """Wait until the pushed version has arrived, or until the run is asked to stop."""
        self.account.enter("wait for generators")
        await unless_stopped(self.run, self._publisher.settled())
        self.account.enter("book-keeping")

    async def _evaluate_all(self, what: str) -> None:
        self.run.stage("evaluation", what)
        await unless_stopped(self.run, self.evaluator.evaluate_all(self.step))

    def _evaluate_beside(self) -> None:
        """Score the held-out split while training continues; one evaluation at a time, in order."""
        section, step = self.config.evaluation, self.step
        if self._evaluation is not None and not self._evaluation.done():
            self.run.warn("an evaluation was skipped: the previous one was still running. Raise evaluation.every")
            return

        async def evaluate() -> Estimate | None:
            await self._publisher.settled()
            result = await self.evaluator.evaluate(step, section.split, section.num_tasks)
            self.healing.checkpoints.prune()
            return result

        # cancelled on a stop request: it holds weights, which delays the arrival of newer ones
        self._evaluation = self._tasks.create_task(unless_stopped(self.run, evaluate()))

    def _evaluate_what_was_lost(self) -> None:
        """Repeat the evaluation of the current step if the last session ended before it was scored."""
        section = self.config.evaluation
        scored = any(item.step == self.step and item.split == section.split for item in self.run.state.evaluations)
        if section.every and self.step and self.step % section.every == 0 and not scored:
            self._evaluate_beside()

    @property
    def synchronous(self) -> bool:
        """Whether nothing is sampled during a training step; such runs are reproducible and resume bit for bit."""
        return self.config.grpo.max_off_policy_steps == 0


@dataclass(eq=False)
class Publisher:
    """Publishes policy versions in order, while the trainer computes the next step.

        trainer: train c | snapshot | train c + 1 ........... | snapshot | ...
                             \\ pull -> swap -> release   \\ ...

    The update message to the generators carries the weights' location (`trainers.weights.transport`). Only one version
    is in transit: the next snapshot waits until the previous version has arrived, which a generator that is much slower
    than the others doesn't delay (`trainers.generator.pool`). The buffer's window allows for this: the trainer's
    version is at most one step ahead of the version that has arrived, and that step's groups still hold their slots
    (`trainers.buffer.window`).
    """

    trainer: TrainerHandle
    generators: GeneratorPool
    buffer: LocalReplayBuffer[Any]
    tasks: asyncio.TaskGroup
    contract: Contract
    _under_way: asyncio.Task[None] | None = None
    _metrics: dict[str, float] = field(default_factory=dict)

    async def publish(self, version: int) -> None:
        """Take a snapshot of the weights and start sending it as `version`, after the previous version has arrived."""
        await self.settled()
        logger.info(f"Pushing weights for policy version {version}")
        publishing = await self.trainer.begin_push(version)
        sums = await self.contract.weights_sent()  # before the next step changes them
        self._under_way = self.tasks.create_task(self._carry(version, sums, publishing))

    async def settled(self) -> None:
        """Wait until the version in transit, if any, has arrived."""
        if self._under_way is not None:
            await asyncio.shield(self._under_way)

    def close(self) -> None:
        """Cancel the version in transit, if any."""
        if self._under_way is not None:
            self._under_way.cancel()

    async def _carry(
        self,
        version: int,
        sums: Sums | None,
        publishing: Coroutine[Any, Any, tuple[Published, dict[str, float]]],
    ) -> None:
        published, pushed = await publishing
        swapped, _ = await gather_or_cancel(
            [self.generators.update_weights(version, published), self.trainer.update_reference(version, published)]
        )
        await self.contract.weights_arrived(version, published, sums)
        await self.buffer.release(version)
        self._metrics = {f"weights/{name}": value for name, value in (pushed | (swapped or {})).items()}

    def take_metrics(self) -> dict[str, float]:
        """Return times in seconds and sizes in bytes of the newest version that arrived since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics
