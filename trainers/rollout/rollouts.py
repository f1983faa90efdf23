"""The rollouts of a run as the controller knows them: which task is next, who plays it, and what came of all.

    algorithm --ticket--> Rollouts --request--> RolloutWorker: episodes -> group -> weights -> ReplayBuffer
                             ^------- report ------'

Position p is played by worker p % workers, again by the same one. The controller sees no message and no token: a
report is a few hundred bytes a group.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from forge_env.concurrency import for_each
from forge_env.display.terminal import duration
from forge_env.environment.base import Environment
from forge_env.errors import ForgeError
from forge_env.run import Run
from forge_env.run.account import Since
from forge_env.run.clock import Reading, RemoteClock, read_clock
from forge_env.run.trajectories import recorded, rename
from forge_env.tasks.curriculum import make_order
from forge_env.trajectory import Trajectory
from trainers.actors.remote import ActorDiedError
from trainers.buffer.types import GroupBuffer, Ticket
from trainers.generator.client import Member
from trainers.generator.types import WeightsLostError
from trainers.rollout.memory import MemoryGate
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

MOST_DEATHS = 3
"""Of workers while one group is played: after more, it may be what kills them."""
RECENT = 100
"""Tasks over which the rate of bugs in the environment is taken."""
FEWEST = 20
"""Tasks below which there is no rate yet."""
MANY_HELD_OUT = 100_000
"""Episodes of one evaluation above which their number is shown when it begins."""


class Workers(Protocol):
    """The workers, however they are reached (`trainers.rollout.crew`)."""

    memory: Callable[[int], tuple[Mapping[str, Any], Sequence[str]]]
    """What a worker of a number has to know when it starts: its preparation's state, tasks set aside."""

    @property
    def count(self) -> int:
        """How many there are."""

    async def connect(self, links: Links) -> None:
        """Tell every worker whom it calls."""

    async def call(self, number: int, endpoint: str, request: Any) -> Any:
        """What an endpoint of one worker answers; waits until it is up, and raises `ActorDiedError` if it dies."""

    async def call_all(self, endpoint: str, /, *args: Any) -> list[Any]:
        """What an endpoint of every worker returns; None for one that is not up."""

    async def restore(self) -> None:
        """Let every worker know what is to be known when it starts (`memory`)."""

    async def close(self) -> list[Any]:
        """Let every worker come to its end; their last words."""


@dataclass(slots=True)
class _Seen:
    """What is known of one worker.

    Attributes:
        status: its last answer.
        before: what its lives before this one have done.
        state: of its preparation.
        untold: ids of tasks set aside that it doesn't know of.
        clock: of its machine.
    """

    status: WorkerStatus = field(default_factory=WorkerStatus)
    before: WorkerStatus = field(default_factory=WorkerStatus)
    state: dict[str, Any] = field(default_factory=dict)
    untold: set[str] = field(default_factory=set)
    clock: RemoteClock = field(default_factory=RemoteClock)

    def answered(self, status: WorkerStatus) -> None:
        """It has told how it is."""
        if status.began != self.status.began:  # another life
            self.before = self.total()
        self.status = status

    def total(self) -> WorkerStatus:
        """Of all its lives."""
        now, before = self.status, self.before
        return WorkerStatus(
            running=now.running,
            ended=before.ended + now.ended,
            oldest=now.oldest,
            seconds={name: before.seconds.get(name, 0.0) + value for name, value in now.seconds.items()},
            busy_s=before.busy_s + now.busy_s,
            age_s=before.age_s + now.age_s,
        )


