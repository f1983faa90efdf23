"""Once a second: live figures, where everybody's time goes, and whether anything still moves."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from forge_env.run import Run
from forge_env.run.account import Account
from forge_env.run.state import duration
from trainers.buffer.types import GroupBuffer
from trainers.generator.pool import GeneratorPool
from trainers.loop.rollouts import Rollouts
from trainers.loop.watchdog import Watchdog

INTERVAL_S = 1.0


class Status:
    """Watches the actors of a training session."""

    def __init__(self, run: Run, generators: GeneratorPool, rollouts: Rollouts, trainer: Account) -> None:
        self._run = run
        self._generators = generators
        self._rollouts = rollouts
        self._trainer = trainer
        self._stats: dict[str, float] = {}
        self._missing = ""
        self._logged: dict[str, float] = {}
        section = run.config.watchdog
        self._watchdog = Watchdog(run, warn_s=section.warn_s, end_s=section.end_s, diagnose=self.diagnose)

    async def report(self, buffer: GroupBuffer[Any]) -> None:
        """Show live figures until cancelled.

        Raises:
            ForgeError: nothing has moved for longer than the recipe allows.
        """
        at = time.perf_counter()
        while True:
            await asyncio.sleep(INTERVAL_S)
            before, self._stats = self._stats, await self._generators.stats()
            held = await buffer.stats()
            self._missing = held.waiting_for or ""
            now = time.perf_counter()
            rate = (self._stats["tokens"] - before["tokens"]) / (now - at) if before else 0.0
            at = now
            running, ready = self._rollouts.episodes_running, held.ready
            self._run.status(tokens_per_s=rate, in_flight=running, buffer=ready)
            if (timeline := self._run.timeline) is not None:
                timeline.counter("tokens/s", now, sampled=rate)
                timeline.counter("in flight", now, episodes=running, groups_ready=ready)
            trained = self._run.state.step
            self._watchdog.look((self._stats["tokens"], self._rollouts.episodes_ended, trained, self._trainer.since))

    def diagnose(self) -> str:
        """What every actor is at, in one line."""
        trainer = f"the trainer has been in '{self._trainer.doing}' for {self._ago(self._trainer.since)}"
        requests = int(self._stats.get("in_flight", 0))
        trainer += f" ({self._missing})" if self._missing else ""
        return f"{trainer}; the generators hold {requests} requests; {self._rollouts.longest_waiting()}"

    def _ago(self, since: float) -> str:
        return duration(time.perf_counter() - since)

    def time_metrics(self) -> dict[str, float]:
        """`time/ACTOR/WHAT` since the last call, seconds; those of an actor sum to its time."""
        account = {name.removeprefix("time/"): value for name, value in self._stats.items() if name.startswith("time/")}
        generator = {name: value - self._logged.get(name, 0.0) for name, value in account.items()}
        self._logged = account
        actors = {"trainer": self._trainer.take(), "episodes": self._rollouts.accounts.take(), "generator": generator}
        return {f"time/{actor}/{what}": seconds for actor, parts in actors.items() for what, seconds in parts.items()}
