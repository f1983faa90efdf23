"""The asynchronous part of a run: rollouts, training, evaluation and status as children of one task group."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from forge_env.errors import ForgeError
from forge_env.run import Run
from trainers.buffer.replay import ReplayBuffer, Ticket
from trainers.generator.policy import GeneratorPolicy
from trainers.generator.pool import GeneratorPool
from trainers.loop.advantages import Group, training_sequences
from trainers.loop.checkpoints import Checkpoints
from trainers.loop.evaluation import Evaluator, Score
from trainers.loop.metrics import Totals, batch_metrics, named
from trainers.loop.rollouts import MakeEnvironment, Rollouts
from trainers.loop.status import Status
from trainers.loop.stopping import unless_stopped
from trainers.loop.trainer import TrainerHandle
from trainers.losses.load import make_loss
from trainers.model.chat import Chat, FolderTokenizer

logger = logging.getLogger(__name__)
MAX_DISCARDED_IN_A_ROW = 20


class Session:
    """One training session from its first rollout to its last step."""

    def __init__(self, run: Run, trainer: TrainerHandle, generators: GeneratorPool, make_env: MakeEnvironment) -> None:
        config = run.config
        self.run = run
        self.config = config
        self.trainer = trainer
        self.generators = generators
        chat = Chat(FolderTokenizer(trainer.folder), config.model.renderer)

        def policy(temperature: float) -> GeneratorPolicy:
            limit = config.grpo.max_tokens_per_turn
            return GeneratorPolicy(chat, generators.generate, config.model.max_length, limit, temperature)

        self.rollouts = Rollouts(config, make_env, policy(config.grpo.temperature), run.timeline)
        self.evaluator = Evaluator(run, self.rollouts, policy(config.evaluation.temperature))
        self.checkpoints = Checkpoints(run)
        self.account = run.account("trainer", "start")
        self.status = Status(run, generators, self.rollouts, self.account)
        self.totals = Totals.since(run.earlier)
        self.step = 0
        self.position = 0
        self._discarded_in_a_row = 0
        self._trained_at: list[float] = []
        self._evaluation: asyncio.Task[Score] | None = None

    async def run_to_end(self) -> None:
        """Train until the recipe's last step or until the run is asked to stop; save; report."""
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
            self.run.stage("evaluation", "held-out score before training")
            await unless_stopped(self.run, self.evaluator.evaluate_all(self.step))
        self.run.stage("training", f"{config.grpo.steps} steps")
        self.buffer: ReplayBuffer[Group] = ReplayBuffer(
            config.grpo.groups_per_step,
            config.grpo.max_off_policy_steps,
            first_index=self.position,
            version=self.step,
            needed=(config.grpo.steps - self.step) * config.grpo.groups_per_step,
        )
        try:
            await self._loops()
        finally:
            self._summarise()
        await self._finish()

    async def _resume(self) -> None:
        self.step, self.position, order = await self.checkpoints.restore(self.trainer)
        if order:
            self.rollouts.order.load_state_dict(order)
        if self.step:
            self.run.note(f"Resuming after step {self.step}")
            await self.trainer.push_weights(self.step)
            await self.generators.update_weights(self.step)

    async def _loops(self) -> None:
        """Rollouts, status and evaluations run beside the training loop; a failure ends all of them."""
        async with asyncio.TaskGroup() as group:
            endless: list[asyncio.Task[Any]] = [
                group.create_task(self._roll_out()),
                group.create_task(self.status.report(self.buffer)),
            ]
            await self._train(group)
            if self.run.stop.is_set() and self._evaluation is not None:
                endless.append(self._evaluation)
            for task in endless:
                task.cancel()

    async def _roll_out(self) -> None:
        """Start a group wherever there is room for one. Cancelled, it takes every rollout along."""
        async with asyncio.TaskGroup() as rollouts:
            while True:
                ticket = await self.buffer.admit()
                rollouts.create_task(self._roll_out_group(ticket))

    async def _roll_out_group(self, ticket: Ticket[Group]) -> None:
        started = time.perf_counter()
        result = await self.rollouts.group(ticket.index)
        if (timeline := self.run.timeline) is not None:
            name = f"group {ticket.index}"
            timeline.overlapping("groups", name, name, started, time.perf_counter(), version=ticket.version)
        self.totals.count(result, self.config.grpo.group_size)
        for episode in result.episodes:
            self.run.trajectory(episode, "train")
        if result.valid:
            self._discarded_in_a_row = 0
            await self.buffer.add(ticket, result)
            return
        self._discarded_in_a_row += 1
        self.run.warn("a whole group came to nothing and is replaced")
        if self._discarded_in_a_row >= MAX_DISCARDED_IN_A_ROW:
            reason, fix = _why_nothing(result)
            text = f"{MAX_DISCARDED_IN_A_ROW} groups in a row came to nothing, the last because: {reason}"
            raise ForgeError(text, fix=fix)
        await self.buffer.discard(ticket)

    async def _train(self, group: asyncio.TaskGroup) -> None:
        """Batch after batch: train, publish, swap, free the slots."""
        config = self.config.grpo
        every = self.config.evaluation.every
        while self.step < config.steps and not self.run.stop.is_set():
            self.account.enter("wait for episodes")
            self.run.status(waiting={"trainer": "episodes"})
            batch = await unless_stopped(self.run, self.buffer.sample())
            if batch is None:
                return
            self.run.status(waiting={})
            metrics = await self._train_on(batch)
            self.step += 1
            self.position += len(batch)
            self._log(batch, metrics | self.status.time_metrics())
            if every and self.step % every == 0 and self.step < config.steps:
                self._evaluate_beside(group)
            if self.config.checkpoint.every and self.step % self.config.checkpoint.every == 0:
                await self._save()
                self._summarise()
                self.run.save_summary()
        if self.step >= config.steps:
            self.run.note(f"Reached training limit ({config.steps} steps)")

    def _evaluate_beside(self, group: asyncio.TaskGroup) -> None:
        """Score the held-out split while training goes on; one evaluation at a time, in order."""
        section = self.config.evaluation
        if self._evaluation is not None and not self._evaluation.done():
            self.run.warn("an evaluation was left out: the one before it was still going. Raise evaluation.every")
            return
        evaluating = self.evaluator.evaluate(self.step, section.split, section.num_tasks)
        self._evaluation = group.create_task(evaluating)

    async def _train_on(self, batch: list[Ticket[Group]]) -> dict[str, float]:
        groups = [ticket.group for ticket in batch if ticket.group is not None]
        sequences = training_sequences(groups, normalize_std=self.config.grpo.normalize_std)
        staleness = [self.step - episode.oldest_version for group in groups for episode in group.valid]
        self.buffer.stats.max_staleness = max(self.buffer.stats.max_staleness, *staleness)
        metrics: dict[str, float] = {"staleness/max": max(staleness), "staleness/mean": sum(staleness) / len(staleness)}
        if sequences:
            self.account.enter("train")
            metrics |= named(await self.trainer.train_step(sequences))
        version = self.step + 1
        logger.info(f"Pushing weights for policy version {version}")
        self.account.enter("push weights")
        pushed = await self.trainer.push_weights(version)
        self.account.enter("wait for generators")
        swapped = await self.generators.update_weights(version)
        metrics |= {"weights/push_s": pushed["push_s"], "weights/pull_s": swapped["pull_s"]}
        metrics |= {"weights/stall_s": swapped["stall_s"]}
        await self.buffer.release(batch)
        self.account.enter("book-keeping")
        return metrics

    def _log(self, batch: list[Ticket[Group]], metrics: dict[str, float]) -> None:
        groups = [ticket.group for ticket in batch if ticket.group is not None]
        metrics |= batch_metrics(groups) | self.totals.metrics()
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
        """The last checkpoint, and after a complete run the final scores."""
        await self._save()
        if self.step >= self.config.grpo.steps:
            self.run.stage("evaluation", "held-out score after training")
            await unless_stopped(self.run, self.evaluator.evaluate_all(self.step))

    async def _save(self) -> None:
        order = self.rollouts.order.state_dict(first=self.position)
        await self.checkpoints.save(self.trainer, self.step, self.position, order)

    def _summarise(self) -> None:
        self.run.summary |= {
            "steps": self.step,
            "tokens_discarded_stale": 0,  # groups are admitted so that none can become too old: there is no such path
            "max_staleness": max(self.buffer.stats.max_staleness, self.run.earlier.get("max_staleness") or 0),
            "max_off_policy_steps": self.config.grpo.max_off_policy_steps,
            **self.totals.summary(),
        }


def _why_nothing(group: Group) -> tuple[str, str]:
    """Why a group has no episode to train on, and what to do about it."""
    if error := next((episode.error for episode in group.episodes if not episode.valid), None):
        return error, "run.log has the errors of all episodes"
    if group.episodes:
        return "the first prompt leaves no room for a token", "raise model.max_length"
    return "no episode finished in time", "raise grpo.group_timeout_s, or lower grpo.max_tokens_per_turn"
