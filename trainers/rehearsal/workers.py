"""Rollout workers on simulated time: groups of episodes with their sandboxes, limits and deadlines."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

from forge_env.config.recipe import RunConfig
from forge_env.run.account import Account, Accounts
from forge_env.sandbox import SANDBOXES_PER_CPU
from forge_env.trajectory import Segment
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.types import Outcome, Ticket
from trainers.rehearsal.engines import Engine, Engines
from trainers.rehearsal.episodes import Episodes, Script
from trainers.rollout.player import Deadline
from trainers.rollout.types import Fate, GroupReport, Totals

Sandboxed = Literal["no", "turn", "episode"]
"""When an episode holds a sandbox: never, while a turn's tools run, or from its beginning to its end."""


@dataclass(eq=False)
class Played:
    """A played episode.

    Attributes:
        prompt: tokens that were not sampled.
        sampled: tokens that were.
        turns: number of its turns.
        version: policy version of its oldest token; -1 if none was sampled.
    """

    prompt: int = 0
    sampled: int = 0
    turns: int = 0
    version: int = -1


@dataclass(slots=True)
class PlayedGroup:
    """The episodes of a group, for the buffer (`Trainable`)."""

    episodes: list[Played]
    priority: float = 1.0

    @property
    def oldest_version(self) -> int:
        """Policy version of the oldest token."""
        return min((each.version for each in self.episodes if each.version >= 0), default=-1)

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(each.sampled for each in self.episodes)

    @property
    def record(self) -> list[Played]:
        """What a reservation carries."""
        return self.episodes

    def segments(self) -> list[Segment]:
        """No sequences: a rehearsal has no tokens."""
        return []


@dataclass(slots=True)
class Cuts:
    """Counts of what limits cut.

    Attributes:
        episodes: all episodes.
        replies: all replies.
        by_turn: replies cut by `grpo.max_tokens_per_turn`.
        by_context: episodes cut by `model.max_length`.
        late: episodes that missed `grpo.group_timeout_s`.
    """

    episodes: int = 0
    replies: int = 0
    by_turn: int = 0
    by_context: int = 0
    late: int = 0


@dataclass(slots=True)
class _Sandboxes:
    """Sandboxes of a worker."""

    held: Sandboxed
    pool: asyncio.Semaphore

    @asynccontextmanager
    async def lease(self, account: Account) -> AsyncIterator[None]:
        account.enter("wait for a sandbox")
        async with self.pool:
            yield


def nothing(*_: object, **__: object) -> asyncio.Future[None]:
    """Do nothing, whether awaited or not: a method of a run that a rehearsal doesn't need."""
    done = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done


