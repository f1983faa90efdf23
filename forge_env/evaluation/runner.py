"""Runner of an evaluation's samples, with as much concurrency as endpoint, sandboxes and configuration allow.

A sample starts if the endpoint has room for another request (its window minus the requests in flight and the samples
that have started but not sent a request yet), the queue for sandboxes is short, and fewer than `max_samples` samples
are running. Every change of one of these sets the same event; nothing is polled.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from forge_env.concurrency import to_its_end
from forge_env.config.evaluation import EvaluationConfig
from forge_env.endpoint.errors import EndpointError
from forge_env.endpoint.policy import EndpointPolicy
from forge_env.environment.base import Environment, checked_task
from forge_env.errors import EnvironmentBugError, ForgeError, ProgramCrashError, environment_code, with_place
from forge_env.evaluation.metering import BudgetExhaustedError, Meter, MeteredPolicy
from forge_env.evaluation.plan import Sample, SampleResult, result_of, task_digest
from forge_env.evaluation.progress import EvaluationProgress
from forge_env.evaluation.results import ResultTable
from forge_env.evaluation.tables import ESTIMATED
from forge_env.events import Events
from forge_env.files import DiskFullError
from forge_env.policy import Policy
from forge_env.rollout.bugs import BugRate
from forge_env.rollout.episode import EpisodeLimits, Retry, run_episode
from forge_env.sandbox.engines import LazyEngine
from forge_env.sandbox.protocol import Sandbox, SandboxEngine
from forge_env.sandbox.spec import SandboxSpec
from forge_env.tools.schema import telling
from forge_env.trajectory import Trajectory, TrajectoryWriter
from forge_env.types import Task
from forge_env.working_time import waiting

# ---
# Python's garbage collector while thousands of samples are running.
#
# By default it looks for cycles after every 700 new objects, and scans all live objects a few times a minute: with
# 10,000 requests in flight that is half of the time per request. Here it runs only after so many new objects that most
# objects of finished samples have been freed by then, so it rarely runs, and scans mainly objects of running samples.

SELDOM = (200_000, 50, 10)

_lock = threading.Lock()
_users = 0
_before = (0, 0, 0)


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Collect garbage rarely within this context; the original thresholds return when the last such context ends."""
    global _users, _before
    with _lock:
        _users += 1
        if _users == 1:
            _before = gc.get_threshold()
            if 0 < _before[0] < SELDOM[0]:  # 0: the collector is turned off
                gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                gc.set_threshold(*_before)


QUEUE = 2
"""Minimum length of the queue for sandboxes that holds back new samples, however few sandboxes are in use."""


class WatchedEngine(LazyEngine):
    """Counts the sandboxes in use and the requests for one. Waiting for a sandbox is not working time."""

    def __init__(self, name: str, given: SandboxEngine | None = None, **options: Any) -> None:
        super().__init__(name, **options)
        self._engine = given
        self.on_change: Callable[[], object] = lambda: None
        """Called after each acquired sandbox."""
        self.out = 0
        self.queued = 0

    @property
    def in_use(self) -> bool:
        """Whether any sandbox is in use or waited for."""
        return self.out + self.queued > 0

    @property
    def saturated(self) -> bool:
        """Whether the queue is at least as long as the number in use: more samples would only lengthen it."""
        return self.queued >= max(QUEUE, self.out)

    async def acquire(self, spec: SandboxSpec | None = None) -> Sandbox:
        """Acquire a sandbox of the engine."""
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
        """Return a sandbox to the engine."""
        self.out -= 1
        await super().release(sandbox)


log = logging.getLogger(__name__)
T = TypeVar("T")
REFUSED_SAMPLES = 3
"""Successive samples rejected with 403 or 404, before any request succeeded, after which the run is aborted: a single
one may be rejected for its content."""
"""Number of recent samples for the bug rate, and the minimum number to compute it."""
ROOM_S = 2.0
"""Seconds between attempts to write to a full disk; no event signals free space."""


class RunAbortedError(ForgeError):
    """Error of an aborted run in which every sample would fail in the same way."""


class TaskSource:
    """Creates an environment's instances and tasks."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self.make = make
        self.environment = make()
        self.task: Callable[[str, int], tuple[Task, str]] = lru_cache(maxsize=4096)(self._task)
        """Returns a task and its digest; caches the last few thousand for their next epoch."""

    def _task(self, split: str, index: int) -> tuple[Task, str]:
        """The task as created, and its `task_digest` before any episode could change it."""
        with self.code("task", f"{split}/{index}"):
            task = checked_task(f"{type(self.environment).__name__}.task", self.environment.task(split, index))
        return task, task_digest(task)

    def code(self, method: str, of: str) -> AbstractContextManager[None]:
        """Context for calls of an environment's method, for the task `of`."""
        name = f"{type(self.environment).__name__}.{method}"
        return environment_code(name, of, limit_s=self.environment.config.code_timeout_s)


