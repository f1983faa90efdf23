"""The training system around an algorithm: actors, time accounts, held-out evaluation, checkpoints, metrics, shutdown.

An algorithm (for example `trainers.algorithms.grpo`) consists of two loops, `generate` and `learn`, which call the
methods of `System`. Both loops run in one task group together with evaluations and status reports: the first failure
cancels the rest and ends the run with its cause.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import forge_env as fe
from forge_env.config.recipe import RunConfig
from forge_env.environment.base import Environment
from forge_env.errors import ContractError, ForgeError, PluginError
from forge_env.evaluation.estimates import Estimate
from forge_env.job.survey import survey
from forge_env.rewards.rubric import reward_definition
from forge_env.run import Run
from forge_env.run.outcome import save_progress
from forge_env.run.scratch import scratch_folder
from forge_env.run.trainer import Question, Trainer
from forge_env.visible import one_line
from trainers.buffer.types import BufferStats, Reservation, Ticket
from trainers.loop import checks
from trainers.loop.checkpoints import Checkpoints, Saved
from trainers.loop.contract import Contract
from trainers.loop.evaluation import Evaluator
from trainers.loop.metrics import batch_metrics, buffer_metrics, split_audit, trained_row
from trainers.loop.prepare import Actors, find_model, start_actors
from trainers.loop.publisher import Publisher
from trainers.loop.stack import RoleDiedError, Stack, prepare_controller, tell_of_rdma
from trainers.loop.status import Status
from trainers.loop.watchdog import Watchdog
from trainers.plan.report import plan
from trainers.rollout.types import Fate, GroupReport, Preparation, Totals

if TYPE_CHECKING:
    from trainers.actors.hosts import Hosts

MAX_DISCARDED_IN_A_ROW = 20
MAX_DEATHS_IN_A_ROW = 3
"""Actor deaths that a run survives without completing a training step in between."""
PATIENCE = 20
"""Consecutive batches' worth of groups dropped by the filter after which the run fails."""
HEAR_S = 1.0
"""Seconds that a checkpoint waits for the reports of groups that the buffer already holds."""
HALT_S = 10.0
"""Seconds that the generators may take to abort their requests."""
LAST_SAVE_S = 60.0
"""Seconds that saving a checkpoint may take when a failure ends the run."""
T = TypeVar("T")
logger = logging.getLogger(__name__)


class Algorithm(ABC):
    """Base class of training algorithms: how to sample groups and how to learn from them.

    Every session of a run, including a resumed one, creates a new instance.
    """

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


class Method(Trainer):
    """Adapter that makes an algorithm usable as a recipe's `method` (entry points `forge_env.trainers`)."""

    def __init__(self, algorithm: type[Algorithm]) -> None:
        self.algorithm = algorithm

    def check(self, config: RunConfig) -> None:
        """Reject a recipe that can't work, before anything is started."""
        prepare_controller()
        if self.algorithm.preparation is None:
            raise PluginError(
                f"{self.algorithm.__name__}.preparation is missing: what rollout workers do with a group",
                fix="derive a class from trainers.rollout.types.Preparation, and name it there",
            )
        checks.check(config)
        self.algorithm.check(config)

    def plan(self, config: RunConfig, question: Question) -> Iterator[str]:
        """Forecast the resources that a recipe needs, as lines of text."""
        return plan(config, question)

    async def __call__(self, run: Run) -> None:
        """Run the recipe `run.config` until it is complete or `run.stop` is set."""
        with scratch_folder():
            prepare_controller()
            await self.play(run)

    async def play(self, run: Run) -> None:
        """Start all actors of the recipe and run the algorithm on them."""
        config, checkpoints = run.config, Checkpoints(run)
        checkpoints.tidy()
        if run.resume and _complete(run, checkpoints.step):
            run.note(f"All {config.grpo.steps} steps are done: nothing to resume. More: --grpo.steps N")
            return
        tell_of_rdma(run)
        run.stage("model", config.model.path)
        model = await find_model(run)
        if run.resume:
            await asyncio.to_thread(checkpoints.verify, model)
        environment: Environment = fe.make(config.environment.name, **config.environment.options)
        run.facts["reward"] = reward_definition(environment)
        preparation = self.algorithm.preparation
        assert preparation is not None  # guaranteed by `check`
        async with Stack(config, await find_hosts(run)) as stack:
            watchdog = Watchdog(run, config.watchdog, lambda: stage_of(run))
            starting = watchdog.while_doing(
                start_actors(run, stack, environment, model, preparation), lambda: stage_of(run)
            )
            actors = await stack.unless_one_dies(unless_stopped(run, starting))
            if actors is None:
                run.note("stopped before training began: nothing to save")
                return
            system = System(run, stack, actors)
            try:
                await system.run_to_end(self.algorithm(system))
                run.stage("shutdown")
            finally:
                await actors.rollouts.close()
            with suppress(TimeoutError):  # a generator that hangs is killed when the stack closes
                async with asyncio.timeout(HALT_S):
                    await actors.generators.halt()
        checkpoints.tidy()


