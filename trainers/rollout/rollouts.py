"""The controller's side of a run's rollouts: chooses tasks, assigns them to workers and collects the reports.

    algorithm --ticket--> Rollouts --request--> LocalWorker: episodes -> group -> training data -> ReplayBuffer
                             ^------- report ------'

The group at position p is always played by worker p % workers, retries included. The controller gets neither messages
nor tokens: a report is a few hundred bytes per group.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forge_env import machine
from forge_env.concurrency import for_each
from forge_env.environment.base import Environment
from forge_env.errors import ForgeError
from forge_env.figures import duration
from forge_env.rollout.bugs import BugRate
from forge_env.run import Run
from forge_env.run.account import Since
from forge_env.run.clock import Reading, RemoteClock, read_clock
from forge_env.run.trajectories import recorded, rename
from forge_env.tasks.curriculum import make_order
from forge_env.trajectory import Trajectory
from trainers.actors.remote import ActorDiedError, withdrawn_when_cancelled
from trainers.actors.replicas import Replica, Replicas, ReplicaState
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.types import Ticket
from trainers.generator.client import Member
from trainers.generator.types import WeightsLostError
from trainers.rollout.local import WorkerSettings
from trainers.rollout.types import (
    Fate,
    GroupReport,
    HeldOut,
    HeldOutReport,
    Links,
    Report,
    RollOut,
    Totals,
    WorkerStatus,
    bug_of,
)

CLOSE_S = 30.0
"""Seconds that workers have to release their sandboxes and write pending records."""
MEMORY_CHECK_S = 1.0
"""Seconds between two checks while episodes wait for memory."""
ENDED = (ReplicaState.FAILED, ReplicaState.STOPPED)
MOST_DEATHS = 3
"""Worker deaths per group before the task is blamed."""
MANY_HELD_OUT = 100_000
"""An evaluation with more episodes than this shows their number at its start."""
Memory = tuple[Mapping[str, Any], Sequence[str]]
logger = logging.getLogger(__name__)


class Crew(Replicas):
    """Starts, calls, restarts and stops the rollout workers.

    Args:
        placed: one function per worker, called at each start: it returns the actor class, configured for the host to
            start on. None: all workers start on this machine.

    Attributes:
        memory: maps a worker's number to the state to restore when it starts: its preparation's state and the ids of
            tasks that are set aside.
    """

    def __init__(
        self, settings: Sequence[WorkerSettings], placed: Sequence[Callable[[], Awaitable[Any]]] | None = None
    ) -> None:
        from trainers.rollout.worker import RolloutWorker  # imports Monarch

        super().__init__(RolloutWorker.options(num_replicas=len(settings), mesh_name="rollouts"))
        self.memory: Callable[[int], Memory] = lambda number: ({}, ())
        self._settings = settings
        self._placed = placed
        self._links: Links | None = None
        self._first = asyncio.Event()
        self._closed = False

    @property
    def count(self) -> int:
        """Number of workers."""
        return len(self._settings)

    # --- start and restart

    async def launch(self, replica: Replica) -> Any:
        """Start a worker's process."""
        settings = self._settings[replica.number]
        if self._placed is None:
            return await self._class.options(mesh_name=settings.name).launch(settings)
        return await (await self._placed[replica.number]()).launch(settings)

    async def set_up(self, replica: Replica) -> None:
        """Set up a worker and give it the state and the links that its predecessor had.

        Worker 0 is set up before the others, since it may have to build sandbox images.
        """
        if replica.number:
            await self._first.wait()
        await replica.call("setup")
        self._first.set()
        await replica.call("restore", *self.memory(replica.number))
        sent = None
        while sent is not self._links:
            sent = self._links
            await replica.call("connect", sent)

    # --- calls

    async def connect(self, links: Links) -> None:
        """Send every worker the actors that it calls."""
        self._links = links
        await self.call_all("connect", links)

    async def call(self, number: int, endpoint: str, request: Any) -> Any:
        """Call an endpoint of one worker and return its answer; cancelling this withdraws the request.

        Waits until the worker is healthy.

        Raises:
            ActorDiedError: the worker died during the call.
        """
        replica = self.replicas[number]
        await self.until(lambda: replica.healthy or replica.metrics.state in ENDED)
        if not replica.healthy:
            await asyncio.shield(self.failure)
        return await withdrawn_when_cancelled(
            lambda name: replica.call(endpoint, request, call=name),
            lambda name: replica.call("withdraw", name),
            patience_s=CLOSE_S,
        )

    async def restore(self) -> None:
        """Restore the state (`memory`) of every healthy worker."""
        await asyncio.gather(*(each.call("restore", *self.memory(each.number)) for each in self.healthy))

    async def check_prompts(self) -> None:
        """See `LocalWorker.check_prompts`."""
        await self.replicas[0].call("check_prompts")

    async def close(self) -> list[WorkerStatus | None]:
        """Stop all workers; return their final status."""
        self._closed = True
        try:
            async with asyncio.timeout(CLOSE_S):
                return await self.call_all("close")
        except TimeoutError:
            logger.warning("a rollout worker did not end within %g s and was killed", CLOSE_S)
            return []

    async def stop(self) -> None:
        """Close the workers, if that hasn't happened yet, and end their processes."""
        if not self._closed:
            await self.close()
        await super().stop()


