"""Estimate what each tool call of a recorded episode was worth.

    verify      play all recorded actions again: does the environment answer as recorded?
    continue    from before and after each call, m times: play the recorded actions again, then the policy goes on
    credit      mean reward from after the call minus mean reward from before it

Before a call the policy chooses anew, so a credit compares the call with what the policy does on average: it is the
advantage of the call, estimated as in VinePPO (A. Kazemnejad et al., arXiv 2410.01679). The credits of an episode add
up to its reward minus the mean reward of its task.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from forge_env.credit.recorded import RecordedEpisode
from forge_env.credit.replay import DIFFERS, Continuation, Point, continuation_seed
from forge_env.credit.results import Call, Cost, Credits, Value
from forge_env.environment.base import Environment
from forge_env.errors import EnvironmentBugError, ForgeError, UsageError
from forge_env.evaluation.estimates import Estimate
from forge_env.evaluation.rescoring import TranscriptPolicy
from forge_env.policy import Policy
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import GoldPolicy
from forge_env.trajectory import Trajectory
from forge_env.types import Message, Observation, Task, ToolCall
from forge_env.visible import one_line

CONTINUATIONS = 16
"""Continuations from each point."""
CONCURRENCY = 32
"""Continuations in progress at once."""
SHOWN = 120
"""Characters of an answer in the description of a difference."""
EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class Step:
    """A tool call of an episode, or a message without one, between two points; `after` is None at the end."""

    turn: int
    call: ToolCall | None
    before: Point
    after: Point | None


def steps_of(trajectory: Trajectory, turns: Collection[int] = ()) -> list[Step]:
    """The calls of an episode in order.

    Args:
        turns: numbers of the turns, from 1, whose calls are wanted; empty: all.
    """
    steps = []
    for number, turn in enumerate(trajectory.turns):
        if turns and number + 1 not in turns:
            continue
        calls: Sequence[ToolCall | None] = turn.message.tool_calls or [None]
        for index, call in enumerate(calls):
            after: Point | None = Point(number, index + 1)
            if index + 1 == len(calls):
                after = Point(number + 1) if number + 1 < len(trajectory.turns) else None
            steps.append(Step(number, call, Point(number, index), after))
    return steps


@dataclass
class Estimation:
    """The estimation of an episode's credits.

    Args:
        turns: numbers of the turns, from 1, whose calls are wanted; empty: all.
        on_progress: called with the numbers of finished and of all continuations.
    """

    recorded: RecordedEpisode
    make_env: Callable[[], Environment]
    policy: Policy
    continuations: int = CONTINUATIONS
    turns: Collection[int] = ()
    on_progress: Callable[[int, int], object] = lambda done, total: None
    values: dict[Point, Value] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)
    first_difference: int | None = None
    """First turn (from 0) before which the environment answered differently; the number of turns: at the end."""
    difference: str = ""
    lost: str = ""
    """Why the last lost continuation was lost."""

    async def run(self) -> Credits:
        """Estimate the credits.

        Raises:
            UsageError: the policy can't continue an episode, or the environment's first observation differs.
            ForgeError: all continuations were lost.
        """
        trajectory = self.recorded.trajectory
        if isinstance(self.policy, GoldPolicy):
            raise UsageError(
                "the gold policy can't continue an episode: it plays its actions from the first one",
                fix="name another model: --model NAME, random, or module:function",
            )
        if wrong := [turn for turn in self.turns if not 1 <= turn <= len(trajectory.turns)]:
            raise UsageError(f"episode {trajectory.id} has no turn {wrong[0]}", fix=f"use 1 to {len(trajectory.turns)}")
        started = time.perf_counter()
        env = self.make_env()
        task = self.recorded.task(env)
        await self._verify(task)
        steps = steps_of(trajectory, self.turns)
        points = sorted({point for step in steps for point in (step.before, step.after) if point is not None})
        await self._continue([point for point in points if self._is_known(point)], task)
        self.cost.seconds = time.perf_counter() - started
        counted = [reward for value in self.values.values() for reward in value.rewards]
        if self.lost and not counted:
            raise ForgeError(f"all continuations were lost: {self.lost}", fix="see forge-env doctor")
        rewards = [trajectory.reward, *counted]
        low, high = min(0.0, *rewards), max(rewards if env.max_reward is None else [env.max_reward, *rewards])
        calls = [self._call(step, low, high if high > low else low + 1.0) for step in steps]
        return self._credits(calls)

    def _credits(self, calls: Sequence[Call]) -> Credits:
        trajectory = self.recorded.trajectory
        return Credits(
            run="",
            episode=trajectory.id,
            environment=self.recorded.environment.name,
            task=trajectory.task_id,
            model=self.recorded.config.model,
            reward=trajectory.reward,
            continuations=self.continuations,
            calls=calls,
            cost=self.cost,
            differs=self.first_difference,
            difference=self.difference,
            lost=sum(value.lost for value in self.values.values()),
        )

    # --- is the environment deterministic?

    async def _verify(self, task: Task) -> None:
        """Play the whole episode again and note the first answer that differs from the recorded one."""
        recorded, seed = self.recorded.trajectory, self.recorded.seed
        policy = TranscriptPolicy({(task.id, seed): (recorded, "")})
        again = await run_episode(self.make_env, policy, task=task, seed=seed)
        if not again.valid:
            raise ForgeError(f"the episode can't be played again: {again.error}", fix="see forge-env doctor")
        if (differed := policy.diverged.get(recorded.id)) is not None:
            self._differs(differed[0], _shown(recorded.turns[differed[0]].observation), _shown(differed[1]))
        elif len(again.turns) < len(recorded.turns):
            self._differs(len(again.turns), "another turn", "the end of the episode")
        elif again.final_observation != recorded.final_observation:
            self._differs(len(recorded.turns), _shown(recorded.final_observation), _shown(again.final_observation))
        elif abs(again.reward - recorded.reward) > EPSILON:
            self._differs(len(recorded.turns), f"reward {recorded.reward:g}", f"reward {again.reward:g}")
        if self.first_difference == 0:
            raise UsageError(
                "the environment isn't deterministic: its first observation differs from the recorded one "
                f"({self.difference})",
                fix="let everything in the environment depend on the task and the seed of reset",
            )

    def _differs(self, turn: int, before: str, now: str) -> None:
        if self.first_difference is None or turn < self.first_difference:
            self.first_difference, self.difference = turn, f"recorded: {before}; now: {now}"

    def _is_known(self, point: Point | None) -> bool:
        """Whether the state at a point is the recorded one; None is the end of the episode."""
        if self.first_difference is None:
            return True
        return point is not None and point.turn < self.first_difference

    # --- continuations

    async def _continue(self, points: Sequence[Point], task: Task) -> None:
        self.values = {point: Value() for point in points}
        total, room = len(points) * self.continuations, asyncio.Semaphore(CONCURRENCY)

        async def one(point: Point, number: int) -> None:
            async with room:
                await self._continuation(point, number, task)
            self.on_progress(self.cost.continuations, total)

        async with asyncio.TaskGroup() as group:
            for number in range(self.continuations):
                for point in points:
                    group.create_task(one(point, number))

    async def _continuation(self, point: Point, number: int, task: Task) -> None:
        recorded = self.recorded
        seed, turns = recorded.seed, recorded.trajectory.turns
        policy = Continuation(turns, point, self.policy, seed=continuation_seed(seed, point, number))
        value = self.values[point]
        try:
            played = await run_episode(self.make_env, policy, task=task, seed=seed, limits=recorded.limits)
        except EnvironmentBugError as error:
            played = Trajectory("", "", task.id, valid=False, error=str(error))
        self.cost.continuations += 1
        self.cost.replayed += min(point.replies, len(played.turns))
        new = played.turns[point.replies :]
        self.cost.turns += len(new)
        self.cost.tokens += sum(len(turn.reply.token_ids) for turn in new)
        if not played.valid:
            value.lost, self.lost = value.lost + 1, played.error or ""
        elif played.truncation == DIFFERS and policy.differed is not None:
            expected = turns[policy.differed].observation
            self._differs(policy.differed, _shown(expected), "another answer in some of the continuations")
        else:
            value.rewards.append(played.reward)
            value.repeated += bool(new) and _is_same(new[0].message, turns[point.turn].message, point.calls)

    def _call(self, step: Step, low: float, high: float) -> Call:
        def estimate(point: Point | None) -> Estimate | None:
            if not self._is_known(point):
                return None
            if point is None:
                reward = self.recorded.trajectory.reward
                return Estimate(reward, 0.0, reward, reward)
            return self.values[point].estimate(low, high)

        value = self.values.get(step.before)
        message = self.recorded.trajectory.turns[step.turn].message
        return Call(
            turn=step.turn + 1,
            name="" if step.call is None else step.call.function.name,
            arguments=message.content if step.call is None else step.call.function.arguments,
            before=estimate(step.before),
            after=estimate(step.after),
            repeated=value.repeated / len(value.rewards) if value is not None and value.rewards else None,
        )


def _is_same(new: Message, recorded: Message, calls: int) -> bool:
    """Whether a continuation begins with the recorded call number `calls`, or with the recorded message."""
    if not recorded.tool_calls:
        return not new.tool_calls and new.content.strip() == recorded.content.strip()
    one, two = next(iter(new.tool_calls), None), recorded.tool_calls[calls]
    return one is not None and _meaning(one) == _meaning(two)


def _meaning(call: ToolCall) -> tuple[str, object]:
    try:
        return (call.function.name, json.loads(call.function.arguments))
    except ValueError:
        return (call.function.name, call.function.arguments)


def _shown(observation: Observation) -> str:
    return repr(one_line(" ".join(message.content for message in observation), SHOWN))
