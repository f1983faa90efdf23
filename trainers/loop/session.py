"""The asynchronous part of a run: rollouts, training, evaluation and status as children of one task group."""

from __future__ import annotations

import asyncio
import time

from forge_env.config.recipe import SamplingSection
from forge_env.evaluation.estimates import Estimate
from forge_env.run import Run
from forge_env.run.outcome import save_progress
from trainers.buffer.types import BufferStats, Reservation
from trainers.generator.arguments import held_out_sampling
from trainers.generator.policy import GeneratorPolicy
from trainers.loop.checkpoints import Checkpoints, Saved
from trainers.loop.evaluation import Evaluator
from trainers.loop.feeder import Feeder
from trainers.loop.metrics import Totals, batch_metrics, buffer_metrics, named
from trainers.loop.prepare import Actors
from trainers.loop.publisher import Publisher
from trainers.loop.rollouts import MakeEnvironment, Rollouts
from trainers.loop.status import Status
from trainers.loop.stopping import unless_stopped
from trainers.losses.load import make_loss
from trainers.model.chat import Chat


class Session:
    """One training session from its first rollout to its last step."""

    def __init__(self, run: Run, actors: Actors, make_env: MakeEnvironment) -> None:
        config = run.config
        self.run = run
        self.config = config
        self.trainer, self.generators, self.buffer = trainer, generators, _ = actors
        chat = Chat.of(trainer.folder, config.model)

        def policy(temperature: float, sampling: SamplingSection) -> GeneratorPolicy:
            limit = config.grpo.max_tokens_per_turn
            return GeneratorPolicy(chat, generators.generate, config.model.max_length, limit, temperature, sampling)

        self.rollouts = Rollouts(
            config, make_env, policy(config.grpo.temperature, config.generator.sampling), run.timeline
        )
        self.evaluator = Evaluator(run, self.rollouts, policy(config.evaluation.temperature, held_out_sampling(config)))
        self.checkpoints = Checkpoints(run)
        self.account = run.account("trainer", "start")
        reference = trainer.reference.account if trainer.reference else None
        self.status = Status(run, generators, self.rollouts, self.account, reference)
        self.totals = Totals.since(run.earlier)
        self.step = 0
        self.counters = BufferStats()
        self._trained_at: list[float] = []
        self._evaluation: asyncio.Task[Estimate] | None = None

    async def run_to_end(self) -> None:
        """Train until the recipe's last step or until the run is asked to stop; save; report."""
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self.status.report(self.buffer))
            await self._run_to_end()
            watching.cancel()

    async def _run_to_end(self) -> None:
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
        if self.run.resume:
            await self._resume()
        if self.step < config.grpo.steps:
            when = f"after step {self.step}" if self.step else "before training"
            self.run.stage("evaluation", f"held-out score {when}")
            await unless_stopped(self.run, self.evaluator.evaluate_all(self.step))
        self.run.stage("training", f"{config.grpo.steps} steps")
        try:
            await self._loops()
        finally:
            self._summarise()
        await self._finish()

    async def _resume(self) -> None:
        saved = await self.checkpoints.restore(self.trainer)
        if saved is None:
            return
        self.step = saved.step
        self.run.note(f"Resuming after step {self.step}")
        self.rollouts.order.load_state_dict(saved.order)
        await self.buffer.load_state_dict(saved.buffer)
        await self.buffer.restart(self.step)
        await self.trainer.push_weights(self.step)
        await self.generators.update_weights(self.step)

    async def _loops(self) -> None:
        """Rollouts and evaluations run beside the training loop; a failure ends all of them."""
        async with asyncio.TaskGroup() as group:
            feeding = group.create_task(Feeder(self.run, self.rollouts, self.buffer, self.totals).feed())
            publisher = Publisher(self.trainer, self.generators, self.buffer, group)
            await self._train(group, publisher)
            await self._settled(publisher)
            feeding.cancel()
            await asyncio.wait([feeding])
            await self._save()  # now: an evaluation that never ends must not cost what was trained
            if self.run.stop.is_set() and self._evaluation is not None:
                self._evaluation.cancel()

    async def _settled(self, publisher: Publisher) -> None:
        self.account.enter("wait for generators")
        await publisher.settled()
        self.account.enter("book-keeping")

    async def _train(self, group: asyncio.TaskGroup, publisher: Publisher) -> None:
        """Batch after batch: train, and send the weights off."""
        config = self.config.grpo
        every = self.config.evaluation.every
        while self.step < config.steps and not self.run.stop.is_set():
            self.account.enter("wait for episodes")
            self.run.status(waiting={"trainer": "episodes"})
            reservation = await unless_stopped(self.run, self.buffer.reserve(self.step))
            if reservation is None:
                return
            self.run.status(waiting={})
            metrics = await self._train_on(reservation)
            self.step += 1
            await self._settled(publisher)
            self.account.enter("push weights")
            await publisher.publish(self.step)
            self.account.enter("book-keeping")
            await self._log(reservation, metrics | publisher.take_metrics() | self.status.time_metrics())
            if every and self.step % every == 0 and self.step < config.steps:
                self._evaluate_beside(group, publisher)
            if self.config.checkpoint.every and self.step % self.config.checkpoint.every == 0:
                await self._settled(publisher)
                await self._save()
                self._summarise()
                save_progress(self.run)
        if self.step >= config.steps:
            self.run.note(f"Reached training limit ({config.steps} steps)")

    def _evaluate_beside(self, group: asyncio.TaskGroup, publisher: Publisher) -> None:
        """Score the held-out split while training goes on; one evaluation at a time, in order."""
        section, step = self.config.evaluation, self.step
        if self._evaluation is not None and not self._evaluation.done():
            self.run.warn("an evaluation was left out: the one before it was still going. Raise evaluation.every")
            return

        async def evaluate() -> Estimate:
            await publisher.settled()
            return await self.evaluator.evaluate(step, section.split, section.num_tasks)

        self._evaluation = group.create_task(evaluate())

    async def _train_on(self, reservation: Reservation) -> dict[str, float]:
        staleness = reservation.staleness
        metrics: dict[str, float] = {"staleness/max": max(staleness), "staleness/mean": sum(staleness) / len(staleness)}
        metrics |= named(await self.trainer.train_on(self.buffer, reservation, self.account))
        if left_out := int(metrics.get("trainer/sequences_not_finite", 0)):
            self.run.warn(f"{left_out} sequences of step {self.step + 1} were left out: a log-prob was not finite")
        if skipped := int(metrics.get("trainer/skipped_updates", 0)):
            self.run.warn(f"{skipped} updates of step {self.step + 1} were skipped: loss or gradient was not finite")
        return metrics

    async def _log(self, reservation: Reservation, metrics: dict[str, float]) -> None:
        self.counters = await self.buffer.stats()
        metrics |= batch_metrics(reservation.groups) | self.totals.metrics() | buffer_metrics(self.counters)
        self._trained_at.append(time.perf_counter())
        self.run.log(self.step, metrics)
        self.run.status(reward=metrics["reward/mean"], staleness=metrics["staleness/max"], eta_s=self._seconds_left())
        self.run.progress(self.step, self.config.grpo.steps)

    def _seconds_left(self) -> float | None:
        recent = self._trained_at[-10:]
        if len(recent) < 2:
            return None
        pace = (recent[-1] - recent[0]) / (len(recent) - 1)
        return pace * (self.config.grpo.steps - self.step)

    async def _finish(self) -> None:
        """After a complete run the final scores."""
        if self.step >= self.config.grpo.steps:
            self.run.stage("evaluation", "held-out score after training")
            await unless_stopped(self.run, self.evaluator.evaluate_all(self.step))

    async def _save(self) -> None:
        with self.account.during("save"):
            order = self.rollouts.order.state_dict((await self.buffer.stats()).first_open)
            saved = Saved(self.step, order, await self.buffer.state_dict())
            await self.checkpoints.save(self.trainer, saved)

    def _summarise(self) -> None:
        stale = self.counters.tokens_discarded_stale
        self.run.summary |= {
            "steps": self.step,
            "tokens_discarded_stale": stale,
            "max_staleness": self.counters.max_staleness,
            "max_off_policy_steps": self.config.grpo.max_off_policy_steps,
            **self.totals.summary(),
        }
