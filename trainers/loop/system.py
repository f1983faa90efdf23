"""What goes on around an algorithm: actors, accounts, held-out scores, checkpoints, the run's record, its end.

An algorithm (`trainers.algorithms.grpo`) is two loops, `generate` and `learn`, and calls what is here by plain verbs.
Both are children of one task group with evaluations and status: the first failure cancels the others and ends the run
with its cause.
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
"""Deaths of actors that are survived without a step trained in between."""
PATIENCE = 20
"""Batches of groups that the filter drops, in a row, after which there is nothing to learn from."""
HEAR_S = 1.0
"""How long a checkpoint waits for what a worker has to say of a group that the buffer has already."""
HALT_S = 10.0
"""How long the generators may take to give up what they have under way."""
LAST_SAVE_S = 60.0
"""How long saving may take when a failure ends the run."""
T = TypeVar("T")
logger = logging.getLogger(__name__)


class Algorithm(ABC):
    """What is sampled and what is learned; created again for every session of a run."""

    @abstractmethod
    def __init__(self, system: System) -> None: ...

    preparation: ClassVar[type[Preparation] | None] = None
    """What it does in the rollout workers with each group."""

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Refuse a recipe that the algorithm can't run, before anything is started."""
        return

    @abstractmethod
    async def generate(self) -> None:
        """Fill the buffer until cancelled."""

    @abstractmethod
    async def learn(self) -> None:
        """Train until `System.batches` ends."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        return


class Method(Trainer):
    """An algorithm as what `method` in a recipe names (entry points `forge_env.trainers`)."""

    def __init__(self, algorithm: type[Algorithm]) -> None:
        self.algorithm = algorithm

    def check(self, config: RunConfig) -> None:
        """Refuse a recipe that can't work, before anything is started."""
        prepare_controller()
        if self.algorithm.preparation is None:
            raise PluginError(
                f"{self.algorithm.__name__}.preparation is missing: what rollout workers do with a group",
                fix="derive a class from trainers.rollout.types.Preparation, and name it there",
            )
        checks.check(config)
        self.algorithm.check(config)

    def plan(self, config: RunConfig, question: Question) -> Iterator[str]:
        """What a recipe will take."""
        return plan(config, question)

    async def __call__(self, run: Run) -> None:
        """Run the recipe `run.config` to its end, or until `run.stop`."""
        with scratch_folder():
            prepare_controller()
            await self.play(run)

    async def play(self, run: Run) -> None:
        """Start everything that the recipe names, and let the algorithm run on it."""
        config, checkpoints = run.config, Checkpoints(run)
        checkpoints.tidy()
        if run.resume and _complete(run, checkpoints.step):
            run.note(f"All {config.grpo.steps} steps are done: nothing to resume. More: --grpo.steps N")
            return
        tell_of_rdma(run)
        run.stage("model", config.model.path)
        found = await find_model(run)
        if run.resume:
            await asyncio.to_thread(checkpoints.verify, found)
        environment: Environment = fe.make(config.environment.name, **config.environment.options)
        run.facts["reward"] = reward_definition(environment)
        preparation = self.algorithm.preparation
        assert preparation is not None  # `check` has seen to it
        async with Stack(config, await find_hosts(run)) as stack:
            watch = Watchdog(run, config.watchdog, lambda: stage_of(run))
            starting = watch.while_doing(
                start_actors(run, stack, environment, found, preparation), lambda: stage_of(run)
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
            with suppress(TimeoutError):  # one that is held up is killed below
                async with asyncio.timeout(HALT_S):
                    await actors.generators.halt()
        checkpoints.tidy()


class System:
    """What an algorithm works with, from its first rollout to its last step.

    Attributes:
        config: the recipe.
        rollouts: has groups and held-out tasks played.
        buffer: holds what waits to be trained on.
        trainer: trains.
        step: training steps done, which is the trainer's policy version.
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
        """The last moment at which nothing was under way; in synchronous mode only, where there is one every step."""
        self._unsettled = False
        """The trainer or the buffer isn't at `step`: the one trains, or both are being set back."""
        self._discarded_in_a_row = self._dropped_in_a_row = 0
        self._warned_late = False
        """Whether a warning about dropped late episodes was logged."""
        self._said_lost: dict[str, str] = {}
        """What was said of lost groups by the kind of reason: a run says it once of each, and counts."""
        self._results: dict[int, float] = {}
        """Of groups by position, how they went: what the order of tasks has not learned from yet."""
        self._under_way: set[int] = set()
        """Positions of groups that were admitted and not settled."""
        self._changed = asyncio.Event()
        self._unlogged: tuple[Reservation, dict[str, float]] | None = None
        """A step that is trained, and what it gave, until that is logged."""
        self._deaths_in_a_row = 0
        """Deaths of actors since the last step that was trained."""
        self._dead: set[str] = set()
        """Roles whose actors have to be started again."""
        self._evaluation: asyncio.Task[Estimate | None] | None = None

    # --- what an algorithm calls

    async def admit(self) -> Ticket:
        """Wait for a slot of the buffer, and for memory; the ticket of a group to roll out."""
        ticket = await self.buffer.admit()
        self._under_way.add(ticket.index)
        await self.rollouts.gate.room()
        return ticket

    async def settle(self, ticket: Ticket, report: GroupReport) -> None:
        """A group was played: it is in the buffer, or another is rolled out in its place.

        Raises:
            ForgeError: group after group can't be trained on, or isn't wanted.
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
        if report.fate == Fate.LOST:  # infrastructure or the environment failed: never a zero
            await self._replace(ticket, report)
        elif report.fate == Fate.DROPPED:
            await self._drop(ticket)
        else:
            self._discarded_in_a_row = self._dropped_in_a_row = 0
        if report.fate != Fate.KEPT:
            self.run.not_trained(ticket.index, report.fate, report.why_lost[0])
        if report.fate == Fate.STALE:
            self.run.warn("a group was dropped as stale: this should not happen, please report it")
        if report.success is not None:  # from here on it counts, and only once: the buffer knows what became of it
            self._results[ticket.index] = report.success
        self._under_way.discard(ticket.index)
        self._changed.set()

    async def _replace(self, ticket: Ticket, report: GroupReport) -> None:
        reason, fix = report.why_lost
        logger.info("group %d is replaced: %s", ticket.index, reason)
        self._discarded_in_a_row += 1
        said = f"no episode of a group can be trained on, so the group is replaced: {one_line(reason)}; {fix}"
        self.run.warn(self._said_lost.setdefault(reason.partition(":")[0], said))
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
        """What to train on, step by step, until the recipe's last step or until the run is asked to stop."""
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
        """Update the weights from a batch, which goes from the buffer to the processes that compute it; metrics."""
        self._account.enter("book-keeping")
        await self.contract.before_training(batch)
        self._unsettled = True
        logger.info("step %d trains groups %s", batch.step + 1, sorted(batch.indices))
        try:
            async with self._alone():
                trained = await self.trainer.train_on(self.buffer, batch, self._account)
        except ForgeError as error:  # it gave up by itself, between two updates
            self._unsettled = False
            if isinstance(error, ContractError):
                raise self.contract.tokens_differ(error) from error
            raise
        audit, metrics = split_audit(trained)
        self.step, self._unsettled, self._deaths_in_a_row = batch.step + 1, False, 0
        self._unlogged = batch, metrics
        self.contract.trained(batch.groups, audit)
        self._account.enter("book-keeping")
        if self.synchronous:  # all groups were in the batch, or are gone: nothing is left but to hear of the last ones
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
        """Inside, the trainer has the GPU, or the processors, to itself, if the recipe wants that."""
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
        """Send the weights off to the generators as `version`, where they are due; the version before has to arrive.

        None are due any more in a run that was asked to stop: nobody will play with them.
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
        """A step is done: log it; score the held-out split and save where that is due."""
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
        """Wait until no group is under way, of those at some positions."""
        while any(map(of, self._under_way)):
            self._changed.clear()
            await self._changed.wait()

    def _learn_from_results(self) -> None:
        """Tell the order of tasks how groups went: between two steps and by position, not as they happen to end."""
        for position in sorted(self._results):
            self.rollouts.order.record(position, self._results[position])
        self._results.clear()

    # --- a session

    async def run_to_end(self, algorithm: Algorithm) -> None:
        """Run an algorithm until the recipe's last step or until the run is asked to stop; save; report."""
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
            if self.run.gone is not None:  # what was saved before went with the folder
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
        """Rollouts and evaluations run beside the training loop; a failure ends all of them, but for a death.

        An actor that dies is started again, and the run goes on from the newest checkpoint, or from where it began; but
        not once the run was asked to stop, which then ends with what is saved.
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
                if not self._dead or death.role in self._dead:  # else it went with another: a host was lost
                    self._deaths_in_a_row += 1
                if self._deaths_in_a_row > MAX_DEATHS_IN_A_ROW:
                    raise
                self._dead.add(death.role)
                then = "The run ends without it" if self.run.stop.is_set() else "It is started again"
                self.run.warn(f"{death.message}. {then}")
                work = self._recover
            except BaseException:  # whatever ended it: what is trained is kept, where the trainer is between two steps
                await self._save_at_the_end()
                raise

    async def _save_at_the_end(self) -> None:
        if self._unsettled or not self.step:
            return
        try:
            async with asyncio.timeout(LAST_SAVE_S):
                await self._save(patient=False)
        except Exception:  # boundary: it must not hide what ended the run
            logger.exception("step %d could not be saved", self.step)

    async def _recover(self) -> None:
        """Save what can be, and start what died again; a run that is asked to stop starts nobody."""
        await self._checkpoints.settled()
        if self._unsettled:  # nobody knows how far it is, or whether it still waits for whoever died
            self._dead.add("trainer")
        if not self._dead & {"trainer", "buffer"}:
            if self._unlogged is not None:
                await self._log(*self._unlogged)
            await self._save(patient=False)  # so that nothing is lost
        if not self.run.stop.is_set():
            await unless_stopped(self.run, self._start_again())

    async def _start_again(self) -> None:
        """Start what died again, and set everything back to the newest checkpoint, or to the beginning."""
        if not self._checkpoints.step:
            self._dead.add("trainer")  # there is nothing else to set it back with
        before, self._unsettled = self.step, True
        for role in sorted(self._dead):
            await self._stack.restart(role)
        reference = self.trainer.reference
        await self.rollouts.reconnect(self.buffer, reference and reference.actor)
        await self._configure()
        await asyncio.to_thread(self._checkpoints.verify)
        await self._restore(await self._checkpoints.restore(self.trainer) or self._beginning)
        self._unsettled = False
        self._dead.clear()  # only now: who dies meanwhile finds the others neither here nor there
        lost = f"; {before - self.step} steps are trained again" if before > self.step else ""
        self.run.note(f"Going on after step {self.step}{lost}")

    async def _train_and_score(self) -> None:
        """Also while it is scored whoever dies is started again: a new generator has its weights from the trainer."""
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
            await self._save()  # now: an evaluation that never ends must not cost what was trained
            await self._settled()
            self._publisher.close()
            self.contract.close()

    async def _settled(self) -> None:
        """The version under way has arrived; a run that was asked to stop waits for none."""
        self._account.enter("wait for generators")
        await unless_stopped(self.run, self._publisher.settled())
        self._account.enter("book-keeping")

    async def _evaluate_all(self, what: str) -> None:
        self.run.stage("evaluation", what)
        await unless_stopped(self.run, self.evaluator.evaluate_all(self.step))

    def _evaluate_beside(self) -> None:
        """Score the held-out split while training goes on; one evaluation at a time, in order."""
        section, step = self.config.evaluation, self.step
        if self._evaluation is not None and not self._evaluation.done():
            self.run.warn("an evaluation was skipped: the previous one was still running. Raise evaluation.every")
            return

        async def evaluate() -> Estimate | None:
            await self._publisher.settled()
            result = await self.evaluator.evaluate(step, section.split, section.num_tasks)
            self._checkpoints.prune()
            return result

        # whoever asks the run to stop must not wait for it: weights that it holds keep new ones from arriving
        self._evaluation = self._tasks.create_task(unless_stopped(self.run, evaluate()))

    def _evaluate_what_was_lost(self) -> None:
        """An evaluation that was under way when the last session ended is made up for."""
        section = self.config.evaluation
        scored = any(item.step == self.step and item.split == section.split for item in self.run.state.evaluations)
        if section.every and self.step and self.step % section.every == 0 and not scored:
            self._evaluate_beside()

    # --- the record

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
        """Whether nothing is sampled while a step is trained: then a run repeats itself, and resumes, to the bit."""
        return self.config.grpo.max_off_policy_steps == 0

    async def _save(self, *, patient: bool = True) -> None:
        with self._account.during("save"):
            await self._checkpoints.settled()
            at_rest = self._at_rest if self._at_rest is not None and self._at_rest.step == self.step else None
            await self._checkpoints.save(self.trainer, at_rest or await self._collect(), patient=patient)

    async def _collect(self) -> Saved:
        """What a checkpoint holds besides the trainer's state: the buffer first, and of the rest what goes with it."""
        first_open, buffer = (await self.buffer.stats()).first_open, await self.buffer.state_dict(self.step)
        lost = {index for index, _ in [*buffer["rolling"], *buffer["late"]]} | set(buffer["again"])  # played again

        def known(position: int) -> bool:
            return bool(position < buffer["next_index"]) and position not in lost

        with suppress(TimeoutError):  # of groups that the buffer has just been given, their worker tells at once
            async with asyncio.timeout(HEAR_S):
                await self._all_settled(known)
        results = {position: result for position, result in self._results.items() if known(position)}
        state = {  # taken after the buffer's: every position that it has handed out has its task
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
        """Go on from `saved`, whose weights the trainer has."""
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
            self.trainer.reference.version = 0  # a copy that follows the policy takes the next weights that are pushed
        published = await self.trainer.push_weights(self.step)
        await self.generators.set_back(self.step, published)
        await self._stack.forget_weights_but(self.step)


async def find_hosts(run: Run) -> Hosts | None:
    """The hosts of the run; None: this machine."""
    found = await survey(run.config, run.folder.root)
    if found is None:
        return None
    from trainers.actors.hosts import Hosts

    logger.info("%s", found.plan)
    return Hosts(run, found)


def stage_of(run: Run) -> str:
    """How far a run is that starts."""
    name = run.state.stage.name if run.state.stage else "start"
    return f"stage {name}" + (f", {run.state.done} of {run.state.total} done" if run.state.total else "")


async def unless_stopped(run: Run, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns, or None when `run` is asked to stop first: then it is cancelled, and has ended."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(run.stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


def _complete(run: Run, step: int) -> bool:
    """Every step is trained, and the final held-out score is there."""
    steps, split = run.config.grpo.steps, run.config.evaluation.split
    return step >= steps and any(item.step >= steps and item.split == split for item in run.state.evaluations)