@dataclass
class Runner:
    """Plays the samples of an evaluation in this process. Used from one event loop."""

    config: EvaluationConfig
    policy: Policy
    sources: dict[str, TaskSource]
    engine: WatchedEngine
    writer: TrajectoryWriter
    meter: Meter
    progress: EvaluationProgress
    events: Events
    opponents: dict[str, dict[str, Policy]] = field(default_factory=dict)
    """Policies that play seats in place of the evaluated policy, by label and seat."""
    results: ResultTable = field(default_factory=ResultTable)
    """Results of samples, added as they finish."""
    rescued: Callable[[], Path | None] = lambda: None
    """Returns a new path for the samples if their folder is gone."""
    error: ForgeError | None = None
    """Why the run ends early, or None."""
    stopping: bool = False

    def __post_init__(self) -> None:
        config = self.config
        self._limiter = self.policy.limiter if isinstance(self.policy, EndpointPolicy) else None
        self._changed = asyncio.Event()
        self._running = 0
        self._lost = 0  # samples lost since the last one that wasn't
        self._bugs = BugRate(config.max_bug_rate, "samples")
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
        """Start no more samples; running ones are finished, without pauses before retries."""
        self.stopping = True
        for policy in (self.policy, *(policy for seats in self.opponents.values() for policy in seats.values())):
            if isinstance(policy, EndpointPolicy):
                policy.stop_waiting()
        self._changed.set()

    async def run(self, samples: Iterable[Sample]) -> None:
        """Play `samples` in order. If cancelled, it abandons running samples; all finished ones are written."""
        pending = iter(samples)
        with ThreadPoolExecutor(1, "forge-env-write") as self._thread, telling(self.events.note):
            await self._play_all(pending)
            while self.writer.full and self.error is None and await self._has_room():
                await self._play_all(pending)
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
                    await asyncio.sleep(0)  # the sample may now request a sandbox, which changes `saturated`
        if self.meter.exhausted and self.error is None:
            self.error = BudgetExhaustedError(
                f"the budget of {self.config.budget:g} is used up", fix="resume with a larger --budget"
            )

    def _may_start(self) -> bool:
        if not self._running:
            return True  # one sample must run to detect recovery
        if self._running >= (self.config.max_samples or 2 * self.config.concurrency) or self.engine.saturated:
            return False
        if self._limiter is None or self.meter.asking + self.meter.early < self._limiter.size:
            return True
        self._limiter.press()  # signals demand: samples that are still in reset will send requests too
        return False

    async def _has_room(self) -> bool:
        """After the disk filled up, write the held records once possible; whether to continue playing."""
        waited = False
        while not await self._writing(self.writer.flush) and not self.stopping:
            notice = f"the disk is full: {self.writer.held} finished samples are waiting to be written; free some space"
            if not waited:
                self.events.note(notice)
            waited, self.progress.notice = True, notice
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), ROOM_S)
        self.progress.notice = ""
        if waited and not self.stopping:
            self.writer.full = False
            return True
        self.error = DiskFullError(
            "the disk is full; all finished samples are saved", fix="free some space, then --resume plays the rest"
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
            task, digest = source.task(sample.split, sample.index)
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
                raise  # addressed to the user who started this run
            trajectory.valid, trajectory.turns = False, metered.turns
            if isinstance(error, ProgramCrashError):
                trajectory.crash(error)
            else:
                trajectory.error = f"{type(error).__name__}: {error}" if known else with_place(error)
                log.error("sample %s: %s", sample.id, trajectory.error, exc_info=None if known else error)
                if isinstance(error, EnvironmentBugError):
                    self._note_once(error.same, f"a bug in the environment: {error}")
        if trajectory.crashed:
            self._note_once("crash", f"agent crashed: {trajectory.error}; such samples score 0")
        return trajectory

    def _note_once(self, kind: str, text: str) -> None:
        """Show the first message of a kind on the display."""
        if kind not in self._told:
            self._told.add(kind)
            self.events.note(text)

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
        except (TypeError, ValueError, RecursionError) as error:  # a policy's or environment's value is not JSON
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
        if result.estimated_requests and "estimates" not in self._told:
            text = f"the endpoint does not count tokens: {ESTIMATED}; limits and budget use this estimate"
            log.warning("%s", text)
            self._note_once("estimates", text)
        self._abort_if_hopeless(result)
        self.events.update()

    def _writing(self, work: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run `work` in the writer's thread, after all earlier calls."""
        return asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def _hopeless(self, *, enough: int = REFUSED_SAMPLES) -> EndpointError | None:
        """The error that every other request will meet too, or None.

        A rejection that may concern a single sample counts only after `enough` lost samples in a row, and not if the
        endpoint has answered other requests, in this process or before resuming.
        """
        fatal = self.policy.fatal if isinstance(self.policy, EndpointPolicy) else None
        if fatal is None or not fatal.excusable or fatal.status == 401:
            return fatal
        return fatal if self._lost >= enough and not self._answered_before else None

    def _abort_if_hopeless(self, result: SampleResult) -> None:
        """Abort if the environment's code fails often, the endpoint rejects every request, or many samples in a row are
        lost. With frequent bugs, the score would only cover answers that the environment can handle."""
        unfinished = result.error_kind == BudgetExhaustedError.__name__
        self._lost = 0 if result.valid else self._lost + (not unfinished)
        bugs = self._bugs.add((result.error or "") if result.is_bug else None)
        if self.error is not None:
            return
        if bugs is not None:
            fix = "fix the environment, then --resume; --max-bug-rate sets the limit"
            self.error = RunAbortedError(bugs, fix=fix)
        elif (fatal := self._hopeless()) is not None:
            self.error = _refused(fatal)
        elif self._lost >= self.config.max_failures:
            self.error = RunAbortedError(
                f"the last {self._lost} samples were all lost; the last one: {result.error}",
                fix="fix the cause; --resume plays the missing samples",
            )
        if self.error is not None:
            self.stop()


def _refused(fatal: EndpointError) -> RunAbortedError:
    return RunAbortedError(f"the endpoint rejects every request: {fatal.message}", fix=fatal.fix)
