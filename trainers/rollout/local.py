"""A rollout worker without its process: environment, sandboxes, chat format and record behind a few methods."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from forge_env.config.recipe import RunConfig, SamplingSection
from forge_env.environment.base import Environment
from forge_env.errors import UsageError
from forge_env.policy import Policy
from forge_env.registry import maker
from forge_env.run.clock import read_clock
from forge_env.run.folder import RunFolder
from forge_env.run.timeline import Span
from forge_env.run.trajectories import DISK_FULL, TrajectoryFiles, is_kept, recorded
from forge_env.sandbox import SANDBOXES_PER_CPU, SandboxEngine
from forge_env.sandbox.engines import open_engine
from forge_env.trajectory import Segment, Trajectory, read_trajectories
from trainers.actors.remote import ActorDiedError, result
from trainers.buffer.types import Outcome, TicketDoneError
from trainers.generator.arguments import held_out_sampling
from trainers.generator.client import GeneratorClient
from trainers.generator.policy import GenerateFunction, GeneratorPolicy
from trainers.model.chat import Chat
from trainers.rollout.in_turn import InTurn
from trainers.rollout.player import MakeEnvironment, Player, held_out_name
from trainers.rollout.types import (
    Fate,
    Group,
    GroupReport,
    HeldOut,
    HeldOutReport,
    Links,
    Preparation,
    Report,
    RollOut,
    Totals,
    WorkerStatus,
    bug_of,
    why_nothing,
)

PROMPTS_TRIED = 8
T = TypeVar("T")
R = TypeVar("R", bound=Report)


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker is made of.

    Attributes:
        number: of the worker, from 0.
        config: the recipe.
        folder: of the run.
        model: checkpoint folder with the tokenizer.
        preparation: the algorithm's part in the workers.
    """

    number: int
    config: RunConfig
    folder: Path
    model: Path
    preparation: type[Preparation]

    @property
    def name(self) -> str:
        """Of the worker."""
        return f"rollouts{self.number}"