class TimedRollouts:
    """Plays groups as `trainers.rollout.rollouts.Rollouts` does, on simulated time.

    Args:
        config: the recipe.
        episodes: lengths of the episodes.
        engines: sample the replies.
        buffer: receives the groups.
        sandboxed: when an episode holds a sandbox.
        cpus: processors of the workers' host.
        on_end: called after each episode.
    """

    def __init__(
        self,
        config: RunConfig,
        episodes: Episodes,
        engines: Engines,
        buffer: LocalReplayBuffer[PlayedGroup],
        sandboxed: Sandboxed,
        cpus: int,
        on_end: Callable[[], None],
    ) -> None:
        self._config, self._episodes, self._engines, self._buffer = config, episodes, engines, buffer
        self._on_end = on_end
        self.order = SimpleNamespace(record=nothing)
        self.gate = SimpleNamespace(room=nothing)
        self.cuts = Cuts()
        self.accounts = Accounts()
        self.turns = Counter[int]()
        """Turns by worker."""
        workers = config.rollouts.workers
        total = config.sandbox.concurrency or SANDBOXES_PER_CPU * cpus
        shares = [max(1, total // workers + (number < total % workers)) for number in range(workers)]
        self._sandboxes = [_Sandboxes(sandboxed, asyncio.Semaphore(share)) for share in shares]

    async def group(self, ticket: Ticket) -> GroupReport:
        """Play a group and add it to the buffer, unless the filter drops it."""
        grpo = self._config.grpo
        deadline = Deadline(grpo)
        scripts = self._episodes.group(ticket.index)
        played = [Played() for _ in scripts]
        running = [
            asyncio.ensure_future(self._episode(ticket.index, script, each, deadline.start))
            for script, each in zip(scripts, played, strict=True)
        ]
        try:
            late = await deadline.wait(running)
            done = [task.done() for task in running]
            for task in running:
                if task.done():
                    task.result()  # raises what failed
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        kept = [each for each, whole in zip(played, done, strict=True) if whole or grpo.on_timeout == "zero"]
        self.cuts.late += late
        return await self._report(ticket, kept, late)

    async def _report(self, ticket: Ticket, kept: list[Played], late: int) -> GroupReport:
        totals = Totals(episodes=len(kept), episodes_late=late)
        if not any(each.sampled for each in kept):
            why = "no episode finished in time", "raise grpo.group_timeout_s, or lower grpo.max_tokens_per_turn"
            return GroupReport(fate=Fate.LOST, totals=totals, why_lost=why)
        if not self._episodes.keeps(ticket.index):
            return GroupReport(fate=Fate.DROPPED, totals=totals)
        outcome = await self._buffer.add(PlayedGroup(kept), ticket)
        return GroupReport(fate=Fate.KEPT if outcome == Outcome.KEPT else Fate.STALE, totals=totals)

    async def held_out(self, index: int, held: Engine | None) -> None:
        """Play a held-out episode."""
        await self._episode(index, self._episodes.group(index)[0], Played(), lambda: None, held)

    async def _episode(
        self, index: int, script: Script, played: Played, on_answer: Callable[[], None], held: Engine | None = None
    ) -> None:
        account = Account("episode", "reset", clock=asyncio.get_running_loop().time)
        sandboxes = self._sandboxes[index % len(self._sandboxes)]
        self.accounts.open(account)
        try:
            async with AsyncExitStack() as stack:
                if sandboxes.held == "episode":
                    await stack.enter_async_context(sandboxes.lease(account))
                account.enter("reset")
                await asyncio.sleep(script.reset_s)
                await self._turns(index, script, played, on_answer, held, account)
                account.enter("close")
                await asyncio.sleep(script.close_s)
        finally:
            self.accounts.close(account)
        if held is None:
            self.cuts.episodes += 1
        self._on_end()

    async def _turns(
        self,
        index: int,
        script: Script,
        played: Played,
        on_answer: Callable[[], None],
        held: Engine | None,
        account: Account,
    ) -> None:
        longest, most = self._config.model.max_length, self._config.grpo.max_tokens_per_turn
        sandboxes = self._sandboxes[index % len(self._sandboxes)]
        counts = self.cuts if held is None else Cuts()
        for turn in script.turns:
            room = longest - played.prompt - played.sampled - turn.prompt
            if room < 1:
                counts.by_context += 1
                return
            account.enter("generate")
            tokens = min(turn.reply, most, room)
            version = await self._engines.generate(turn.prompt, tokens, session=played, prefix=index, held=held)
            on_answer()
            if played.version < 0:
                played.version = version
            played.prompt, played.sampled = played.prompt + turn.prompt, played.sampled + tokens
            played.turns += 1
            self.turns[index % len(self._sandboxes)] += 1
            counts.replies += 1
            counts.by_turn += tokens == most and most < turn.reply
            if tokens == room and room < min(turn.reply, most):
                counts.by_context += 1
                return
            if turn.tool_s:
                async with sandboxes.lease(account) if sandboxes.held == "turn" else nullcontext():
                    account.enter("environment")
                    await asyncio.sleep(turn.tool_s)
