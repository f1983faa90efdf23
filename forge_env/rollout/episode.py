"""Playing one episode: an environment and a policy in, a `Trajectory` out.

    trajectory = await run_episode(lambda: fe.make("coding_rlvr"), policy, task=task, environment_name="coding_rlvr")

Failures keep apart here (`forge_env.errors`): what the agent does wrong is inside the episode; a limit
truncates it, and what there is by then is scored, unless time ran out while waiting for an endpoint's answer; an
`InfrastructureError` is retried on a fresh environment and, if it persists, makes the trajectory invalid, so
that it enters no statistic. Anything else is a bug and is raised, naming the task. However the episode ends,
also by cancellation, `env.close()` has been awaited.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from forge_env.concurrency import to_its_end
from forge_env.environment.base import Environment, checked_reset, checked_step
from forge_env.errors import ContextLengthExceeded, InfrastructureError, UsageError, environment_code
from forge_env.policy import LimitReached, Policy, PolicySession
from forge_env.rollout.working_time import WorkingTime
from forge_env.sandbox.protocol import on_behalf_of
from forge_env.trajectory import Trajectory, Turn
from forge_env.types import Observation, Task

log = logging.getLogger(__name__)
CLOSE_S = 60.0
"""How long an environment may take to close."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Bounds on one episode besides the environment's own; None is no bound."""

    max_turns: int | None = None
    """Assistant messages; the environment's own `max_turns` holds as well."""
    max_tokens: int | None = None
    """Tokens the policy samples in the episode; reached, the episode ends after the turn in progress."""
    wall_s: float | None = None
    """Wall seconds from the end of reset on; reached, the turn in progress is cancelled. Reset has as long, not
    counting what it waits for what is shared."""
    working_s: float | None = None
    """As `wall_s`, without the time spent waiting for what is shared: rate limits, a free sandbox."""


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and when an episode is tried again after an `InfrastructureError`."""

    attempts: int = 2
    """Tries after the first."""
    first_delay_s: float = 0.5
    """Seconds before the first retry; doubled each time, and varied by half to either side."""
    longest_delay_s: float = 30.0
    """Bound on one delay before it is varied, seconds."""

    def delay(self, attempt: int, rng: random.Random) -> float:
        """Seconds to wait before retry number `attempt` (from 0)."""
        return min(self.longest_delay_s, self.first_delay_s * 2.0**attempt) * rng.uniform(0.5, 1.5)


async def run_episode(
    make_env: Callable[[], Environment],
    policy: Policy,
    *,
    task: Task | None = None,
    seed: int | None = None,
    limits: EpisodeLimits = EpisodeLimits(),
    environment_name: str = "",
    trajectory_id: str = "",
    retry: Retry = Retry(),
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    rng: random.Random | None = None,
    watch: Callable[[str], None] = lambda doing: None,
) -> Trajectory:
    """Play one episode to its end.

    Args:
        make_env: a fresh environment for each try.
        policy: what answers; one session is opened for each try.
        task: the task to play; None leaves the choice to the environment and `seed`.
        seed: of the environment and of the policy's session.
        limits: bounds besides the environment's own.
        environment_name: name to record.
        trajectory_id: name to record; the task's id when empty.
        retry: what to do about an `InfrastructureError`.
        clock: monotonic seconds.
        sleep: waits between tries.
        rng: varies the delay between tries.
        watch: told what the episode does from now on: "reset", "generate" (the policy), "environment" (tools and
            scoring), "close", "retry".

    Raises:
        EnvironmentBugError: the environment's own code failed.
    """
    started = clock()
    tries = 0
    while True:
        trajectory = Trajectory(id=trajectory_id, environment=environment_name, task_id=task.id if task else "")
        try:
            env = make_env()
            try:
                with on_behalf_of(environment_name or type(env).__name__):
                    await _play(env, policy, trajectory, task, seed, limits, clock, watch)
            except BaseException as error:  # cancelled too: the episode's resources are released
                watch("close")
                await _close(env, after=error)
                raise
            watch("close")
            await _close(env)
            break
        except InfrastructureError as error:
            log.warning("episode of task %s lost (try %d): %s", trajectory.task_id or seed, tries + 1, error)
            trajectory.error = f"{type(error).__name__}: {error}"
            if tries >= retry.attempts:
                trajectory.valid = False
                break
        watch("retry")
        await sleep(retry.delay(tries, rng or random.Random()))
        tries += 1
    trajectory.id = trajectory.id or trajectory.task_id
    trajectory.retries = tries
    trajectory.wall_s = clock() - started
    return trajectory


async def _play(
    env: Environment,
    policy: Policy,
    trajectory: Trajectory,
    task: Task | None,
    seed: int | None,
    limits: EpisodeLimits,
    clock: Callable[[], float],
    watch: Callable[[str], None],
) -> None:
    """One try: fills `trajectory` as it goes, so that what happened before a failure is kept."""
    watch("reset")
    with environment_code(f"{type(env).__name__}.task", f"seed {seed}"):
        task = env.resolve_task(seed, None) if task is None else task
    trajectory.task_id, trajectory.split = task.id, task.split
    trajectory.difficulty, trajectory.tags = task.difficulty, list(task.tags)
    trajectory.final_observation = await _reset(env, task, seed, limits)
    session = open_session(policy, env, task, seed=seed)
    deadline = asyncio.timeout(limits.wall_s)  # from here on: waiting for a free sandbox is not the agent's doing
    working = WorkingTime(limits.working_s)
    limit: str | None
    try:
        async with deadline, working:
            limit = await _take_turns(env, session, trajectory, limits, clock, watch)
    except TimeoutError:
        if not deadline.expired() and not working.expired:
            raise
        if (lost := session.unanswered()) is not None:
            raise lost from None
        limit = "working_time" if working.expired else "time"
    finally:
        trajectory.waited_s = working.waited_s
    if limit is not None:
        await _truncate(env, trajectory, limit, limits)
    with environment_code(f"{type(env).__name__}.given_answer", task.id):
        trajectory.answer = env.given_answer()


async def _reset(env: Environment, task: Task, seed: int | None, limits: EpisodeLimits) -> Observation:
    """The first observation. Reset has the time of the episode: without an end it is no zero but a failure."""
    bound = min((limit for limit in (limits.wall_s, limits.working_s) if limit is not None), default=None)
    working = WorkingTime(bound)  # waiting for a free sandbox is nobody's doing
    try:
        async with working:
            observation, _ = await checked_reset(env, task, seed)
    except TimeoutError as error:
        if not working.expired:
            raise
        raise InfrastructureError(f"reset did not end within {bound:g} s") from error
    return observation


async def _take_turns(
    env: Environment,
    session: PolicySession,
    trajectory: Trajectory,
    limits: EpisodeLimits,
    clock: Callable[[], float],
    watch: Callable[[str], None],
) -> str | None:
    """Turns until the environment ends the episode (None) or a limit that it doesn't know does (its name)."""
    sampled = 0
    while True:
        observation = trajectory.final_observation
        asked = clock()
        watch("generate")
        try:
            reply = await session.reply(observation)
        except ContextLengthExceeded:
            return "context"
        except LimitReached as reached:
            if reached.reply is not None:
                trajectory.turns.append(Turn(observation, reached.reply))
                trajectory.final_observation = []
            return reached.message
        answered = clock()
        turn = Turn(observation, reply, generate_s=answered - asked)
        trajectory.turns.append(turn)
        trajectory.final_observation = []  # until the step gives one: an unanswered turn has none
        watch("environment")
        observation, reward, terminated, truncated, info = await checked_step(env, reply.message, trajectory.task_id)
        turn.step_s = clock() - answered
        turn.reward = reward
        trajectory.reward += turn.reward
        trajectory.final_observation = observation
        if "metrics" in info:
            trajectory.metrics.update(info["metrics"])
        if terminated or truncated:
            trajectory.terminated, trajectory.truncated = terminated, truncated
            trajectory.truncation = info.get("truncation", "limit") if truncated else None
            return None
        sampled += len(reply.token_ids)
        if limits.max_tokens is not None and sampled >= limits.max_tokens:
            return "tokens"
        if limits.max_turns is not None and len(trajectory.turns) >= limits.max_turns:
            return "turns"