class LocalWorker:
    """Plays groups and held-out episodes, hands groups to the buffer, and records both.

    Args:
        settings: of the worker.
        host: on which it is, where the run has several.
    """

    def __init__(self, settings: WorkerSettings, host: str = "") -> None:
        config = settings.config
        self._host = host
        self._settings = settings
        self._config = config
        self._links: Links | None = None
        self._reconnected = asyncio.Event()
        self._warnings: list[str] = []
        self._told: set[str] = set()
        """Tasks set aside that the controller knows of."""
        self._spans: list[Span] = []
        share = config.generator.max_num_seqs // config.rollouts.workers  # other workers' requests are not seen here
        self._client = GeneratorClient(config.generator.num_replicas, share)
        self._open = AsyncExitStack()
        self._in_turn = InTurn(config.grpo.max_off_policy_steps == 0)

    async def setup(self) -> None:
        """Open the sandbox engine; make environment, chat format and the algorithm's part."""
        try:
            await self._setup()
        except BaseException:  # cancelled too: no sandbox may be left
            await self._open.aclose()
            raise

    async def _setup(self) -> None:
        config = self._config
        self._began, self._worked = time.perf_counter(), time.thread_time()
        folder = RunFolder(self._settings.folder)
        self._files = TrajectoryFiles(folder.trajectories, self._warn, lambda: self._warn(DISK_FULL), self._host)
        self._open.callback(self._files.close)
        self._engine = self._make_engine()
        await self._open.enter_async_context(self._engine)
        self._prepare = self._settings.preparation(config, self._score)
        on_span = self._spans.append if config.logging.timeline else None
        self._make_environment = self._maker()
        self._player = Player(config, self._make_environment, self._policy(), warn=self._warn, on_span=on_span)

    def _make_engine(self) -> SandboxEngine:
        return open_engine(self._config.sandbox.engine, **engine_options(self._config, self._settings.number))

    def _maker(self) -> MakeEnvironment:
        section = self._config.environment
        return maker(section.name, sandboxes=self._engine, **section.options)

    @cached_property
    def _chat(self) -> Chat:
        return Chat.of(self._settings.model, self._config.model)

    def _policy(self) -> Policy:
        """What plays groups."""
        config = self._config
        return self._asking_generators(self._client.generate, config.grpo.temperature, config.generator.sampling)

    def _held_out_policy(self, held: tuple[int, int] | None) -> Policy:
        """What plays held-out episodes."""
        generate = partial(self._client.generate, held=held)
        return self._asking_generators(generate, self._config.evaluation.temperature, held_out_sampling(self._config))

    def _asking_generators(self, generate: GenerateFunction, temperature: float, sampling: SamplingSection) -> Policy:
        longest, limit = self._config.model.max_length, self._config.grpo.max_tokens_per_turn
        return GeneratorPolicy(self._chat, generate, longest, limit, temperature, sampling)

    async def check_prompts(self) -> None:
        """Refuse a `model.max_length` that the first training tasks' prompts already fill; see `check_prompts`."""
        await check_prompts(self._config, self._make_environment(), self._chat)

    async def connect(self, links: Links) -> None:
        """From now on these are whom it calls."""
        self._links = links
        self._client.update(links.generators)
        self._reconnected.set()
        self._reconnected = asyncio.Event()

    async def restore(self, state: Mapping[str, Any], set_aside: Iterable[str]) -> None:
        """Go on as a worker of this number that was at `state` (see `Preparation`); these tasks aren't played again."""
        self._prepare.load_state_dict(state)
        self._set_aside(set_aside)

    def _set_aside(self, tasks: Iterable[str]) -> None:
        self._told.update(tasks)
        self._player.set_aside |= self._told

    # --- groups

    async def roll_out(self, request: RollOut) -> GroupReport:
        """Play a group, record it, weigh it and hand it to the buffer."""
        self._set_aside(request.set_aside)
        if request.again and not await self._asking(lambda links: links.buffer.in_progress(request.ticket)):
            return self._said(GroupReport(fate=Fate.KEPT, state=self._prepare.state_dict()))
        self._in_turn.begin(request.ticket.index)
        try:
            group = await self._player.group(request.ticket.index, request.task)
            await self._record(group.episodes, "train")
            fate = await self._hand_in(group, request)
        finally:
            self._in_turn.done(request.ticket.index)
        report = GroupReport(
            fate=fate,
            totals=Totals.of(group, self._config.grpo.group_size, fate),
            success=group.mean_reward / self._player.max_reward if group.valid else None,
            bug=bug_of(group.episodes),
            why_lost=why_nothing(group) if fate == Fate.LOST else ("", ""),
            state=self._prepare.state_dict(),
        )
        return self._said(report)

    async def _record(self, episodes: Sequence[Trajectory], kind: str) -> None:
        if is_kept(self._config.logging.trajectories, kind):
            for episode in episodes:
                self._files.write(episode, kind)
            await self._files.drain()

    async def _hand_in(self, group: Group, request: RollOut) -> Fate:
        if not group.valid:
            return Fate.LOST
        if self._prepare.state_dict():  # it remembers the groups before
            await self._in_turn.wait(request.ticket.index)
        packed = await self._prepare(group)
        if packed is None:
            return Fate.DROPPED
        try:
            outcome = await self._asking(lambda links: links.buffer.add(packed, request.ticket))
        except TicketDoneError:
            if not request.again:
                raise
            return Fate.KEPT  # what the worker before had sent has arrived after all
        return Fate.STALE if outcome == Outcome.STALE else Fate.KEPT

    async def _score(self, segments: list[Segment]) -> list[NDArray[np.float32]]:
        if not self._config.has_reference:
            raise UsageError(
                "no reference model has a process that rollout workers could ask",
                fix="set grpo.reference.source; with lora, `initial` is computed by the trainer: use path",
            )
        found: list[NDArray[np.float32]] = await self._asking(
            lambda links: result(links.reference.logprobs.call_one(segments))
        )
        return found

    async def _asking(self, ask: Callable[[Links], Awaitable[T]]) -> T:
        """Ask one of those that it is connected with; where that dies, the one that takes its place."""
        while True:
            changed = self._reconnected
            if self._links is None:
                raise UsageError("this worker knows no buffer and no generators", fix="call connect first")
            try:
                return await ask(self._links)
            except ActorDiedError:
                await changed.wait()

    # --- held-out episodes

    async def evaluate(self, request: HeldOut) -> HeldOutReport:
        """Play a held-out episode and record it, unless its weights are lost meanwhile."""
        if request.again and (before := await asyncio.to_thread(self._recorded, request)) is not None:
            return self._said(HeldOutReport(episode=_without_tokens(before)))
        episode = await self._player.held_out(request.split, request.task, self._held_out_policy(request.held))
        if not episode.valid and request.held is not None and not self._client.lives(request.held):
            return self._said(HeldOutReport())
        await self._record([episode], request.kind)
        await self._files.written()  # whoever asked may give the file another name then
        return self._said(HeldOutReport(episode=_without_tokens(episode)))

    def _recorded(self, request: HeldOut) -> Trajectory | None:
        """The episode, if the worker before had recorded it and died before it could say so."""
        name = held_out_name(request.split, request.task)
        for path in recorded(RunFolder(self._settings.folder).trajectories, request.kind):
            for episode in read_trajectories(path):
                if episode.id == name:
                    return episode
        return None

    # --- how it is

    async def get_status(self) -> WorkerStatus:
        """How it is now; warnings and spans since the last answer."""
        now, player = time.perf_counter(), self._player
        oldest = min(player.accounts.open_accounts, key=lambda account: account.since, default=None)
        spans = self._spans[:]
        self._spans.clear()
        status = WorkerStatus(
            running=len(player.accounts.open_accounts),
            ended=player.ended,
            oldest=None if oldest is None else (oldest.actor, oldest.doing, now - oldest.since),
            seconds=player.accounts.seconds(),
            busy_s=time.thread_time() - self._worked,
            age_s=now - self._began,
            began=self._began,
            spans=spans,
            engine=self._engine.name,
            clock=read_clock(),
        )
        return self._said(status)

    def _warn(self, text: str) -> None:
        self._warnings.append(text)

    def _said(self, report: R) -> R:
        """A report with all that hasn't been said."""
        report.warnings = self._warnings[:]
        self._warnings.clear()
        report.set_aside = sorted(self._player.set_aside - self._told)
        self._told.update(report.set_aside)
        return report

    async def close(self) -> WorkerStatus:
        """Write what there is to write, give up the sandboxes; its last word."""
        await self._open.aclose()
        return await self.get_status()


