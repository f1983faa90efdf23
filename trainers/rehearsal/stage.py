"""The loops of a run on simulated time: the real `System`, algorithm, publisher and buffer, with timed actors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from forge_env.config.recipe import RunConfig
from forge_env.errors import ForgeError, root_cause
from forge_env.run.account import Account
from forge_env.run.fingerprint import Fingerprint
from trainers.algorithms.grpo import GRPO
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.types import BufferSettings, BufferStats, Reservation
from trainers.loop.checkpoints import Checkpoints
from trainers.loop.stack import unless_stopped
from trainers.loop.system import System
from trainers.rehearsal.clock import simulate
from trainers.rehearsal.engines import Engine, Engines, Processors
from trainers.rehearsal.episodes import Episodes
from trainers.rehearsal.timing import Timing
from trainers.rehearsal.workers import Cuts, Played, PlayedGroup, Sandboxed, TimedRollouts, nothing

CHECKS = ("opened", "before_training", "trained", "before_weights", "weights_sent", "weights_arrived", "close")
"""Methods of the self-checks, which have nothing to check in a rehearsal."""
FILLING = 2
"""Steps after the first `max_off_policy_steps` that are left out of the shares: the pipeline fills."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What is simulated.

    Attributes:
        config: the recipe.
        timing: durations.
        episodes: lengths.
        sandboxed: when an episode holds a sandbox.
        cpus: processors of a host.
        steps: training steps.
        real_s: seconds that the simulation may take on this machine; a slower one ends after fewer steps.
    """

    config: RunConfig
    timing: Timing
    episodes: Episodes
    sandboxed: Sandboxed
    cpus: int
    steps: int
    real_s: float


@dataclass(slots=True)
class Performance:
    """Result of a simulation.

    Attributes:
        steps: trained steps, of which the first `skipped` are not in the shares.
        step_s: mean seconds of a step.
        seconds: actor -> activity -> seconds.
        cuts: what limits cut.
        stats: the buffer's counters.
        quiet_s: longest time without a sampled token, ended episode or change of the trainer's activity.
        quiet: the trainer's activity in that time.
        saves: step and time of each checkpoint.
        queued_s: seconds that sequences waited in the engines' queues.
        staleness: mean staleness of the trained groups.
        prompt: tokens of the trained episodes that were not sampled.
        sampled: tokens of the trained episodes that were.
        turns: turns of a step.
        error: why the run ended early.
        warnings: what the run would have warned of.
    """

    steps: int = 0
    skipped: int = 0
    step_s: float = 0.0
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    cuts: Cuts = field(default_factory=Cuts)
    stats: BufferStats = field(default_factory=BufferStats)
    quiet_s: float = 0.0
    quiet: str = ""
    saves: list[tuple[int, float]] = field(default_factory=list)
    queued_s: float = 0.0
    staleness: float = 0.0
    prompt: int = 0
    sampled: int = 0
    turns: float = 0.0
    error: ForgeError | None = None
    warnings: list[str] = field(default_factory=list)

    def share(self, actor: str, doing: str) -> float:
        """Share of an actor's time that an activity takes."""
        account = self.seconds.get(actor, {})
        total = sum(account.values())
        return account.get(doing, 0.0) / total if total else 0.0

    def shares(self) -> dict[str, dict[str, float]]:
        """Share of every activity of every actor."""
        return {
            actor: {doing: self.share(actor, doing) for doing in account} for actor, account in self.seconds.items()
        }


class _Quiet:
    """Longest time without progress, as the watchdog measures it."""

    def __init__(self, result: Performance) -> None:
        self._result = result
        self._since = 0.0
        self.engines: Engines
        self.trainer: Account

    def __call__(self) -> None:
        """Note progress."""
        now = asyncio.get_running_loop().time()
        idle = max((each.account.since for each in self.engines.each), default=0.0)
        busy = any(each.account.doing == "generate" for each in self.engines.each)
        quiet_s = 0.0 if busy else now - max(self._since, idle)
        if quiet_s > self._result.quiet_s:
            self._result.quiet_s, self._result.quiet = quiet_s, self.trainer.doing
        self._since = now