class System:
    """Interface between an algorithm and the actors of a run, from the first rollout to the last training step.

    Attributes:
        config: the recipe.
        rollouts: rolls out groups and held-out tasks in the rollout workers.
        buffer: groups that wait to be trained on.
        trainer: the trainer's endpoints.
        step: number of completed training steps, which equals the trainer's policy version.
    """

    def __init__(self, run: Run, stack: Stack, actors: Actors) -> None:
        self.run = run
        self._stack = stack
        self.config = run.config
        self.trainer, self.generators, self.buffer, self.rollouts = actors
        self.generators.tell = run.warn
        self.evaluator = Evaluator(run, self.rollouts, self.generators)
        self.step = 0
        self.contract = Contract(run, self.trainer, self.generators, self.buffer)
        self._checkpoints = Checkpoints(run)
        self._account = run.account("trainer", "start")
        self._status = Status(run, self.generators, self.rollouts, self._account, self.trainer.reference)
        self._counters = BufferStats()
        self._trained_at: list[float] = []
        self._at_rest: Saved | None = None
        """State collected when no group was in progress. Only synchronous mode has such a moment, once every step."""
        self._unsettled = False
        """Whether trainer or buffer may not be at `step`: during a training step, and while both are being restored."""
        self._discarded_in_a_row = self._dropped_in_a_row = 0
        self._warned_late = False
        """Whether a warning about dropped late episodes was logged."""
        self._said_lost: dict[str, str] = {}
        """Warnings about lost groups by kind of reason: an identical text is shown once per run and counted."""
        self._results: dict[int, float] = {}
        """Success of groups by position, not yet passed to the task order."""
        self._under_way: set[int] = set()
        """Positions of groups that were admitted and are not settled yet."""
        self._changed = asyncio.Event()
        self._unlogged: tuple[Reservation, dict[str, float]] | None = None
        """Batch and metrics of a step that is trained but not logged yet."""
        self._deaths_in_a_row = 0
        """Actor deaths since the last training step."""
        self._dead: set[str] = set()
        """Roles whose actors must be restarted."""
        self._evaluation: asyncio.Task[Estimate | None] | None = None

    # --- methods for algorithms

    async def admit(self) -> Ticket:
        """Wait for a buffer slot and for free memory, then return the ticket of a group to roll out."""
        ticket = await self.buffer.admit()
        self._under_way.add(ticket.index)
        await self.rollouts.gate.room()
        return ticket

    async def settle(self, ticket: Ticket, report: GroupReport) -> None:
        """Process the report of a group: if it was lost or dropped, free its slot for a replacement.

        Raises:
            ForgeError: too many groups in a row were lost or dropped by the filter.
            ContractError: the model was not shown the task.
        """
        self.contract.opened(report.opening)
        if report.totals.episodes_late and self.config.grpo.on_timeout == "leave_out" and not self._warned_late:
            self._warned_late = True
            self.run.warn(
                f"{report.totals.episodes_late} episodes of a group missed grpo.group_timeout_s="
                f"{self.config.grpo.group_timeout_s:g} and are left out, so its baseline is that of faster episodes "
                "(episode/late counts them); raise it, or set grpo.on_timeout to zero or wait"
            )
        if report.fate == Fate.LOST:  # infrastructure or the environment failed, so no reward of 0 is recorded
            await self._replace(ticket, report)
        elif report.fate == Fate.DROPPED:
            await self._drop(ticket)
        else:
            self._discarded_in_a_row = self._dropped_in_a_row = 0
        if report.fate != Fate.KEPT:
            self.run.not_trained(ticket.index, report.fate, report.why_lost[0])
        if report.fate == Fate.STALE:
            self.run.warn("a group was dropped as stale: this should not happen, please report it")
        if report.success is not None:  # recorded last and once, after the buffer knows the outcome
            self._results[ticket.index] = report.success
        self._under_way.discard(ticket.index)
        self._changed.set()

    async def _replace(self, ticket: Ticket, report: GroupReport) -> None:
        reason, fix = report.why_lost
        logger.info("group %d is replaced: %s", ticket.index, reason)
        self._discarded_in_a_row += 1
        message = f"no episode of a group can be trained on, so the group is replaced: {one_line(reason)}; {fix}"
        self.run.warn(self._said_lost.setdefault(reason.partition(":")[0], message))
        if self._discarded_in_a_row >= MAX_DISCARDED_IN_A_ROW:
            text = f"{MAX_DISCARDED_IN_A_ROW} groups in a row could not be trained on; the last because: {reason}"
            raise ForgeError(text, fix=fix)
        await self.buffer.discard(ticket)

    async def _drop(self, ticket: Ticket) -> None:
        self._discarded_in_a_row = 0
        self._dropped_in_a_row += 1
        if self._dropped_in_a_row >= PATIENCE * self.config.grpo.groups_per_step:
            raise ForgeError(
                f"{self._dropped_in_a_row} groups in a row were dropped by grpo.filter "
                f"({self.config.grpo.filter.name}): there is nothing to learn from",
                fix="choose tasks that are sometimes solved (tasks.order=curriculum), or set grpo.filter.name=all",
            )
        await self.buffer.discard(ticket)

    async def batches(self) -> AsyncIterator[Reservation]:
        """Yield the batch of each step until the recipe's last step or until the run is asked to stop."""
        steps = self.config.grpo.steps
        while self.step < steps and not self.run.stop.is_set():
            self._account.enter("wait for episodes")
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
        self._account.enter("book-keeping")
        await self.contract.before_training(batch)
        self._unsettled = True
        logger.info("step %d trains groups %s", batch.step + 1, sorted(batch.indices))
        try:
            async with self._alone():
                trained = await self.trainer.train_on(self.buffer, batch, self._account)
        except ForgeError as error:  # raised by the trainer itself, between two updates: its state is consistent
            self._unsettled = False
            if isinstance(error, ContractError):
                raise self.contract.tokens_differ(error) from error
            raise
        audit, metrics = split_audit(trained)
        self.step, self._unsettled, self._deaths_in_a_row = batch.step + 1, False, 0
        self._unlogged = batch, metrics
        self.contract.trained(batch.groups, audit)
        self._account.enter("book-keeping")
        if self.synchronous:  # every group is in the batch or gone; wait for the last reports
            await self._all_settled()
        self._learn_from_results()
        if self.synchronous:
            self._at_rest = await self._collect()
        for what, name in (("updates", "skipped_updates"), ("sequences", "sequences_not_finite")):
            if count := int(metrics.get(f"trainer/{name}", 0)):
                self.run.warn(f"{count} {what} of step {batch.step + 1} were left out: something was not finite")
        return metrics

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Let the generators sleep inside the block, so that the trainer has the GPU or CPUs, if the recipe says so."""
        if not self.config.generator.sleep:
            yield
            return
        self._account.enter("wait for generators")
        async with self.generators.asleep():
            yield
            self._account.enter("wait for generators")
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
        self._account.enter("push weights")
        await self._publisher.publish(version)
        self._account.enter("book-keeping")

    async def finish_step(self, batch: Reservation, metrics: dict[str, float]) -> None:
        """Log a completed step, and start a held-out evaluation and a checkpoint if they are due."""
        await self._log(batch, metrics)
        every, last = self.config.evaluation.every, self.step >= self.config.grpo.steps
        if every and self.step % every == 0 and not last:
            self._evaluate_beside()
        if not last and self._checkpoints.due(self.step) and not self._checkpoints.busy:
            with self._account.during("save"):
                await self._checkpoints.begin(self.trainer, self._at_rest or await self._collect())
            self._summarise()
            save_progress(self.run)

    async def _all_settled(self, of: Callable[[int], bool] = lambda position: True) -> None:
        """Wait until no group is in progress whose position satisfies `of`."""
        while any(map(of, self._under_way)):
            self._changed.clear()
            await self._changed.wait()

    def _learn_from_results(self) -> None:
        """Pass results to the task order, between steps and sorted by position, so that timing has no influence."""
        for position in sorted(self._results):
            self.rollouts.order.record(position, self._results[position])
        self._results.clear()

    # --- a session

    async def run_to_end(self, algorithm: Algorithm) -> None:
        """Run an algorithm until the recipe's last step or a stop request, report status meanwhile, and save."""
        self._algorithm = algorithm
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
            await self._loops()
            self.run.check_folder()
            if self.run.gone is not None:  # earlier checkpoints were removed with the folder
                await self._save_at_the_end()
        finally:
            self._summarise()

    async def _begin(self) -> None:
        self.run.saved(self._checkpoints.step)
        await self._configure()
        if self.run.resume:
            await self._resume()
        if not self.step:
            await self._evaluate_all("held-out score before training")

    async def _configure(self) -> None:
        from trainers.losses.load import make_loss  # takes seconds: torch

        config = self.config
        await self.trainer.configure(
            config.trainer.optimizer,
            loss=make_loss(config.grpo.loss),
            steps=config.grpo.steps,
            microbatch_tokens=config.trainer.microbatch_tokens,
            minibatches=config.trainer.minibatches,
            temperature=config.grpo.temperature,
            threads=config.trainer.threads,
        )

    async def _loops(self) -> None:
        """Run rollouts, training and evaluations concurrently. Any failure but an actor's death ends them all.

        A dead actor is restarted, and the run continues from the newest checkpoint, or from its beginning without one.
        After a stop request nothing is restarted: the run ends with its last checkpoint.
        """
        self._beginning = await self._stack.unless_one_dies(self._collect())
        work = self._train_and_score
        while True:
            try:
                await self._stack.unless_one_dies(work())
                if work == self._train_and_score or self._dead:
                    return
                work = self._train_and_score
            except RoleDiedError as death:
                if not self._dead or death.role in self._dead:  # otherwise one cause killed several: a lost host
                    self._deaths_in_a_row += 1
                if self._deaths_in_a_row > MAX_DEATHS_IN_A_ROW:
                    raise
                self._dead.add(death.role)
                then = "The run ends without it" if self.run.stop.is_set() else "It is started again"
                self.run.warn(f"{death.message}. {then}")
                work = self._recover
            except BaseException:  # save for any cause, if the trainer is between two steps
                await self._save_at_the_end()
                raise

    async def _save_at_the_end(self) -> None:
        if self._unsettled or not self.step:
            return
        try:
            async with asyncio.timeout(LAST_SAVE_S):
                await self._save(patient=False)
        except Exception:  # boundary: it must not mask the error that ended the run
            logger.exception("step %d could not be saved", self.step)

    async def _recover(self) -> None:
        """Save a checkpoint if possible, then restart dead actors unless the run was asked to stop."""
        await self._checkpoints.settled()
        if self._unsettled:  # its progress is unknown, and it may still wait for the dead actor
            self._dead.add("trainer")
        if not self._dead & {"trainer", "buffer"}:
            if self._unlogged is not None:
                await self._log(*self._unlogged)
            await self._save(patient=False)  # so that no step is lost
        if not self.run.stop.is_set():
            await unless_stopped(self.run, self._start_again())

    async def _start_again(self) -> None:
        """Restart dead actors and restore everything from the newest checkpoint, or from the session's beginning."""
        if not self._checkpoints.step:
            self._dead.add("trainer")  # without a checkpoint, only a new trainer has the initial weights
        before, self._unsettled = self.step, True
        for role in sorted(self._dead):
            await self._stack.restart(role)
        reference = self.trainer.reference
        await self.rollouts.reconnect(self.buffer, reference and reference.actor)
        await self._configure()
        await asyncio.to_thread(self._checkpoints.verify)
        await self._restore(await self._checkpoints.restore(self.trainer) or self._beginning)
        self._unsettled = False
        self._dead.clear()  # last: if another actor dies during the restore, these are restarted too
        lost = f"; {before - self.step} steps are trained again" if before > self.step else ""
        self.run.note(f"Going on after step {self.step}{lost}")

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
            self._checkpoints.start_clock()
            self._evaluate_what_was_lost()
            generating = group.create_task(self._algorithm.generate())
            await self._algorithm.learn()
            generating.cancel()
            await asyncio.wait([generating])
            await self._save()  # before evaluations are awaited: one that hangs must not lose trained steps
            await self._settled()
            self._publisher.close()
            self.contract.close()

    async def _settled(self) -> None:
        """Wait until the pushed version has arrived, or until the run is asked to stop."""
        self._account.enter("wait for generators")
        await unless_stopped(self.run, self._publisher.settled())
        self._account.enter("book-keeping")

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
            self._checkpoints.prune()
            return result

        # cancelled on a stop request: it holds weights, which delays the arrival of newer ones
        self._evaluation = self._tasks.create_task(unless_stopped(self.run, evaluate()))

    def _evaluate_what_was_lost(self) -> None:
        """Repeat the evaluation of the current step if the last session ended before it was scored."""
        section = self.config.evaluation
        scored = any(item.step == self.step and item.split == section.split for item in self.run.state.evaluations)
        if section.every and self.step and self.step % section.every == 0 and not scored:
            self._evaluate_beside()

    # --- logging

    async def _log(self, batch: Reservation, metrics: dict[str, float]) -> None:
        self._counters = await self.buffer.stats()
        ages = batch.staleness
        row = {
            "staleness/max": float(max(ages)),
            "staleness/mean": sum(ages) / len(ages),
            **metrics,
            **self._publisher.take_metrics(),
            **self._status.metrics(),
            **self._stack.host_metrics(),
            **batch_metrics(batch.groups),
            **self.rollouts.totals.metrics(),
            **buffer_metrics(self._counters),
        }
        self._trained_at.append(time.perf_counter())
        self.run.log(self.step, row)
        self.run.trained(self.step, trained_row(batch))
        self._unlogged = None
        self.run.status(reward=row["reward/mean"], staleness=row["staleness/max"], eta_s=self._seconds_left())
        self.run.progress(self.step, self.config.grpo.steps)

    def _seconds_left(self) -> float | None:
        recent = self._trained_at[-10:]
        if len(recent) < 2:
            return None
        pace = (recent[-1] - recent[0]) / (len(recent) - 1)
        return pace * (self.config.grpo.steps - self.step)

    def _summarise(self) -> None:
        self.run.summary |= {
            "steps": self.step,
            "tokens_discarded_stale": self._counters.tokens_discarded_stale,
            "max_staleness": self._counters.max_staleness,
            "max_off_policy_steps": self.config.grpo.max_off_policy_steps,
            **self.rollouts.totals.summary(),
        }

    # --- checkpoints

    @property
    def synchronous(self) -> bool:
        """Whether nothing is sampled during a training step; such runs are reproducible and resume bit for bit."""
        return self.config.grpo.max_off_policy_steps == 0

    async def _save(self, *, patient: bool = True) -> None:
        with self._account.during("save"):
            await self._checkpoints.settled()
            at_rest = self._at_rest if self._at_rest is not None and self._at_rest.step == self.step else None
            await self._checkpoints.save(self.trainer, at_rest or await self._collect(), patient=patient)

    async def _collect(self) -> Saved:
        """Collect a checkpoint's state besides the trainer's: the buffer's first, then the rest, consistent with it."""
        first_open, buffer = (await self.buffer.stats()).first_open, await self.buffer.state_dict(self.step)
        # groups that will be rolled out again
        lost = {index for index, _ in [*buffer["rolling"], *buffer["late"]]} | set(buffer["again"])

        def known(position: int) -> bool:
            return bool(position < buffer["next_index"]) and position not in lost

        with suppress(TimeoutError):  # workers report a group right after adding it to the buffer
            async with asyncio.timeout(HEAR_S):
                await self._all_settled(known)
        results = {position: result for position, result in self._results.items() if known(position)}
        state = {  # collected after the buffer's, so that it covers every admitted position
            "order": self.rollouts.order.state_dict(first_open),
            "results": sorted(results.items()),
            "set_aside": sorted(self.rollouts.set_aside),
            "workers": self.rollouts.state_dict(),
            "totals": asdict(self.rollouts.totals_of(known, first_open)),
            "in_a_row": [self._discarded_in_a_row, self._dropped_in_a_row],
            "algorithm": self._algorithm.state_dict(),
        }
        return Saved(self.step, state, buffer)

    async def _resume(self) -> None:
        saved = await self._checkpoints.restore(self.trainer)
        if saved is None:
            self.rollouts.count_from(Totals())
            return
        self.run.note(f"Resuming after step {saved.step}")
        await self._restore(saved)

    async def _restore(self, saved: Saved) -> None:
        """Restore everything but the trainer from `saved`; the trainer already has its weights."""
        self.rollouts.count_from(Totals(**saved.state["totals"]))
        self.step = saved.step
        self._at_rest = self._unlogged = None
        self.contract.begin_again()
        self._under_way.clear()
        self.run.saved(self.step)
        self.rollouts.order.load_state_dict(saved.state["order"])
        await self.rollouts.load_state_dict(saved.state["workers"], set(saved.state["set_aside"]))
        self._results = {int(position): float(result) for position, result in saved.state["results"]}
        self._discarded_in_a_row, self._dropped_in_a_row = saved.state["in_a_row"]
        self._algorithm.load_state_dict(saved.state["algorithm"])
        await self.buffer.load_state_dict(saved.buffer)
        await self.buffer.restart(self.step)
        self._counters = await self.buffer.stats()
        if self.trainer.reference is not None:
            self.trainer.reference.version = 0  # a lagging copy loads the next weights that are pushed
        published = await self.trainer.push_weights(self.step)
        await self.generators.set_back(self.step, published)
        await self._stack.forget_weights_but(self.step)


async def find_hosts(run: Run) -> Hosts | None:
    """Survey the hosts of the run; None if it runs on this machine alone."""
    surveyed = await survey(run.config, run.folder.root)
    if surveyed is None:
        return None
    from trainers.actors.hosts import Hosts

    logger.info("%s", surveyed.plan)
    return Hosts(run, surveyed)


def stage_of(run: Run) -> str:
    """Describe the stage and progress of a run that is starting."""
    name = run.state.stage.name if run.state.stage else "start"
    return f"stage {name}" + (f", {run.state.done} of {run.state.total} done" if run.state.total else "")


async def unless_stopped(run: Run, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`, or None if `run` is asked to stop first; `work` is then cancelled and awaited."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(run.stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


def _complete(run: Run, step: int) -> bool:
    """Whether every step is trained and the final held-out score is recorded."""
    steps, split = run.config.grpo.steps, run.config.evaluation.split
    return step >= steps and any(item.step >= steps and item.split == split for item in run.state.evaluations)