def _without_tokens(episode: Trajectory) -> Trajectory:
    return replace(episode, turns=[], final_observation=[], answer=None, info={})


def engine_options(config: RunConfig, number: int) -> dict[str, Any]:
    """The options of one worker's sandbox engine: the sandboxes of a run are shared out evenly."""
    section, workers = config.sandbox, config.rollouts.workers
    options = section.engine_options()
    if workers == 1:
        return options
    cpus = len(os.sched_getaffinity(0))
    total = section.concurrency or SANDBOXES_PER_CPU * cpus
    own = max(1, total // workers + (number < total % workers))
    return options | {"concurrency": own, "warm": min(own, -(-cpus // workers))}


async def check_prompts(config: RunConfig, environment: Environment, chat: Chat) -> None:
    """Refuse a `model.max_length` that the first training tasks' prompts already fill."""
    lengths = []
    for index in range(PROMPTS_TRIED):
        try:
            observation, _ = await environment.reset(options={"split": environment.splits[0], "index": index})
        finally:
            await environment.close()
        lengths.append(len(chat.render(list(observation), environment.tools)))
    if min(lengths) >= config.model.max_length:
        raise UsageError(
            f"model.max_length={config.model.max_length} leaves no room for a reply: "
            f"the prompts of {config.environment.name} have {min(lengths)} to {max(lengths)} tokens",
            fix=f"use model.max_length={max(lengths) + config.grpo.max_tokens_per_turn} or more",
        )
