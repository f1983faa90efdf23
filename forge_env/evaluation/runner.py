"""Playing the samples of an evaluation: as many at once as endpoint, sandboxes and configuration allow.

A sample starts when the endpoint has room for another request (its window less what is in flight and what has started
but not yet asked), when the queue for sandboxes is short, and while fewer than `max_samples` are under way. Whoever
changes one of these sets one event; nothing is polled.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from forge_env.concurrency import to_its_end
from forge_env.config.evaluation import EvaluationConfig
from forge_env.display.terminal import Display
from forge_env.endpoint.errors import EndpointError
from forge_env.endpoint.policy import EndpointPolicy
from forge_env.environment.base import Environment
from forge_env.errors import EnvironmentBugError, ForgeError, ProgramCrashError, environment_code, with_place
from forge_env.evaluation.metering import BudgetExhaustedError, Meter, MeteredPolicy
from forge_env.evaluation.plan import Sample, SampleResult, result_of, task_digest
from forge_env.evaluation.progress import EvaluationProgress
from forge_env.evaluation.results import ResultTable
from forge_env.evaluation.tables import ESTIMATED
from forge_env.files import DiskFullError
from forge_env.policy import Policy
from forge_env.rollout.episode import EpisodeLimits, Retry, run_episode
from forge_env.rollout.working_time import waiting
from forge_env.sandbox.engines import LazyEngine
from forge_env.sandbox.protocol import Sandbox, SandboxEngine, SandboxSpec
from forge_env.tools.schema import telling
from forge_env.trajectory import Trajectory, TrajectoryWriter
from forge_env.types import Task

# ---
# Python's garbage collector while thousands of samples are under way.
#
# By default it looks for cycles after every 700 new objects, and at all objects alive a few times a minute: with 10,000
# requests in flight that is half of the time a request costs. Here it looks only after so many new objects that most of
# those of finished samples are gone by then: what is looked at is what is in flight, and that seldom.

SELDOM = (200_000, 50, 10)

_lock = threading.Lock()
_users = 0
_before = (0, 0, 0)


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """A block of much concurrency; the process's own thresholds are back when the last such block has ended."""
    global _users, _before
    with _lock:
        _users += 1
        if _users == 1:
            _before = gc.get_threshold()
            if 0 < _before[0] < SELDOM[0]:  # 0: somebody has turned it off
                gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                gc.set_threshold(*_before)


QUEUE = 2
"""Sandboxes waited for, however few are out, that don't yet hold anything up."""


class WatchedEngine(LazyEngine):
    """Knows how many sandboxes are out, and how many are waited for. Waiting for a sandbox is not working time.

    Args:
        name: of the engine that the first sandbox opens.
        given: a started engine to use instead.
        options: of the engine.
    """

    def __init__(self, name: str, given: SandboxEngine | None = None, **options: Any) -> None:
        super().__init__(name, **options)
        self._engine = given
        self.on_change: Callable[[], object] = lambda: None
        """Called whenever a sandbox was handed out."""
        self.out = 0
        self.queued = 0

    @property
    def in_use(self) -> bool:
        """Whether anybody has, or waits for, a sandbox."""
        return self.out + self.queued > 0

    @property
    def saturated(self) -> bool:
        """Whether the queue is as long as all that is out: starting more samples would only lengthen it."""
        return self.queued >= max(QUEUE, self.out)

    async def acquire(self, spec: SandboxSpec | None = None) -> Sandbox:
        """A sandbox of the engine."""
        self.queued += 1
        try:
            with waiting():
                sandbox = await super().acquire(spec)
        finally:
            self.queued -= 1
        self.out += 1
        self.on_change()
        return sandbox

    async def release(self, sandbox: Sandbox) -> None:
        """Give a sandbox back."""
        self.out -= 1
        await super().release(sandbox)