class _Trainer:
    """The trainer's endpoints."""

    reference = None
    release_memory = staticmethod(nothing)

    def __init__(self, scene: Scene, processors: Processors, result: Performance) -> None:
        self._scene, self._processors, self._result = scene, processors, result

    async def train_on(self, buffer: object, batch: Reservation, account: Account) -> dict[str, float]:
        timing, config = self._scene.timing, self._scene.config
        groups = cast("list[list[Played]]", batch.groups)
        tokens = sum(_computed(group, config) for group in groups)
        for group in groups:
            self._result.prompt += sum(each.prompt for each in group)
            self._result.sampled += sum(each.sampled for each in group)
        if timing.reference_s:
            account.enter("wait for the reference")
            await asyncio.sleep(timing.reference_s * tokens * timing.training)
        account.enter("train")
        seconds = (timing.token_s * tokens + timing.step_s) * timing.training
        await self._processors.run(seconds, config.trainer.threads)
        return {}

    async def fingerprint(self) -> Fingerprint:
        return Fingerprint()

    async def begin_push(self, version: int) -> Coroutine[Any, Any, tuple[None, dict[str, float]]]:
        await asyncio.sleep(self._scene.timing.snapshot_s)

        async def publish() -> tuple[None, dict[str, float]]:
            await asyncio.sleep(self._scene.timing.publish_s)
            return None, {}

        return publish()

    async def update_reference(self, version: int, published: object) -> None:
        return