class Rollouts:
    """Hands groups and held-out tasks to the workers, and keeps the books.

    Attributes:
        order: which task comes when.
        set_aside: ids of tasks whose environment has raised; they are not played again.
        totals: counts since the start of the run, of each group once.
        gate: lets episodes begin while there is memory for them.
    """

    def __init__(self, run: Run, environment: Environment, workers: Workers) -> None:
        config = run.config
        self._run = run
        self._config = config
        self._tasks = environment
        self._workers = workers
        workers.memory = self._memory
        self._links: Links
        self._telling: asyncio.Future[None] | None = None
        self._seen = [_Seen() for _ in range(workers.count)]
        self._bugs: deque[bool] = deque(maxlen=RECENT)
        self._last_bug = ""
        self._evaluations = itertools.count(1)
        self._episodes, self._own = Since(), [Since() for _ in self._seen]
        self.order = make_order(config.tasks, environment, environment.splits[0], seed=config.seed)
        self.set_aside: set[str] = set()
        self.totals = Totals()
        self.gate = MemoryGate(run)
        self._counted: dict[int, Totals] = {}
        """The counts of groups that may be played again, by position."""

    # --- groups

    async def group(self, ticket: Ticket) -> GroupReport:
        """Have the group of a ticket played, and added to the buffer if it is to be trained on.

        Raises:
            ForgeError: the environment's own code fails too often.
        """
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
        """Count a group, instead of what came of it before where it was played again."""
        if (before := self._counted.get(position)) is not None:
            self.totals.add(before, -1)
        self._counted[position] = counts
        self.totals.add(counts)

    def count_from(self, totals: Totals) -> None:
        """Go on from these counts: what was played since will be played again."""
        self.totals = totals
        self._counted.clear()

    def totals_of(self, known: Callable[[int], bool], first_open: int) -> Totals:
        """The counts without groups that are not `known` and will be played again; none before `first_open` will."""
        self._counted = {index: counts for index, counts in self._counted.items() if index >= first_open}
        totals = replace(self.totals)
        for index, counts in self._counted.items():
            if not known(index):
                totals.add(counts, -1)
        return totals

    async def _ask(self, number: int, endpoint: str, request: RollOut | HeldOut) -> Any:
        """What a worker answers; the one that takes its place where it dies.

        A group that worker after worker dies of is lost; of held-out episodes, that is an error.
        """
        deaths = 0
        while True:
            try:
                return await self._workers.call(number, endpoint, request)
            except ActorDiedError as error:
                deaths += 1
                self._run.warn(f"rollout worker {number} died, and its episodes are played again: {error.message}")
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
        """One episode of each of the first `count` tasks of a held-out split, of all if it has fewer.

        As many are under way as one generator decodes together: they may be thousands, and each needs memory.

        Args:
            split: which tasks.
            count: how many.
            kind: name of the file that the workers record them in.
            add: is given every episode as it ends, without messages and tokens.
            held: the `Member.key` of the replica whose weights are held for them; None: any.

        Raises:
            WeightsLostError: the replica died before all were played: what is left would be a biased sample.
        """
        count = min(count, self._tasks.num_tasks(split) or count)
        if count > MANY_HELD_OUT:
            self._run.note(f"The evaluation on {split} plays {count:,} episodes; evaluation.num_tasks is the number")
        folder, partial = self._run.folder.trajectories, f"{kind}.{os.getpid()}-{next(self._evaluations)}.partial"
        _remove(folder.glob("*.partial*.jsonl"))  # of a session that was killed

        async def play(index: int) -> None:
            await self.gate.room()
            request = HeldOut(split, index, partial, held)
            number = index % self._workers.count
            report: HeldOutReport = await self._ask(number, "evaluate", request)
            self._heed(number, report)
            if report.episode is None:
                raise WeightsLostError("the weights that were held are gone: their generator died")
            self._watch_bugs(bug_of([report.episode]))
            add(report.episode)

        try:
            await for_each(range(count), play, limit=self._config.generator.max_num_seqs)
        except BaseException:  # cancelled too: part of an evaluation is none
            _remove(recorded(folder, partial))
            raise
        rename(folder, partial, kind)  # in place of what was played before the run was set back

    # --- what workers say

    def _heed(self, number: int, report: Report) -> None:
        for text in report.warnings:
            self._run.warn(text)
        news = set(report.set_aside) - self.set_aside
        self.set_aside |= news
        for other, seen in enumerate(self._seen):
            if other != number:
                seen.untold |= news

    def _watch_bugs(self, found: str | None) -> None:
        """Count a task that was played.

        Raises:
            ForgeError: the environment's own code fails too often.
        """
        self._bugs.append(found is not None)
        self._last_bug = found or self._last_bug
        rate, limit = sum(self._bugs) / len(self._bugs), self._config.environment.max_bug_rate
        if len(self._bugs) >= FEWEST and rate > limit:
            raise ForgeError(
                f"the environment's own code failed on {rate:.0%} of the last {len(self._bugs)} tasks, "
                f"the last time: {self._last_bug}",
                fix="fix the environment, then --resume; environment.max_bug_rate is the limit",
            )

    async def look(self) -> None:
        """Ask every worker how it is."""
        asked = read_clock()
        for number, status in enumerate(await self._workers.call_all("get_status")):
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
        """Name of the sandbox engine."""
        return self._seen[0].status.engine

    @property
    def episodes_running(self) -> int:
        """Episodes under way."""
        return sum(seen.status.running for seen in self._seen)

    @property
    def episodes_ended(self) -> int:
        """Episodes that came to their end."""
        return sum(seen.total().ended for seen in self._seen)

    def longest_waiting(self) -> str:
        """What the episode that has done one thing for the longest is doing, in words."""
        oldest = max((seen.status.oldest for seen in self._seen if seen.status.oldest), key=_age, default=None)
        if oldest is None:
            return "no episode is under way"
        name, doing, seconds = oldest
        return f"episode {name} has been in '{doing}' for {duration(seconds)}"

    def take_times(self) -> dict[str, dict[str, float]]:
        """Seconds of all episodes, and of each worker, by what was done, since the last call."""
        totals = [seen.total() for seen in self._seen]
        episodes: dict[str, float] = {}
        for total in totals:
            for doing, seconds in total.seconds.items():
                episodes[doing] = episodes.get(doing, 0.0) + seconds
        own = {
            f"rollouts{number}": since({"busy": total.busy_s, "wait": total.age_s - total.busy_s})
            for number, (total, since) in enumerate(zip(totals, self._own, strict=True))
        }
        return {"episodes": self._episodes(episodes), **own}

    # --- begin, save, end

    async def connect(self, links: Links) -> None:
        """Tell every worker whom it calls."""
        self._links = links
        await self._workers.connect(links)

    async def reconnect(self, buffer: GroupBuffer[Any], reference: Any) -> None:
        """Others have taken the place of buffer or reference model."""
        await self.connect(replace(self._links, buffer=buffer, reference=reference))

    def follow(self, members: Sequence[Member]) -> None:
        """The generators may have changed: then the workers are told, one change after the other."""
        if _who(members) == _who(self._links.generators):
            return
        self._links = replace(self._links, generators=members)
        if self._telling is None or self._telling.done():
            self._telling = asyncio.ensure_future(self._tell())

    async def _tell(self) -> None:
        told = None
        while told is not self._links:
            told = self._links
            await self._workers.connect(told)

    def state_dict(self) -> dict[str, Any]:
        """What each worker's preparation remembers, by the worker's number; JSON."""
        return {str(number): seen.state for number, seen in enumerate(self._seen)}

    async def load_state_dict(self, state: Mapping[str, Any], set_aside: set[str]) -> None:
        """Go on from there. Where there are more workers than there were, the first ones' states serve again."""
        self.set_aside |= set_aside
        for number, seen in enumerate(self._seen):
            seen.state = state.get(str(number % max(len(state), 1))) or {}
        await self._workers.restore()

    def _memory(self, number: int) -> tuple[dict[str, Any], list[str]]:
        seen = self._seen[number]
        seen.untold.clear()
        return seen.state, sorted(self.set_aside)

    async def close(self) -> None:
        """Let the workers write what there is to write, and give up their sandboxes."""
        asked = read_clock()
        for number, status in enumerate(await self._workers.close()):
            if status is not None:
                self._note(number, status, asked)


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink()


def _who(members: Sequence[Member]) -> list[tuple[tuple[int, int], bool]]:
    return [(member.key, member.serving) for member in members]


def _age(oldest: tuple[str, str, float]) -> float:
    return oldest[2]
