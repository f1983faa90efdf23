"""Episodes of a group, played concurrently, so that tool calls and generation overlap; and held-out episodes."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from forge_env.config.recipe import GRPOSection, RunConfig
from forge_env.credit.replay import Continuation, Point, continuation_seed
from forge_env.environment.base import Environment, resolve_task
from forge_env.environment.optional import score_group, scores_groups
from forge_env.errors import EnvironmentBugError, UsageError, environment_code
from forge_env.policy import Policy
from forge_env.rollout.episode import NOBODY, episode_seed, held_out_name, run_episode
from forge_env.run.account import Account, Accounts, OnSpan
from forge_env.run.timeline import Span
from forge_env.sandbox import seen_by
from forge_env.tools.schema import telling
from forge_env.trajectory import Trajectory
from forge_env.types import Task
from trainers.rollout.types import BUG, LATE, Cut, Group

DETERMINISM = (
    "the environment answers differently when an episode's actions are played again, so its continuations don't count "
    "for grpo.advantage"
)
MakeEnvironment = Callable[[], Environment]


class Deadline:
    """The time limit of a group, `grpo.group_timeout_s`."""

    def __init__(self, grpo: GRPOSection) -> None:
        self._grpo = grpo
        self._timeout = asyncio.timeout(None)

    def start(self) -> None:
        """Start the clock at the model's first answer, so that waiting behind other groups doesn't count."""
        if self._timeout.when() is None:
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._grpo.group_timeout_s)

    async def wait(self, episodes: Sequence[asyncio.Future[Any]]) -> int:
        """Wait for the episodes until one fails or the time is over; return the number of late ones.

        With `grpo.on_timeout=wait`, late episodes are awaited too.
        """
        with suppress(TimeoutError):
            async with self._timeout:
                await asyncio.wait(episodes, return_when=asyncio.FIRST_EXCEPTION)
        late = sum(not task.done() for task in episodes) if self._timeout.expired() else 0
        if late and self._grpo.on_timeout == "wait":
            await asyncio.wait(episodes, return_when=asyncio.FIRST_EXCEPTION)
        return late


class Player:
    """Plays episodes of the recipe's environment with a policy.

    If the environment's own code fails, that episode is invalid and its task is set aside.

    Args:
        on_span: called with timeline spans of the groups, of each group's first episode, and of that episode's
            sandboxes; None: no spans.

    Attributes:
        set_aside: ids of tasks whose environment has raised; they are not played again.
    """

    def __init__(
        self,
        config: RunConfig,
        make_env: MakeEnvironment,
        *,
        warn: Callable[[str], object],
        on_span: Callable[[Span], None] | None = None,
        opponents: Mapping[str, Policy] = NOBODY,
        held_out_opponents: Mapping[str, Policy] = NOBODY,
    ) -> None:
        self._config, self._make_env, self._tasks = config, make_env, make_env()
        self._opponents, self._held_out_opponents = opponents, held_out_opponents
        self._warn, self._on_span = warn, on_span
        self.set_aside: set[str] = set()
        self._told: set[str] = set()
        self.accounts = Accounts()
        self.ended = 0

    @property
    def max_reward(self) -> float | None:
        """The environment's highest reward; None if unknown."""
        return self._tasks.max_reward

    @property
    def code_timeout_s(self) -> float:
        """Time limit of the environment's own code, in seconds."""
        limit_s: float = self._tasks.config.code_timeout_s
        return limit_s

    async def group(self, position: int, index: int, policy: Policy) -> Group:
        """Play all episodes of a training task; `grpo.on_timeout` decides about those not done by the deadline."""
        started = time.perf_counter()
        name, split = f"group {position}", self._tasks.splits[0]
        try:
            task = self._task(split, index)
            if task.id in self.set_aside:
                reason = f"task {task.id!r} is excluded: its environment raised an error"
                return Group([self._lost(f"{name}-0", task.id, reason)])
            group = await self._play_group(task, position, policy)
            if group.finished:
                await score_group(self._tasks, task, group.finished)
        except EnvironmentBugError as error:  # raised by `task` or `score_group`, not in an episode
            group = Group([self._buggy(f"train-{position}", f"{split}/{index}", error)])
        if self._on_span is not None:
            self._on_span(Span("groups", name, name, started, time.perf_counter()))
        return group

    async def _play_group(self, task: Task, position: int, policy: Policy) -> Group:
        grpo = self._config.grpo
        deadline = Deadline(grpo)
        unfinished: dict[int, Trajectory] = {}  # by member: trajectory of the current attempt

        def episode(member: int) -> Coroutine[Any, Any, Trajectory]:
            name, at = f"train-{position}-{member}", (position, member)
            on_try = partial(unfinished.__setitem__, member)
            return self._episode(task, at, name, policy, self._opponents, deadline.start, on_try)

        started = time.perf_counter()
        running = [asyncio.create_task(episode(member)) for member in range(grpo.group_size)]
        done: list[asyncio.Task[Trajectory]] = []
        try:
            late = await deadline.wait(running)
            done = [task for task in running if task.done()]
        finally:
            await _cancel([task for task in running if task not in done])
        if late and grpo.on_timeout == "zero":
            # An episode whose infrastructure failed earlier never counts as 0.
            zeros = {member: attempt for member, attempt in unfinished.items() if attempt.error is None}
            played = [
                task.result() if task in done else _counts_as_zero(zeros[member], time.perf_counter() - started)
                for member, task in enumerate(running)
                if task in done or member in zeros
            ]
            return Group(played, late)
        return Group([task.result() for task in done], late)

    async def continue_group(self, group: Group, index: int, cuts: Sequence[Cut], policy: Policy) -> None:
        """Continue episodes of a group from the given turns, and add the rewards to `group.continued`.

        Continuations that are lost, or not done within `grpo.group_timeout_s`, are left out, and so are those in which
        the environment answers differently than in the episode.
        """
        if scores_groups(self._tasks):
            raise UsageError(
                f"{self._config.environment.name} scores groups, so its episodes can't be continued one by one",
                fix="use another grpo.advantage.name",
            )
        task, episodes = self._task(self._tasks.splits[0], index), group.valid

        async def one(cut: Cut, number: int) -> None:
            episode = episodes[cut.episode]
            seed, point = episode_seed(self._config.seed, episode.id), Point(cut.turn)
            player = Continuation(episode.turns, point, policy, seed=continuation_seed(seed, point, number))
            name = f"{episode.id}+{cut.turn}.{number}"
            place = (episode.group or 0, episode.member or 0)
            played = await self._episode(task, place, name, player, self._opponents, seed=seed)
            group.continued_tokens += sum(len(turn.reply.token_ids) for turn in played.turns[cut.turn :])
            if player.differed is not None and DETERMINISM not in self._told:
                self._told.add(DETERMINISM)
                self._warn(f"{DETERMINISM}: first in {episode.id}, before turn {player.differed + 1}")
            elif player.differed is None and played.valid:
                group.continued.setdefault((cut.episode, cut.turn), []).append(played.reward)

        playing = [asyncio.create_task(one(cut, number)) for cut, number in _numbered(cuts)]
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.grpo.group_timeout_s):
                    await asyncio.wait(playing, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            await _cancel([task for task in playing if not task.done()])
        for done in playing:
            if not done.cancelled():
                done.result()

    async def held_out(self, split: str, index: int, policy: Policy) -> Trajectory:
        """Play one episode of a held-out task."""
        name = held_out_name(split, index)
        try:
            return await self._episode(self._task(split, index), (index, 0), name, policy, self._held_out_opponents)
        except EnvironmentBugError as error:
            return self._buggy(name, f"{split}/{index}", error)

    def _task(self, split: str, index: int) -> Task:
        with environment_code(f"{type(self._tasks).__name__}.task", f"{split}/{index}"):
            return resolve_task(self._tasks, None, {"split": split, "index": index})

    async def _episode(
        self,
        task: Task,
        place: tuple[int, int],
        name: str,
        policy: Policy,
        opponents: Mapping[str, Policy],
        on_answer: Callable[[], None] = lambda: None,
        on_try: Callable[[Trajectory], object] = lambda trajectory: None,
        *,
        seed: int | None = None,
    ) -> Trajectory:
        account = Account(name, "reset", on_span=self._show(name, "episodes"))
        show = self._show(name, "sandboxes")
        in_sandboxes = None if show is None else partial(show, name)

        def watch(doing: str) -> None:
            if account.doing == "generate" and doing == "environment":
                on_answer()
            account.enter(doing)

        self.accounts.open(account)
        try:
            with telling(self._warn), seen_by(in_sandboxes):
                return await run_episode(
                    self._make_env,
                    policy,
                    task=task,
                    opponents=opponents,
                    environment_name=self._config.environment.name,
                    trajectory_id=name,
                    place=place,
                    seed=episode_seed(self._config.seed, name) if seed is None else seed,
                    watch=watch,
                    on_try=on_try,
                )
        except EnvironmentBugError as error:
            self.set_aside.add(task.id)
            return self._buggy(name, task.id, error)
        finally:
            self.accounts.close(account)
            self.ended += 1

    def _buggy(self, name: str, task_id: str, error: EnvironmentBugError) -> Trajectory:
        """An invalid episode for a bug in the environment; warns of each bug once."""
        if error.same not in self._told:  # once per bug, not per episode
            self._told.add(error.same)
            self._warn(f"a bug in the environment; its episodes are not trained on, and their tasks excluded: {error}")
        return self._lost(name, task_id, f"{BUG}{error}")

    def _lost(self, name: str, task_id: str, error: str) -> Trajectory:
        return Trajectory(name, self._config.environment.name, task_id, valid=False, error=error)

    def _show(self, name: str, track: str) -> OnSpan | None:
        """A callback that adds an episode's spans to the timeline; None except for a group's first."""
        show = self._on_span
        if show is None or not name.endswith("-0"):
            return None
        return lambda whose, doing, start, end: show(Span(track, whose, doing, start, end))


def _counts_as_zero(episode: Trajectory, wall_s: float) -> Trajectory:
    """An episode cancelled at its group's deadline, with the turns played so far and reward 0."""
    return replace(
        episode,
        turns=[replace(turn, reward=0.0) for turn in episode.turns],
        reward=0.0,
        rewards=dict.fromkeys(episode.rewards, 0.0),
        terminated=False,
        truncated=True,
        truncation=LATE,
        wall_s=round(wall_s, 3),
    )


def _numbered(cuts: Sequence[Cut]) -> Iterator[tuple[Cut, int]]:
    """Yield each continuation with its number among those from the same turn: the number is part of its seed."""
    numbers: defaultdict[tuple[int, int], Iterator[int]] = defaultdict(count)
    for cut in cuts:
        for _ in range(cut.number):
            yield cut, next(numbers[cut.episode, cut.turn])


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