def open_session(policy: Policy, env: Environment, task: Task, *, seed: int | None) -> PolicySession:
    """The policy's session for this episode.

    Raises:
        UsageError: what it opened is not a `PolicySession`.
    """
    session = policy.session_inside(env, task, seed=seed)
    if not isinstance(session, PolicySession):
        fix = "derive the class of what `session` returns from forge_env.policy.PolicySession"
        raise UsageError(f"{type(policy).__name__} opened a {type(session).__name__}, which is not a session", fix=fix)
    return session


async def _truncate(env: Environment, trajectory: Trajectory, limit: str, limits: EpisodeLimits) -> None:
    """Score what there is. Scoring has the same time again; without an end it is no zero but a failure."""
    trajectory.truncated, trajectory.truncation = True, limit
    deadline = asyncio.timeout(limits.wall_s)
    try:
        async with deadline:
            with environment_code(f"{type(env).__name__}.truncate", trajectory.task_id):
                reward, metrics = await env.truncate(limit)
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise InfrastructureError(f"scoring did not end within {limits.wall_s:g} s") from error
    trajectory.reward += float(reward)
    trajectory.metrics.update(metrics)
    if trajectory.turns:
        trajectory.turns[-1].reward += float(reward)


async def _close(env: Environment, *, after: BaseException | None = None) -> None:
    """Await `env.close()` to its end, however often this task is cancelled meanwhile, but not for ever.

    What it raises after the episode failed is logged: the first failure says more, and whether to try again.
    """
    closing = asyncio.ensure_future(env.close())
    try:
        await to_its_end(asyncio.ensure_future(asyncio.wait([closing], timeout=CLOSE_S)))
    finally:
        failure = None
        if not closing.done():
            closing.cancel()
            name = type(env).__name__
            log.warning("%s.close did not end within %g s: its resources may not be released", name, CLOSE_S)
        elif not closing.cancelled():
            failure = closing.exception()
        if failure is not None and (after is not None or isinstance(failure, InfrastructureError)):
            # The episode itself is sound: a sandbox that can't be given back is its engine's to replace.
            log.warning("closing the environment failed: %s", failure)
        elif failure is not None:
            raise failure