def _computed(group: list[Played], config: RunConfig) -> float:
    """Tokens of a group that the trainer computes: a first prompt once for the episodes of a minibatch."""
    if not config.trainer.share_prefixes:
        return sum(each.prompt + each.sampled for each in group)
    shared = min(each.prompt // max(each.turns, 1) for each in group)
    times = min(len(group), config.trainer.minibatches)
    return sum(each.prompt + each.sampled for each in group) - shared * (len(group) - times)


class _Healing:
    """Checkpoints: when they are due, how long the trainer waits, and how long they are written."""

    at_rest = None
    collect = save = staticmethod(nothing)

    def __init__(self, scene: Scene, account: Account, result: Performance) -> None:
        self._timing, self._account, self._result = scene.timing, account, result
        self.checkpoints = Checkpoints(cast("Any", SimpleNamespace(config=scene.config)))
        self.unsettled = False
        self.system: System
        self._writing: asyncio.Task[None] | None = None

    def step_trained(self) -> None:
        self.unsettled = False

    async def save_if_due(self) -> None:
        step = self.system.step
        if not self.checkpoints.due(step):
            return
        if self._writing is not None and not self._writing.done():
            return
        self.checkpoints.start_clock()
        with self._account.during("save"):
            await asyncio.sleep(self._timing.save_s)
        self._result.saves.append((step, asyncio.get_running_loop().time()))
        self._writing = asyncio.create_task(asyncio.sleep(self._timing.write_s))


class _Run:
    """The run: its stop request and its warnings."""

    status = note = not_trained = staticmethod(nothing)

    def __init__(self, config: RunConfig, result: Performance) -> None:
        self.config, self._result = config, result
        self.stop = asyncio.Event()
        self.state = SimpleNamespace(evaluations=[])

    def warn(self, text: str) -> None:
        if text not in self._result.warnings:
            self._result.warnings.append(text)


class Stage(System):
    """A `System` whose actors take time and compute nothing."""

    def __init__(self, scene: Scene, result: Performance) -> None:
        self.scene, self.result, self.config = scene, result, scene.config
        config, processors = scene.config, Processors(scene.timing.processors)
        self._clock = asyncio.get_running_loop().time
        self._quiet = _Quiet(result)
        self.account = Account(
            "trainer", "start", clock=self._clock, on_span=lambda actor, doing, start, end: self._quiet()
        )
        grpo = config.grpo
        settings = BufferSettings(grpo.groups_per_step, grpo.max_off_policy_steps, grpo.steps, 0, 0, grpo.replay)
        self.local: LocalReplayBuffer[PlayedGroup] = LocalReplayBuffer(settings)
        self.engines = Engines(scene.timing, processors)
        self.timed = TimedRollouts(
            config, scene.episodes, self.engines, self.local, scene.sandboxed, scene.cpus, self._quiet
        )
        self._quiet.engines, self._quiet.trainer = self.engines, self.account
        stand_ins: dict[str, Any] = {
            "run": _Run(config, result),
            "trainer": _Trainer(scene, processors, result),
            "generators": self.engines,
            "buffer": self.local,
            "rollouts": self.timed,
            "contract": SimpleNamespace(**dict.fromkeys(CHECKS, nothing)),
            "healing": _Healing(scene, self.account, result),
            "record": SimpleNamespace(pending=None, fingerprint=None),
            "evaluator": None,
        }
        vars(self).update(stand_ins)
        cast("_Healing", self.healing).system = self
        self.step = self.lost_in_a_row = self.dropped_in_a_row = 0
        self._warned_late = False
        self._lost_warnings = {}
        self.results, self.under_way = {}, set()
        self._changed = asyncio.Event()
        self._evaluation = None
        self._began = time.perf_counter()
        self._ages: list[float] = []
        self._since: tuple[float, dict[str, dict[str, float]], int] = (0.0, {}, 0)

    async def play(self) -> None:
        """Simulate the steps."""
        self.algorithm = GRPO(self)
        stepping = [asyncio.create_task(engine.run()) for engine in self.engines.each]
        try:
            await self._side_by_side()
        finally:
            for task in stepping:
                task.cancel()
            await asyncio.gather(*stepping, return_exceptions=True)

    async def record_beginning(self) -> None:
        """Nothing is recorded."""

    async def finish_step(self, batch: Reservation, metrics: dict[str, float]) -> None:
        """Start a held-out evaluation and a checkpoint if they are due, and stop after the last simulated step."""
        await asyncio.sleep(self.scene.timing.book_keeping_s)
        result, skipped = self.result, min(self.config.grpo.max_off_policy_steps + FILLING, self.scene.steps // 3)
        every = self.config.evaluation.every
        self._ages += batch.staleness
        if every and self.step % every == 0 and self.step < self.config.grpo.steps:
            self._evaluate_beside()
        await self.healing.save_if_due()
        now = self._clock()
        if self.step <= skipped:
            self._since = now, self.seconds(), sum(self.timed.turns.values())
            result.skipped = self.step
        else:
            began, before, turns = self._since
            result.steps = self.step
            count = self.step - result.skipped
            result.step_s = (now - began) / count
            result.seconds = _difference(self.seconds(), before)
            result.turns = (sum(self.timed.turns.values()) - turns) / count
        enough = time.perf_counter() - self._began > self.scene.real_s and self.step > skipped
        if self.step >= self.scene.steps or enough:
            result.cuts, result.stats = self.timed.cuts, await self.local.stats()
            result.staleness = sum(self._ages) / len(self._ages)
            result.queued_s = sum(engine.queued_s for engine in self.engines.each)
            self.run.stop.set()

    def seconds(self) -> dict[str, dict[str, float]]:
        """Seconds of every activity of every actor since the beginning."""
        return {
            "trainer": self.account.seconds(),
            "generator": self.engines.shares(),
            "episodes": self.timed.accounts.seconds(),
        }

    def _evaluate_beside(self) -> None:
        """Play the held-out tasks while training continues, as `System` does."""
        section = self.config.evaluation
        if self._evaluation is not None and not self._evaluation.done():
            self.run.warn("an evaluation was skipped: the previous one was still running. Raise evaluation.every")
            return

        async def evaluate() -> None:
            await self._publisher.settled()
            limit = asyncio.Semaphore(self.config.generator.max_num_seqs)
            async with _held(self.engines, pinned=section.pinned) as engine:

                async def play(index: int) -> None:
                    async with limit:
                        await self.timed.held_out(index, engine)

                await asyncio.gather(*map(play, range(section.num_tasks)))

        self._evaluation = self._tasks.create_task(unless_stopped(self.run, evaluate()))

    def _evaluate_what_was_lost(self) -> None:
        return


@asynccontextmanager
async def _held(engines: Engines, *, pinned: bool) -> AsyncIterator[Engine | None]:
    """Context with the engine that is held for an evaluation, or None if it is not pinned."""
    if not pinned:
        yield None
        return
    async with engines.held() as engine:
        yield engine


def _difference(after: dict[str, dict[str, float]], before: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {
        actor: {doing: seconds - before.get(actor, {}).get(doing, 0.0) for doing, seconds in account.items()}
        for actor, account in after.items()
    }


def perform(scene: Scene) -> Performance:
    """Simulate a run; a failure that the real run would have is in the result."""
    result = Performance()

    async def play() -> None:
        stage = Stage(scene, result)
        try:
            await stage.play()
        except* ForgeError:
            result.seconds, result.cuts = stage.seconds(), stage.timed.cuts
            raise

    try:
        simulate(play())
    except* ForgeError as errors:
        result.error = cast("ForgeError", root_cause(errors))
    return result
