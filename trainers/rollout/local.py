"""A rollout worker without its process: plays, scores and records episodes, and hands groups to the buffer."""

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
from forge_env.endpoint.opponents import open_opponents
from forge_env.environment.base import Environment, checked_reset, resolve_task
from forge_env.errors import UsageError
from forge_env.policy import Policy
from forge_env.registry import maker
from forge_env.rewards.rubric import check_targets
from forge_env.rollout.episode import held_out_name
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
from trainers.rollout.opening import FIRST, Opening, opening
from trainers.rollout.player import MakeEnvironment, Player
from trainers.rollout.types import (
    VERSIONS,
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
    """Settings of a worker.

    Attributes:
        model: checkpoint folder with the tokenizer.
        preparation: class of the algorithm's part in the workers.
    """

    number: int
    config: RunConfig
    folder: Path
    model: Path
    preparation: type[Preparation]

    @property
    def name(self) -> str:
        """The worker's name."""
        return f"rollouts{self.number}"


class InTurn:
    """Lets groups proceed in order of their index, whatever order their episodes end in; does nothing unless `active`.

    In synchronous mode a step waits for all of its groups anyway, so this costs no time, and an estimator that carries
    state from group to group sees them in the same order in every run.
    """

    def __init__(self, active: bool) -> None:
        self._active = active
        self._open: set[int] = set()
        self._waiting: dict[int, asyncio.Future[None]] = {}

    def begin(self, index: int) -> None:
        """Mark a group as in progress: groups with a higher index wait for it."""
        if self._active:
            self._open.add(index)

    async def wait(self, index: int) -> None:
        """Wait until all groups with a lower index are done."""
        if index in self._open and index != min(self._open):
            self._waiting[index] = asyncio.get_running_loop().create_future()
            try:
                await self._waiting[index]
            finally:
                del self._waiting[index]

    def done(self, index: int) -> None:
        """Mark a group as done: it was added, replaced or dropped."""
        self._open.discard(index)
        waiting = self._waiting.get(min(self._open, default=-1))
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


class LocalWorker:
    """Plays groups and held-out episodes and hands groups to the buffer; `host` is empty if the run has one host."""

    def __init__(self, settings: WorkerSettings, host: str = "") -> None:
        config = settings.config
        self._host, self._settings, self._config = host, settings, config
        self._links: Links | None = None
        self._reconnected = asyncio.Event()
        self._warnings: list[str] = []
        self._told: set[str] = set()
        """Ids of tasks set aside that the controller knows of."""
        self._spans: list[Span] = []
        share = config.generator.max_num_seqs // config.rollouts.workers  # other workers' requests aren't counted here
        self._client = GeneratorClient(config.generator.num_replicas, share)
        self._open = AsyncExitStack()
        self._in_turn = InTurn(config.grpo.max_off_policy_steps == 0)
        self._looked = 0

    async def setup(self) -> None:
        """Open the sandbox engine and create the environment and the algorithm's `Preparation`."""
        async with AsyncExitStack() as stack:  # if this fails or is cancelled, no sandbox is left
            await self._set_up(stack)
            self._open = stack.pop_all()

    async def _set_up(self, stack: AsyncExitStack) -> None:
        config = self._config
        self._began, self._worked = time.perf_counter(), time.thread_time()
        folder = RunFolder(self._settings.folder)
        self._files = TrajectoryFiles(folder.trajectories, self._warn, lambda: self._warn(DISK_FULL), self._host)
        stack.callback(self._files.close)
        self._engine = self._make_engine()
        await stack.enter_async_context(self._engine)
        self._prepare = self._settings.preparation(config, self._score)
        on_span = self._spans.append if config.logging.timeline else None
        self._make_environment = self._maker()
        section, held_out = config.environment, config.evaluation.opponents
        opponents = await open_opponents(stack, section.opponents, "environment.opponents")
        against = await open_opponents(stack, held_out or {}, "evaluation.opponents")
        self._player = Player(
            config,
            self._make_environment,
            warn=self._warn,
            on_span=on_span,
            opponents=opponents,
            held_out_opponents=opponents if held_out is None else against,
        )

    def _make_engine(self) -> SandboxEngine:
        return open_engine(self._config.sandbox.engine, **engine_options(self._config, self._settings.number))

    def _maker(self) -> MakeEnvironment:
        section = self._config.environment
        return maker(section.name, section.options, sandboxes=self._engine)

    @cached_property
    def _chat(self) -> Chat:
        return Chat.of(self._settings.model, self._config.model)

    def _policy(self, version: int) -> Policy:
        """The policy for a group admitted at this policy version; it samples from that version or newer ones."""
        config = self._config
        generate = partial(self._client.generate, at_least=version)
        return self._asking_generators(generate, config.grpo.temperature, config.generator.sampling)

    def _held_out_policy(self, held: tuple[int, int] | None) -> Policy:
        """The policy for held-out episodes."""
        generate = partial(self._client.generate, held=held)
        return self._asking_generators(generate, self._config.evaluation.temperature, held_out_sampling(self._config))

    def _asking_generators(self, generate: GenerateFunction, temperature: float, sampling: SamplingSection) -> Policy:
        longest, limit = self._config.model.max_length, self._config.grpo.max_tokens_per_turn
        return GeneratorPolicy(self._chat, generate, longest, limit, temperature, sampling)

    @property
    def code_timeout_s(self) -> float:
        """Time limit of the environment's own code, in seconds."""
        return self._player.code_timeout_s

    async def check_prompts(self) -> None:
        """Reject unscorable training tasks and a too small `model.max_length`; see the function `check_prompts`."""
        if doubt := await check_prompts(self._config, self._make_environment(), self._chat):
            self._warn(doubt)

    async def connect(self, links: Links) -> None:
        """Set the actors that the worker calls."""
        self._links = links
        self._client.update(links.generators)
        self._reconnected.set()
        self._reconnected = asyncio.Event()

    async def restore(self, state: Mapping[str, Any], set_aside: Iterable[str]) -> None:
        """Restore the state of this worker's `Preparation`, and set tasks aside, which are not played again."""
        self._prepare.load_state_dict(state)
        self._set_aside(set_aside)

    def _set_aside(self, tasks: Iterable[str]) -> None:
        self._told.update(tasks)
        self._player.set_aside |= self._told

    # --- groups

    async def roll_out(self, request: RollOut) -> GroupReport:
        """Play and record a group, compute its training data and hand it to the buffer."""
        self._set_aside(request.set_aside)
        if request.again and not await self._asking(lambda links: links.buffer.in_progress(request.ticket)):
            return self._said(GroupReport(fate=Fate.KEPT, state=self._prepare.state_dict()))
        self._in_turn.begin(request.ticket.index)
        try:
            policy = self._policy(request.ticket.version)
            group = await self._player.group(request.ticket.index, request.task, policy)
            if cuts := self._prepare.cuts(group):
                await self._player.continue_group(group, request.task, cuts, policy)
            first_replies = self._look(group)
            await self._record(group.episodes, "train")
            fate = await self._hand_in(group, request)
        finally:
            self._in_turn.done(request.ticket.index)
        highest = self._player.max_reward
        report = GroupReport(
            fate=fate,
            totals=Totals.of(group, fate),
            success=group.mean_reward / highest if group.valid and highest else None,
            bug=bug_of(group.episodes),
            why_lost=why_nothing(group) if fate == Fate.LOST else ("", ""),
            state=self._prepare.state_dict(),
            opening=first_replies,
        )
        return self._said(report)

    def _look(self, group: Group) -> Opening | None:
        """The `Opening` of a group, for this worker's first `FIRST` groups."""
        if self._looked >= FIRST:
            return None
        self._looked += 1
        return opening(group.finished, lambda ids: str(self._chat.tokenizer.decode(ids)))

    async def _record(self, episodes: Sequence[Trajectory], kind: str) -> None:
        if is_kept(self._config.logging.trajectories, kind):
            for episode in episodes:
                self._files.write(episode, kind)
            await self._files.drain()

    async def _hand_in(self, group: Group, request: RollOut) -> Fate:
        if not group.valid:
            return Fate.LOST
        if self._prepare.state_dict():  # it has state from earlier groups
            await self._in_turn.wait(request.ticket.index)
        packed = await self._prepare(group)
        if packed is None:
            return Fate.DROPPED
        try:
            outcome = await self._asking(lambda links: links.buffer.add(packed, request.ticket))
        except TicketDoneError:
            if not request.again:
                raise
            return Fate.KEPT  # the worker's previous life had added it after all
        return Fate.STALE if outcome == Outcome.STALE else Fate.KEPT

    async def _score(self, segments: list[Segment]) -> list[NDArray[np.float32]]:
        if not self._config.has_reference:
            raise UsageError(
                "rollout workers need a reference model with its own process",
                fix="set grpo.reference.source; with lora, `initial` is computed by the trainer: use path",
            )
        logprobs: list[NDArray[np.float32]] = await self._asking(
            lambda links: result(links.reference.logprobs.call_one(segments))
        )
        return logprobs

    async def _asking(self, ask: Callable[[Links], Awaitable[T]]) -> T:
        """Call a linked actor; if it dies, wait for new links and call its successor."""
        while True:
            changed = self._reconnected
            if self._links is None:
                raise UsageError("this worker is not connected to a buffer and generators", fix="call connect first")
            try:
                return await ask(self._links)
            except ActorDiedError:
                await changed.wait()

    # --- held-out episodes

    async def evaluate(self, request: HeldOut) -> HeldOutReport:
        """Play and record a held-out episode; nothing is recorded if the held weights are lost meanwhile."""
        if request.again and (before := await asyncio.to_thread(self._recorded, request)) is not None:
            return self._said(HeldOutReport(episode=_without_tokens(before)))
        episode = await self._player.held_out(request.split, request.task, self._held_out_policy(request.held))
        if not episode.valid and request.held is not None and not self._client.lives(request.held):
            return self._said(HeldOutReport())
        await self._record([episode], request.kind)
        await self._files.written()  # the caller may rename the file afterwards
        return self._said(HeldOutReport(episode=_without_tokens(episode)))

    def _recorded(self, request: HeldOut) -> Trajectory | None:
        """The episode, if this worker's previous life recorded it and died before it reported it; otherwise None."""
        name = held_out_name(request.split, request.task)
        for path in recorded(RunFolder(self._settings.folder).trajectories, request.kind):
            for episode in read_trajectories(path):
                if episode.id == name:
                    return episode
        return None

    # --- status

    async def get_status(self) -> WorkerStatus:
        """Return the current status, with the warnings and spans since the last report."""
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
        """Add warnings and tasks set aside that haven't been reported yet."""
        report.warnings = self._warnings[:]
        self._warnings.clear()
        report.set_aside = sorted(self._player.set_aside - self._told)
        self._told.update(report.set_aside)
        return report

    async def close(self) -> WorkerStatus:
        """Write pending records, release the sandboxes, and return the final status."""
        await self._open.aclose()
        return await self.get_status()


def _without_tokens(episode: Trajectory) -> Trajectory:
    """Strip an episode to its score and its token counts by policy version (`VERSIONS`)."""
    info = {VERSIONS: episode.sampled_by_version}
    return replace(episode, turns=[], final_observation=[], answer=None, info=info)


def engine_options(config: RunConfig, number: int) -> dict[str, Any]:
    """Options of one worker's sandbox engine: the run's sandboxes are divided evenly among the workers."""
    section, workers = config.sandbox, config.rollouts.workers
    options = section.engine_options()
    if workers == 1:
        return options
    cpus = len(os.sched_getaffinity(0))
    total = section.concurrency or SANDBOXES_PER_CPU * cpus
    share = max(1, total // workers + (number < total % workers))
    return options | {"concurrency": share, "warm": min(share, -(-cpus // workers))}


async def check_prompts(config: RunConfig, environment: Environment, chat: Chat) -> str | None:
    """Reject training tasks that can't be scored, and a `model.max_length` that all of the first prompts fill.

    Returns:
        A warning if the prompts are not what the chat template in the model's folder writes; None otherwise.
    """
    first = environment.splits[0]
    count = environment.num_tasks(first) or PROMPTS_TRIED
    indices = ({"split": first, "index": index} for index in range(count))
    tasks = (resolve_task(environment, None, options) for options in indices)
    await asyncio.to_thread(check_targets, environment, tasks)
    lengths = []
    differ = 0
    for index in range(PROMPTS_TRIED):
        task = resolve_task(environment, None, {"split": environment.splits[0], "index": index})
        try:
            observation, _ = await checked_reset(environment, task, None)
        finally:
            await environment.close()
        prompt = chat.render(list(observation), environment.tools)
        lengths.append(len(prompt))
        differ += chat.render_by_folder(list(observation), environment.tools) not in (None, prompt)
    if min(lengths) >= config.model.max_length:
        raise UsageError(
            f"model.max_length={config.model.max_length} leaves no room for a reply: "
            f"the prompts of {config.environment.name} have {min(lengths)} to {max(lengths)} tokens",
            fix=f"use model.max_length={max(lengths) + config.grpo.max_tokens_per_turn} or more",
        )
    if not differ:
        return None
    return (
        f"{differ} of {PROMPTS_TRIED} prompts differ from those of the chat template in the model's folder, which "
        "other servers of the model use: is model.renderer=auto meant?"
    )