@dataclass(slots=True)
class _Seen:
    """The controller's record of one worker.

    Attributes:
        before: totals over its previous lives.
        state: state of its preparation.
        untold: ids of tasks set aside that haven't been sent to it yet.
    """

    status: WorkerStatus = field(default_factory=WorkerStatus)
    before: WorkerStatus = field(default_factory=WorkerStatus)
    state: dict[str, Any] = field(default_factory=dict)
    untold: set[str] = field(default_factory=set)
    clock: RemoteClock = field(default_factory=RemoteClock)

    def answered(self, status: WorkerStatus) -> None:
        """Store a new status report."""
        if status.began != self.status.began:  # it was restarted
            self.before = self.total()
        self.status = status

    def total(self) -> WorkerStatus:
        """Status with the sums over all its lives."""
        now, before = self.status, self.before
        return WorkerStatus(
            running=now.running,
            ended=before.ended + now.ended,
            oldest=now.oldest,
            seconds={name: before.seconds.get(name, 0.0) + value for name, value in now.seconds.items()},
            busy_s=before.busy_s + now.busy_s,
            age_s=before.age_s + now.age_s,
        )


class MemoryGate:
    """Lets episodes start only while `watchdog.free_memory_gb` GiB of memory are free.

    That is memory of this machine, or of its control group. Running episodes continue, since memory is freed when they
    end. If no memory becomes free, the run makes no progress, and the watchdog ends it with the message of `diagnose`.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._least = run.config.watchdog.free_memory_gb
        self._waiting = 0

    async def room(self) -> None:
        """Wait until enough memory is free."""
        if self._enough():
            return
        self._run.warn(
            f"memory is short: no new episodes begin until {self._least:g} GiB (watchdog.free_memory_gb) are "
            "free. Close other programs, or lower grpo.max_off_policy_steps or generator.kv_cache_gb"
        )
        self._waiting += 1
        try:
            while not self._enough():  # noqa: ASYNC110 - there is no event for freed memory
                await asyncio.sleep(MEMORY_CHECK_S)
        finally:
            self._waiting -= 1

    def diagnose(self) -> str:
        """Why episodes wait for memory; empty if none do."""
        if not self._waiting:
            return ""
        free, least = f"{machine.free_memory_gb():.2f} GiB are free", f"watchdog.free_memory_gb={self._least:g}"
        return f"new episodes wait for memory: {free}, {least}"

    def _enough(self) -> bool:
        return not self._least or machine.free_memory_gb() >= self._least


class Rollouts:
    """Hands groups and held-out tasks to the workers, and keeps counts and state.

    Attributes:
        order: maps a position to the index of its task.
        set_aside: ids of tasks whose environment has raised; they are not played again.
        totals: counts since the start of the run, each group counted once.
    """

    def __init__(self, run: Run, environment: Environment, workers: Crew) -> None:
        config = run.config
        self._run, self._config, self._tasks, self._workers = run, config, environment, workers
        workers.memory = self._memory
        self._links: Links
        self._telling: asyncio.Future[None] | None = None
        self._seen = [_Seen() for _ in range(workers.count)]
        self._bugs = BugRate(config.environment.max_bug_rate, "tasks")
        self._evaluations = itertools.count(1)
        self._episodes, self._own = Since(), [Since() for _ in self._seen]
        self.order = make_order(config.tasks, environment, environment.splits[0], seed=config.seed)
        self.set_aside: set[str] = set()
        self.totals = Totals()
        self.gate = MemoryGate(run)
        self._counted: dict[int, Totals] = {}
        """Counts of groups that may still be replayed, by position."""

    # --- groups

    async def group(self, ticket: Ticket) -> GroupReport:
        """Have a worker play the group of a ticket and add it to the buffer if it can be trained on."""
        number = ticket.index % self._workers.count
        seen = self._seen[number]
        request = RollOut(ticket, self.order[ticket.index], tuple(sorted(seen.untold)))
        seen.untold.clear()
        report: GroupReport = await self._ask(number, "roll_out", request)
        self._heed(number, report)
        seen.state = report.state
        self._count(ticket.index, report.totals)
        self._watch_bugs(report.bug)
        return report

    def _count(self, position: int, counts: Totals) -> None:
        """Add a group's counts; if it was played before, they replace the earlier ones."""
        if (before := self._counted.get(position)) is not None:
            self.totals.add(before, -1)
        self._counted[position] = counts
        self.totals.add(counts)

    def count_from(self, totals: Totals) -> None:
        """Reset the counts to those of a checkpoint; groups played since then will be played again."""
        self.totals = totals
        self._counted.clear()

    def totals_of(self, known: Callable[[int], bool], first_open: int) -> Totals:
        """The counts for a checkpoint, without groups from `first_open` on that will be played again."""
        self._counted = {index: counts for index, counts in self._counted.items() if index >= first_open}
        totals = replace(self.totals)
        for index, counts in self._counted.items():
            if not known(index):
                totals.add(counts, -1)
        return totals

    async def _ask(self, number: int, endpoint: str, request: RollOut | HeldOut) -> Any:
        """Call a worker; if it dies, call its successor again.

        After more than `MOST_DEATHS` deaths a group is reported as lost; for a held-out episode the error is raised.
        """
        deaths = 0
        while True:
            try:
                return await self._workers.call(number, endpoint, request)
            except ActorDiedError as error:
                deaths += 1
                self._run.warn(f"rollout worker {number} died; its episodes are being repeated: {error.message}")
                if deaths > MOST_DEATHS:
                    if isinstance(request, HeldOut):
                        raise
                    if await self._links.buffer.in_progress(request.ticket):
                        return self._given_up(request, deaths, error)
                request = replace(request, again=True)

    def _given_up(self, request: RollOut, deaths: int, error: ActorDiedError) -> GroupReport:
        size = self._config.grpo.group_size
        why = f"{deaths} rollout workers died while group {request.ticket.index} was played: {error.message}"
        return GroupReport(
            fate=Fate.LOST,
            totals=Totals(episodes=size, episodes_invalid=size),
            why_lost=(why, "see run.log; its task may be what kills them"),
            state=self._seen[request.ticket.index % self._workers.count].state,
        )

    # --- held-out episodes

    async def evaluate(
        self,
        split: str,
        count: int,
        kind: str,
        add: Callable[[Trajectory], object],
        held: tuple[int, int] | None = None,
    ) -> None:
        """Play one episode of each of the first `count` tasks of a held-out split, or of all if it has fewer.

        At most `generator.max_num_seqs` episodes run at once, the number that one generator decodes together: there may
        be thousands, and each needs memory.

        Args:
            kind: stem of the trajectory file that the workers record the episodes in.
            add: called with every episode as it ends, without messages and tokens.
            held: `Member.key` of the replica that holds its weights for this evaluation; None: any replica.

        Raises:
            WeightsLostError: the replica died before all episodes ended; those played would be a biased sample.
        """
        count = min(count, self._tasks.num_tasks(split) or count)
        if count > MANY_HELD_OUT:
            self._run.note(f"The evaluation on {split} plays {count:,} episodes; evaluation.num_tasks is the number")
        folder, partial = self._run.folder.trajectories, f"{kind}.{os.getpid()}-{next(self._evaluations)}.partial"
        _remove(folder.glob("*.partial*.jsonl"))  # left by a session that was killed

        async def play(index: int) -> None:
            await self.gate.room()
            request = HeldOut(split, index, partial, held)
            number = index % self._workers.count
            report: HeldOutReport = await self._ask(number, "evaluate", request)
            self._heed(number, report)
            if report.episode is None:
                raise WeightsLostError("the held weights are gone: their generator died")
            self._watch_bugs(bug_of([report.episode]))
            add(report.episode)

        try:
            await for_each(range(count), play, limit=self._config.generator.max_num_seqs)
        except BaseException:  # cancellation too: a partial evaluation is discarded
            _remove(recorded(folder, partial))
            raise
        rename(folder, partial, kind)  # replaces episodes played before the run resumed from an earlier checkpoint

    # --- reports of workers

    def _heed(self, number: int, report: Report) -> None:
        for text in report.warnings:
            self._run.warn(text)
        new = set(report.set_aside) - self.set_aside
        self.set_aside |= new
        for other, seen in enumerate(self._seen):
            if other != number:
                seen.untold |= new

    def _watch_bugs(self, bug: str | None) -> None:
        """Update the rate of environment bugs with a task that was played."""
        if (message := self._bugs.add(bug)) is not None:
            raise ForgeError(message, fix="fix the environment, then --resume; environment.max_bug_rate is the limit")

    async def look(self) -> None:
        """Request and store every worker's status."""
        asked = read_clock()
        self._note_all(await self._workers.call_all("get_status"), asked)

    def _note_all(self, statuses: Iterable[WorkerStatus | None], asked: Reading) -> None:
        for number, status in enumerate(statuses):
            if status is not None:
                self._note(number, status, asked)

    def _note(self, number: int, status: WorkerStatus, asked: Reading) -> None:
        self._heed(number, status)
        seen = self._seen[number]
        seen.answered(status)
        track = f"rollouts{number}"
        if status.clock is not None:
            seen.clock.heard(asked, status.clock, read_clock())
            track += "" if status.clock.host == asked.host else f" on {status.clock.host}"
        if (timeline := self._run.timeline) is not None:
            for span in status.spans:
                start, end = seen.clock.here(span.start), seen.clock.here(span.end)
                timeline.overlapping(f"{track}: {span.track}", span.key, span.name, start, end)

    @property
    def engine(self) -> str:
        """Name of the workers' sandbox engine."""
        return self._seen[0].status.engine

    @property
    def episodes_running(self) -> int:
        """Number of episodes in progress."""
        return sum(seen.status.running for seen in self._seen)

    @property
    def episodes_ended(self) -> int:
        """Number of episodes ended since the start."""
        return sum(seen.total().ended for seen in self._seen)

    def longest_waiting(self) -> str:
        """Describe the episode that has been in one phase for the longest."""
        waiting = [seen.status.oldest for seen in self._seen if seen.status.oldest is not None]
        if not waiting:
            return "no episode is running"
        name, doing, seconds = max(waiting, key=lambda oldest: oldest[2])
        return f"episode {name} has been in '{doing}' for {duration(seconds)}"

    def take_times(self) -> dict[str, dict[str, float]]:
        """Seconds since the last call, by phase: summed over all episodes, and busy or waiting for each worker."""
        totals = [seen.total() for seen in self._seen]
        episodes: dict[str, float] = {}
        for total in totals:
            for doing, seconds in total.seconds.items():
                episodes[doing] = episodes.get(doing, 0.0) + seconds
        workers = {
            f"rollouts{number}": since({"busy": total.busy_s, "wait": total.age_s - total.busy_s})
            for number, (total, since) in enumerate(zip(totals, self._own, strict=True))
        }
        return {"episodes": self._episodes(episodes), **workers}

    # --- connect, save, close

    async def connect(self, links: Links) -> None:
        """Send every worker the actors that it calls."""
        self._links = links
        await self._workers.connect(links)

    async def reconnect(self, buffer: LocalReplayBuffer[Any], reference: Any) -> None:
        """Connect the workers to a restarted buffer or reference model."""
        await self.connect(replace(self._links, buffer=buffer, reference=reference))

    def follow(self, members: Sequence[Member]) -> None:
        """Send the workers the living generators if they have changed; of several changes meanwhile, the newest."""
        if _who(members) == _who(self._links.generators):
            return
        self._links = replace(self._links, generators=members)
        if self._telling is None or self._telling.done():
            self._telling = asyncio.ensure_future(self._tell())

    async def _tell(self) -> None:
        sent = None
        while sent is not self._links:
            sent = self._links
            await self._workers.connect(sent)

    def state_dict(self) -> dict[str, Any]:
        """State of each worker's preparation, by the worker's number, as JSON values."""
        return {str(number): seen.state for number, seen in enumerate(self._seen)}

    async def load_state_dict(self, state: Mapping[str, Any], set_aside: set[str]) -> None:
        """Restore the workers' states. If there are now more workers, the saved states are reused in turn."""
        self.set_aside |= set_aside
        for number, seen in enumerate(self._seen):
            seen.state = state.get(str(number % max(len(state), 1))) or {}
        await self._workers.restore()

    def _memory(self, number: int) -> tuple[dict[str, Any], list[str]]:
        seen = self._seen[number]
        seen.untold.clear()
        return seen.state, sorted(self.set_aside)

    async def close(self) -> None:
        """Let the workers write pending records and release their sandboxes."""
        asked = read_clock()
        self._note_all(await self._workers.close(), asked)


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink()


def _who(members: Sequence[Member]) -> list[tuple[tuple[int, int], bool]]:
    return [(member.key, member.serving) for member in members]