log = logging.getLogger(__name__)
T = TypeVar("T")
REFUSED_SAMPLES = 3
"""Samples in a row that are refused with 403 or 404 before anything is answered: one may be refused for its content."""
RECENT, FEWEST = 100, 20
"""Samples over which the rate of bugs is taken, and those below which there is none yet."""
ROOM_S = 2.0
"""How often a full disk is tried again; no event tells when there is room."""


class RunAbortedError(ForgeError):
    """The run was given up: every sample would fail in the same way."""


class TaskSource:
    """Where the samples of one environment come from."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self.make = make
        self.environment = make()
        self._made: Callable[[str, int], tuple[Task, str]] = lru_cache(maxsize=4096)(self._make_task)
        """Task and digest; the last few thousand are kept for their next epoch."""

    def _make_task(self, split: str, index: int) -> tuple[Task, str]:
        with self.code("task", f"{split}/{index}"):
            task = self.environment.task(split, index)
        return task, task_digest(task)

    def code(self, method: str, of: str) -> AbstractContextManager[None]:
        """A block that calls a method of the environment, for the task `of`."""
        name = f"{type(self.environment).__name__}.{method}"
        return environment_code(name, of, limit_s=self.environment.config.code_timeout_s)

    def task(self, split: str, index: int) -> Task:
        """The task as the environment makes it. `EnvironmentBugError`: it failed, or does not end."""
        return self._made(split, index)[0]

    def digest(self, split: str, index: int) -> str:
        """`task_digest` of the task as it was made, before any episode could change it."""
        return self._made(split, index)[1]


@dataclass
class Runner:
    """One process's part of an evaluation. Used from one event loop."""

    config: EvaluationConfig
    policy: Policy
    sources: dict[str, TaskSource]
    engine: WatchedEngine
    writer: TrajectoryWriter
    meter: Meter
    progress: EvaluationProgress
    display: Display
    opponents: dict[str, dict[str, Policy]] = field(default_factory=dict)
    """Who plays seats instead of the policy, by label and seat."""
    results: ResultTable = field(default_factory=ResultTable)
    """Samples are added as they end."""
    rescued: Callable[[], Path | None] = lambda: None
    """Returns a new path for the samples if their folder is gone."""
    error: ForgeError | None = None
    """Why the run ends early, where it does."""
    stopping: bool = False

    def __post_init__(self) -> None:
        config = self.config
        self._limiter = self.policy.limiter if isinstance(self.policy, EndpointPolicy) else None
        self._changed = asyncio.Event()
        self._running = 0
        self._estimates_noted = self._crash_noted = False
        self._lost = 0  # samples lost since the last that wasn't
        self._bugs: deque[bool] = deque(maxlen=RECENT)
        self._told: set[str] = set()
        self._answered_before = self.meter.total.requests > 0
        self.engine.on_change = self._changed.set
        if self._limiter is not None:
            self._limiter.on_change = self._changed.set
        self._limits = EpisodeLimits(
            max_turns=config.turn_limit, wall_s=config.time_limit, working_s=config.working_limit
        )
        self._retry = Retry(attempts=config.sample_retries)

    def stop(self) -> None:
        """Start no more samples; those under way are played to their end, without pauses before retries."""
        self.stopping = True
        for policy in (self.policy, *(policy for seats in self.opponents.values() for policy in seats.values())):
            if isinstance(policy, EndpointPolicy):
                policy.stop_waiting()
        self._changed.set()

    async def run(self, samples: Iterable[Sample]) -> None:
        """Play `samples` in order. Cancelled, it gives up those under way; whatever finished is written."""
        pending = iter(samples)
        with ThreadPoolExecutor(1, "forge-env-write") as self._thread, telling(self.display.note):
            while True:
                await self._play_all(pending)
                if not await self._has_room():
                    break
        if self.error is None and (fatal := self._hopeless(enough=1)) is not None:
            self.error = _refused(fatal)

    async def _play_all(self, pending: Iterator[Sample]) -> None:
        async with asyncio.TaskGroup() as group:
            while not self.stopping and not self.writer.full and not self.meter.exhausted:
                if not self._may_start():
                    self._changed.clear()
                    await self._changed.wait()
                    continue
                sample = next(pending, None)
                if sample is None:
                    return
                metered = MeteredPolicy(self.policy, self.meter, self.config, self._changed.set)
                self._running += 1
                group.create_task(self._play(sample, metered))
                if self._running == 1 or self.engine.in_use:
                    await asyncio.sleep(0)  # it may ask for a sandbox now: whether there are enough is known only then
        if self.meter.exhausted and self.error is None:
            self.error = BudgetExhaustedError(
                f"the budget of {self.config.budget:g} is used up", fix="resume with a larger --budget"
            )

    def _may_start(self) -> bool:
        if not self._running:
            return True  # someone must notice when things get better
        if self._running >= (self.config.max_samples or 2 * self.config.concurrency) or self.engine.saturated:
            return False
        if self._limiter is None or self.meter.asking + self.meter.early < self._limiter.size:
            return True
        self._limiter.press()  # what is in flight may be less: samples that reset will ask as well
        return False

    async def _has_room(self) -> bool:
        """After the disk ran full: write what is held as soon as that is possible; whether to go on then."""
        if not self.writer.full or self.error is not None:
            return False
        waited = False
        while not await self._writing(self.writer.flush) and not self.stopping:
            notice = f"the disk is full: {self.writer.held} finished samples wait to be written; free some space"
            if not waited:
                self.display.note(notice)
            waited, self.progress.notice = True, notice
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), ROOM_S)
        self.progress.notice = ""
        if waited and not self.stopping:
            self.writer.full = False
            return True
        self.error = DiskFullError(
            "the disk is full; every finished sample is written", fix="free some space, then --resume plays the rest"
        )
        return False

    async def _play(self, sample: Sample, metered: MeteredPolicy) -> None:
        environment = self.progress.environments[sample.label]
        environment.running += 1
        try:
            trajectory = await self._episode(sample, metered)
            await to_its_end(asyncio.ensure_future(self._record(sample, trajectory, metered)))
        finally:
            environment.running -= 1
            self._running -= 1
            metered.begun()
            self._changed.set()

    async def _episode(self, sample: Sample, metered: MeteredPolicy) -> Trajectory:
        source = self.sources[sample.label]
        trajectory = Trajectory(
            id=sample.id, environment=sample.label, task_id=f"{sample.split}/{sample.index}", split=sample.split
        )
        try:
            task, digest = source.task(sample.split, sample.index), source.digest(sample.split, sample.index)
            trajectory.info["task"] = digest
            trajectory.task_id, trajectory.split = task.id, task.split
            trajectory.difficulty, trajectory.tags = task.difficulty, list(task.tags)
            trajectory = await run_episode(
                source.make,
                metered,
                task=task,
                seed=sample.seed(self.config.seed),
                limits=self._limits,
                opponents=self.opponents.get(sample.label, {}),
                environment_name=sample.label,
                trajectory_id=sample.id,
                retry=self._retry,
            )
            trajectory.info["task"] = digest
        except Exception as error:  # a sample is the boundary: one bug must not cost the others
            known = isinstance(error, EnvironmentBugError | BudgetExhaustedError)
            if isinstance(error, ForgeError) and not known:
                raise  # a deliberate word to whoever started this run
            trajectory.valid, trajectory.turns = False, metered.turns
            if isinstance(error, ProgramCrashError):
                trajectory.crash(error)
                return self._noted(trajectory)
            trajectory.error = f"{type(error).__name__}: {error}" if known else with_place(error)
            log.error("sample %s: %s", sample.id, trajectory.error, exc_info=None if known else error)
            if isinstance(error, EnvironmentBugError) and error.same not in self._told:
                self._told.add(error.same)
                self.display.note(f"a bug in the environment: {error}")
        return self._noted(trajectory)

    def _noted(self, trajectory: Trajectory) -> Trajectory:
        """Say once that the agent's own code fails."""
        if trajectory.crashed and not self._crash_noted:
            self._crash_noted = True
            self.display.note(f"agent crashed: {trajectory.error}; such samples score 0")
        return trajectory

    async def _record(self, sample: Sample, trajectory: Trajectory, metered: MeteredPolicy) -> None:
        used = metered.usage
        trajectory.info |= {
            "index": sample.index,
            "epoch": sample.epoch,
            "max_reward": self.sources[sample.label].environment.max_reward,
            "usage": {name: getattr(used, name) for name in used.__slots__},
        }
        if (path := self.rescued()) is not None:
            await self._writing(self.writer.move, path)
        try:
            await self._writing(self.writer.write, trajectory)
        except (TypeError, ValueError, RecursionError) as error:  # a policy or an environment put in what is not JSON
            trajectory = Trajectory(
                id=sample.id,
                environment=sample.label,
                task_id=trajectory.task_id,
                split=trajectory.split,
                valid=False,
                error=f"{type(error).__name__}: the sample can't be recorded: {error}",
                wall_s=trajectory.wall_s,
                info=trajectory.info,
            )
            log.error("sample %s: %s", sample.id, trajectory.error)
            await self._writing(self.writer.write, trajectory)
        if self.writer.full:
            self._changed.set()
        result = result_of(trajectory, self.config.score)
        self.results.add(result)
        self.progress.environments[sample.label].add(result)
        if result.error_kind is not None and not result.is_bug:
            self.progress.lost[result.error_kind] += 1
        self._note_estimates(result)
        self._watch_bugs(result)
        self._watch_losses(result)
        self.display.update()

    def _writing(self, work: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Do it in the writer's thread, after all that was given to it before."""
        return asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def _note_estimates(self, result: SampleResult) -> None:
        """Warn once that limits and budget use estimated token counts."""
        if result.estimated_requests and not self._estimates_noted:
            self._estimates_noted = True
            text = f"the endpoint does not count tokens: {ESTIMATED}; limits and budget use this estimate"
            log.warning("%s", text)
            self.display.note(text)

    def _hopeless(self, *, enough: int = REFUSED_SAMPLES) -> EndpointError | None:
        """What every other request will meet as well; a refusal that may concern one sample alone counts if `enough`
        of them were lost in a row, and none where the endpoint has answered others, now or before a resumption."""
        fatal = self.policy.fatal if isinstance(self.policy, EndpointPolicy) else None
        if fatal is None or not fatal.excusable or fatal.status == 401:
            return fatal
        return fatal if self._lost >= enough and not self._answered_before else None

    def _watch_bugs(self, result: SampleResult) -> None:
        """Give up where the environment's own code fails often: the score would be that of what it can take."""
        self._bugs.append(result.is_bug)
        rate = sum(self._bugs) / len(self._bugs)
        if self.error is None and len(self._bugs) >= FEWEST and rate > self.config.max_bug_rate:
            self.error = RunAbortedError(
                f"the environment's own code failed on {rate:.0%} of the last {len(self._bugs)} samples, "
                f"the last time: {result.error}",
                fix="fix the environment, then --resume; --max-bug-rate is the limit",
            )
            self.stop()

    def _watch_losses(self, result: SampleResult) -> None:
        """Give up when nothing but losses come in, at once where the endpoint says that it is hopeless."""
        unfinished = result.error_kind == BudgetExhaustedError.__name__
        self._lost = 0 if result.valid else self._lost + (not unfinished)
        fatal = self._hopeless()
        if self.error is not None or (fatal is None and self._lost < self.config.max_failures):
            return
        if fatal is not None:
            self.error = _refused(fatal)
        else:
            self.error = RunAbortedError(
                f"the last {self._lost} samples were all lost; the last one: {result.error}",
                fix="when that is fixed, --resume plays what is missing",
            )
        self.stop()


def _refused(fatal: EndpointError) -> RunAbortedError:
    return RunAbortedError(f"the endpoint rejects every request: {fatal.message}", fix=fatal.fix)
