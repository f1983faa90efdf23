"""Live metrics, time accounts and progress monitoring, once a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

from forge_env.figures import duration
from forge_env.run import Run
from forge_env.run.account import Account, Since
from trainers.actors.remote import ActorDiedError
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.types import BufferStats
from trainers.generator.pool import GeneratorPool
from trainers.loop.trainer import BaseReference, Reference
from trainers.loop.watchdog import INTERVAL_S, Watchdog
from trainers.rollout.rollouts import Rollouts

ANSWER_S = 5.0
"""Seconds after which an actor that doesn't return its metrics counts as unresponsive."""

T = TypeVar("T")


class Status:
    """Monitors the actors of a training session."""

    def __init__(
        self,
        run: Run,
        generators: GeneratorPool,
        rollouts: Rollouts,
        trainer: Account,
        reference: Reference | BaseReference | None = None,
    ) -> None:
        self._run, self._generators, self._rollouts = run, generators, rollouts
        self._trainer, self._reference = trainer, reference
        self._stats: dict[str, float] = {}
        self._held = BufferStats()
        self._silent: list[str] = []
        self._generator, self._buffer = Since(), Since()
        self._asked_at = time.perf_counter()
        """When the generators last answered."""
        self._counted = (0.0, self._asked_at)
        """Number of sampled tokens and its time, as of the last call of `metrics`."""
        self._watchdog = Watchdog(run, self.diagnose)

    async def report(self, buffer: LocalReplayBuffer[Any]) -> None:
        """Show live metrics until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self._generators.check()
            self._silent.clear()
            stats = await self._answer(self._generators.stats(), "a generator", self._stats)
            buffer_stats = await self._answer(buffer.stats(), "the replay buffer", None)
            await self._answer(self._rollouts.look(), "a rollout worker", None)
            if self._reference is not None:
                await self._answer(self._reference.look(self._run.timeline), "the reference model", None)
            now = time.perf_counter()
            before, self._stats, seconds, self._asked_at = self._stats, stats, now - self._asked_at, now
            if buffer_stats is not None:
                self._held = buffer_stats
                self._show(now, seconds, before, buffer_stats)
            trained, tokens = self._run.state.step, self._stats.get("tokens")
            await self._watchdog.look((tokens, self._rollouts.episodes_ended, trained, self._trainer.since))

    async def _answer(self, call: Awaitable[T], who: str, otherwise: T) -> T:
        """Return an actor's answer, or `otherwise` after `ANSWER_S`, so that a stuck actor can't block the watchdog."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return await call
        except (TimeoutError, ActorDiedError):  # the stack and the generator pool handle deaths
            self._silent.append(f"{who} does not answer")
            return otherwise

    def _show(self, now: float, seconds: float, before: dict[str, float], held: BufferStats) -> None:
        deltas = {name: value - before.get(name, 0.0) for name, value in self._stats.items()} if before else {}
        rate = deltas.get("tokens", 0.0) / seconds
        running, ready = self._rollouts.episodes_running, held.ready
        self._run.status(tokens_per_s=rate, in_flight=running, buffer=ready)
        if (timeline := self._run.timeline) is not None:
            timeline.counter("tokens/s", now, sampled=rate)
            timeline.counter("in flight", now, episodes=running, groups_ready=ready)
            timeline.counter("generators up", now, replicas=self._stats.get("replicas", 0.0))
            doing = {name.removeprefix("time/"): value for name, value in deltas.items() if name.startswith("time/")}
            timeline.counter("generators", now, **{name: value / seconds for name, value in doing.items()})

    def diagnose(self) -> str:
        """Describe in one line what the actors are doing."""
        if shortage := self._rollouts.gate.diagnose():
            return shortage
        if self._silent:
            return "; ".join([*self._silent, self._rollouts.longest_waiting()])
        stuck = duration(time.perf_counter() - self._trainer.since)
        trainer = f"the trainer has been in '{self._trainer.doing}' for {stuck}"
        requests = int(self._stats.get("in_flight", 0))
        trainer += f" ({self._held.waiting_for})" if self._held.waiting_for else ""
        return f"{trainer}; the generators hold {requests} requests; {self._rollouts.longest_waiting()}"

    def metrics(self) -> dict[str, float]:
        """Return time accounts and tokens per second since the last call.

        `time/ACTOR/WHAT` are seconds; those of an actor sum to its time. With several generators, `generator/replicas`
        is the number that is up.
        """
        generator = {
            name.removeprefix("time/"): value for name, value in self._stats.items() if name.startswith("time/")
        }
        actors = {
            "trainer": self._trainer.take(),
            **({"reference": self._reference.take_times()} if self._reference is not None else {}),
            **self._rollouts.take_times(),
            "generator": self._generator(generator),
            "buffer": self._buffer(self._held.seconds),
        }
        times = {f"time/{actor}/{what}": seconds for actor, parts in actors.items() for what, seconds in parts.items()}
        if self._run.config.generator.num_replicas > 1:
            times["generator/replicas"] = self._stats.get("replicas", 0.0)
        (tokens, at), self._counted = self._counted, (self._stats.get("tokens", 0.0), self._asked_at)
        if self._asked_at <= at:  # the generators have not answered since
            return times
        return times | {"generator/tokens_per_s": (self._counted[0] - tokens) / (self._asked_at - at)}
