"""Rollout of one episode: takes an environment and a policy, returns a `Trajectory`.

    trajectory = await run_episode(lambda: fe.make("coding_rlvr"), policy, task=task, environment_name="coding_rlvr")

Failures are handled by kind (`forge_env.errors`):

- Mistakes of the agent are part of the episode, which scores 0 if the agent's code raised an exception.
- A limit truncates the episode; its state is scored, unless time ran out while waiting for an endpoint's answer.
- An `InfrastructureError` is retried with a fresh environment and, if it persists, makes the trajectory invalid, so
  that it enters no statistic.
- Anything else is a bug and is raised, naming the task.

However the episode ends, including by cancellation, `env.close()` has been awaited.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from time import perf_counter
from typing import Any

from forge_env import interrupts
from forge_env.concurrency import settled, to_its_end
from forge_env.environment.base import (
    Environment,
    checked_branch,
    checked_reset,
    checked_rewards,
    checked_seat,
    checked_step,
    resolve_task,
)
from forge_env.environment.optional import credits_of, seats_of
from forge_env.environment.tool_environment import given_answer
from forge_env.errors import (
    CODE_BLOCK,
    CODE_LIMIT_S,
    GIVEN_UP,
    AgentError,
    ChatFormatError,
    ContextLengthExceeded,
    EnvironmentBugError,
    HeldUpError,
    InfrastructureError,
    UsageError,
    agent_code,
    environment_code,
    suggestion,
)
from forge_env.policy import READS_IMAGES, LimitReached, Policy, PolicySession, Reply
from forge_env.rewards.reasons import explanation
from forge_env.sandbox.protocol import on_behalf_of
from forge_env.tools.calls import measured_calls
from forge_env.trajectory import Trajectory, Turn
from forge_env.types import Branch, Observation, ResetResult, Task
from forge_env.working_time import WorkingTime, limited_code

log = logging.getLogger(__name__)
MOST_TURNS = 1_000
"""Turns after which an episode without a limit is a bug of its environment, unless its `max_turns` is larger."""
CLOSE_S = 60.0
"""Maximum seconds for an environment to close."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of one episode in addition to the environment's; None: no limit."""

    max_turns: int | None = None
    """Maximum assistant messages; the environment's `max_turns` applies as well."""
    max_tokens: int | None = None
    """Tokens sampled by the policy after which the episode ends, once the current turn is complete."""
    wall_s: float | None = None
    """Wall-clock seconds from the end of reset; when they are over, the current turn is cancelled. reset() has the same
    limit, not counting time spent waiting for shared resources."""
    working_s: float | None = None
    """As `wall_s`, but without time spent waiting for shared resources: rate limits, a free sandbox."""

    @property
    def seconds(self) -> float | None:
        """The shorter of the time limits."""
        return min((limit for limit in (self.wall_s, self.working_s) if limit is not None), default=None)


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and when an episode is retried after an `InfrastructureError`."""

    attempts: int = 2
    """Maximum retries after the first attempt."""
    first_delay_s: float = 0.5
    """Seconds before the first retry; doubled for each further one, and varied at random by up to half."""
    longest_delay_s: float = 30.0
    """Maximum seconds of one delay, before the random variation."""

    def delay(self, attempt: int, rng: random.Random) -> float:
        """Seconds to wait before retry number `attempt` (from 0)."""
        return min(self.longest_delay_s, self.first_delay_s * 2.0**attempt) * rng.uniform(0.5, 1.5)


NOBODY: Mapping[str, Policy] = {}


async def run_episode(
    make_env: Callable[[], Environment],
    policy: Policy,
    *,
    task: Task | None = None,
    seed: int | None = None,
    limits: EpisodeLimits = EpisodeLimits(),
    opponents: Mapping[str, Policy] = NOBODY,
    environment_name: str = "",
    trajectory_id: str = "",
    place: tuple[int, int] | None = None,
    retry: Retry = Retry(),
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    watch: Callable[[str], None] = lambda doing: None,
    on_try: Callable[[Trajectory], object] = lambda trajectory: None,
) -> Trajectory:
    """Play one episode to its end.

    Args:
        make_env: creates a fresh environment for each attempt.
        policy: the policy to play; one session is opened for each attempt, and for each seat.
        task: the task to play; None leaves the choice to the environment and `seed`.
        seed: seed of the environment and of the policy's session.
        limits: limits in addition to the environment's.
        opponents: policies that play seats in place of `policy`, by seat.
        environment_name: environment name to record.
        trajectory_id: id to record; if empty, the task's id.
        place: `Trajectory.group` and `Trajectory.member` to record.
        retry: handling of `InfrastructureError`.
        sleep: waits between attempts.
        watch: called as a phase starts: "reset", "generate", "environment" (tools, scoring), "close", "retry".
        on_try: called at the start of each attempt with its trajectory, for callers that may cancel the episode.

    Raises:
        EnvironmentBugError: the environment's code failed.
        UsageError: an opponent is given for a seat that doesn't exist, or no seat is left for the policy.

    Examples:
        >>> import asyncio
        >>> import forge_env as fe
        >>> from forge_env.rollout.scripted import GoldPolicy
        >>> episode = asyncio.run(fe.run_episode(lambda: fe.make("calculator"), GoldPolicy(), seed=0))
        >>> episode.reward, episode.turns[-1].reply.message.role
        (1.0, 'assistant')
    """
    started, began = perf_counter(), round(time.time(), 3)
    for tries in itertools.count():
        trajectory = Trajectory(id=trajectory_id, environment=environment_name, task_id=task.id if task else "")
        trajectory.group, trajectory.member = place or (None, None)
        trajectory.started, trajectory.retries = began, tries
        on_try(trajectory)
        try:
            await _attempt(make_env(), policy, opponents, seed, trajectory, task, limits, watch)
            break
        except AgentError as error:
            log.warning("the agent crashed on task %s: %s", trajectory.task_id or seed, error)
            trajectory.crash(error)
            break
        except InfrastructureError as error:
            log.warning("episode of task %s was lost (attempt %d): %s", trajectory.task_id or seed, tries + 1, error)
            trajectory.error = f"{type(error).__name__}: {error}"
            trajectory.valid = tries < retry.attempts
        if not trajectory.valid:
            break
        watch("retry")
        await sleep(retry.delay(tries, random.Random()))
    trajectory.id = trajectory.id or trajectory.task_id
    trajectory.wall_s = round(perf_counter() - started, 6)
    return trajectory


async def _attempt(
    env: Environment,
    policy: Policy,
    opponents: Mapping[str, Policy],
    seed: int | None,
    trajectory: Trajectory,
    task: Task | None,
    limits: EpisodeLimits,
    watch: Callable[[str], None],
) -> None:
    """Play one attempt, and close its environment in any case, including cancellation."""
    failed = True
    try:
        with on_behalf_of(trajectory.environment or type(env).__name__):
            await _play(env, Sessions(env, policy, opponents, seed), trajectory, task, limits, watch)
        failed = False
    finally:
        watch("close")
        played = perf_counter()
        await _close(env, failed=failed)
        trajectory.close_s = round(perf_counter() - played, 6)


async def _play(
    env: Environment,
    sessions: Sessions,
    trajectory: Trajectory,
    task: Task | None,
    limits: EpisodeLimits,
    watch: Callable[[str], None],
) -> None:
    """Play the episode, filling `trajectory` incrementally so that it survives a failure."""
    watch("reset")
    began = perf_counter()
    seed = sessions.seed
    with environment_code(f"{type(env).__name__}.task", f"seed {seed}"):
        task = resolve_task(env, seed, None) if task is None else task
    trajectory.task_id, trajectory.split = task.id, task.split
    trajectory.difficulty, trajectory.tags = task.difficulty, list(task.tags)
    trajectory.final_observation, info = await _reset(env, task, seed, limits, images=sessions.read_images)
    trajectory.reset_s = round(perf_counter() - began, 6)
    trajectory.rewards = dict.fromkeys(seats_of(env), 0.0)
    trajectory.opponents = sessions.opponents
    sessions.turn_to(checked_seat(env, "reset", info, task.id), task)
    deadline = asyncio.timeout(limits.wall_s)  # starts after reset, as waiting for a sandbox is not the agent's fault
    working = WorkingTime(limits.working_s)
    with explanation() as why:
        limit: str | None
        try:
            async with deadline, working:
                limit = await _take_turns(env, sessions, trajectory, task, limits, watch)
        except TimeoutError:
            if not deadline.expired() and not working.expired:
                raise
            if (lost := sessions.current.unanswered()) is not None:
                raise lost from None
            limit = "working_time" if working.expired else "time"
        finally:
            trajectory.waited_s = round(working.waited_s, 6)
        if limit is not None:
            await _truncate(env, trajectory, limit, limits)
    if env.max_reward is None or trajectory.reward < env.max_reward - 1e-9:
        trajectory.reason, trajectory.failures = why.reason, why.failures
    trajectory.scores = why.scores
    for seat, reward in trajectory.rewards.items():
        trajectory.metrics[f"reward_{seat}"] = reward
    if images := sum(len(message.images) for turn in trajectory.turns for message in turn.observation):
        trajectory.metrics["images"] = float(images)
    if rerendered := sum(turn.reply.forked for turn in trajectory.turns):
        trajectory.metrics["fork/rendered_anew"] = float(rerendered)
    names = list(dict.fromkeys(turn.seat for turn in trajectory.turns if turn.seat))
    if credits := credits_of(env, names, task.id):
        trajectory.info["credits"] = credits
    with environment_code(f"{type(env).__name__}.given_answer", task.id):
        trajectory.answer = given_answer(env)


async def _reset(env: Environment, task: Task, seed: int | None, limits: EpisodeLimits, *, images: bool) -> ResetResult:
    """Reset within the episode's time limits; exceeding them is an infrastructure failure rather than a score of 0."""
    bound = limits.seconds
    working = WorkingTime(bound)  # excludes waiting for a free sandbox
    given_up: list[str] = []
    token, reading = GIVEN_UP.set(given_up), READS_IMAGES.set(images)
    try:
        async with working:
            result = await checked_reset(env, task, seed)
    except TimeoutError as error:
        if not working.expired:
            raise
        location = f": it was in {given_up[0]}" if given_up else ""
        raise InfrastructureError(f"reset did not end within {bound:g} s{location}") from error
    finally:
        GIVEN_UP.reset(token)
        READS_IMAGES.reset(reading)
    return result


async def _take_turns(
    env: Environment,
    sessions: Sessions,
    trajectory: Trajectory,
    task: Task,
    limits: EpisodeLimits,
    watch: Callable[[str], None],
) -> str | None:
    """Take turns until the environment ends the episode (returns None) or another limit does (returns its name)."""
    sampled = 0
    while True:
        seat = sessions.seat
        observation = trajectory.final_observation
        asked = perf_counter()
        watch("generate")
        try:
            reply = await _reply(sessions.current, observation[sessions.known :], limits)
        except ContextLengthExceeded:
            return "context"
        except ChatFormatError as error:
            log.warning("episode of task %s was truncated: %s", trajectory.task_id, error)
            return "format"
        except LimitReached as reached:
            if reached.reply is not None:
                trajectory.turns.append(Turn(observation, reached.reply, seat=seat))
                trajectory.final_observation = []
            return reached.message
        answered = perf_counter()
        turn = Turn(observation, reply, generate_s=round(answered - asked, 6), seat=seat)
        trajectory.turns.append(turn)
        trajectory.final_observation = []  # an unanswered turn has none until `step` returns one
        watch("environment")
        with measured_calls(turn.calls_s):
            message = reply.message
            if reply.stop_reason in ("length", "content_filter"):
                message = message.model_copy(update={"stop_reason": reply.stop_reason})
            checked = await checked_step(env, message, trajectory.task_id)
        observation, reward, terminated, truncated, info = checked
        turn.step_s = round(perf_counter() - answered, 6)
        if "rewards" in info:
            others = checked_rewards(env, info, trajectory.task_id)
            trajectory.earn({**others, seat: reward + others.get(seat, 0.0)})
        else:
            trajectory.earn({seat: reward})
        trajectory.final_observation = observation
        if "metrics" in info:
            trajectory.metrics.update(info["metrics"])
        if "crash" in info:
            raise info["crash"]
        if terminated and reply.was_cut:  # the environment judged what there was of the last reply
            terminated, truncated, info = False, True, {**info, "truncation": "reply_tokens"}
        if terminated or truncated:
            trajectory.terminated, trajectory.truncated = terminated, truncated
            trajectory.truncation = info.get("truncation", "limit") if truncated else None
            return None
        sampled += len(reply.token_ids)
        if limits.max_tokens is not None and sampled >= limits.max_tokens:
            return "tokens"
        if limits.max_turns is not None:
            if len(trajectory.turns) >= limits.max_turns:
                return "turns"
        elif len(trajectory.turns) >= max(MOST_TURNS, env.config.max_turns):
            what = f"{type(env).__name__}.step has not ended the episode after {len(trajectory.turns):,} turns"
            fix = "truncate it after self.config.max_turns turns; raise max_turns if episodes are longer"
            raise EnvironmentBugError(f"{what} of task {task.id!r}", fix=fix)
        if seats_of(env) or "seat" in info or seat:
            branch = _branched(env, info, trajectory)
            sessions.turn_to(checked_seat(env, "step", info, task.id), task, branch)


async def _reply(session: PolicySession, observation: Observation, limits: EpisodeLimits) -> Reply:
    """Get a reply.

    Raises:
        LimitReached: the agent's code blocked the event loop until the time was over.
        InfrastructureError: the user interrupted such code.
    """
    limit, block = CODE_LIMIT_S.set(limits.seconds or 0.0), CODE_BLOCK.set(object())
    try:
        return await session.reply(observation)
    except HeldUpError as error:
        if interrupts.requested():
            raise InfrastructureError(f"the agent {error}") from error
        log.warning("the agent %s", error)
        raise LimitReached("time") from error
    finally:
        CODE_LIMIT_S.reset(limit)
        CODE_BLOCK.reset(block)


def _branched(env: Environment, info: dict[str, Any], trajectory: Trajectory) -> Branch | None:
    """The branch of the conversation whose turn it is, or None if it doesn't branch off another; it is recorded."""
    branch = checked_branch(env, info, trajectory.task_id)
    if branch is not None:
        trajectory.info.setdefault("branches", {})[info.get("seat", "")] = branch.model_dump()
    return branch


class Sessions:
    """The conversations of an episode: one for each seat that has acted, with the policy or an opponent.

    Args:
        policy: plays all seats without an opponent.
        opponents: policies of other seats, by seat.

    Attributes:
        seat: seat whose turn it is; "" if the environment has no seats.
        current: session of that seat.
        known: number of the seat's next messages that its session already has, from another conversation.
        opponents: names of the opponents, by seat.
        read_images: whether every policy reads images.
    """

    def __init__(self, env: Environment, policy: Policy, opponents: Mapping[str, Policy], seed: int | None) -> None:
        if opponents:
            check_opponents(type(env).__name__, seats_of(env), opponents)
        self._env, self._policy, self._opponents, self.seed = env, policy, opponents, seed
        self._open: dict[str, PolicySession] = {}
        self.known = 0
        self.seat = ""
        self.current: PolicySession
        self.opponents = {seat: other.name or type(other).__name__ for seat, other in opponents.items()}
        self.read_images = all(each.reads_images for each in (policy, *opponents.values()))

    def turn_to(self, seat: str, task: Task, branch: Branch | None = None) -> None:
        """Make it this seat's turn. Its conversation starts at its first turn, or continues a branch of another one."""
        self.known = 0
        if seat not in self._open:
            seed = seat_seed(self.seed, seat)
            if seat in self._opponents:
                with _opponents_code(seat):
                    inner = open_session(self._opponents[seat], self._env, task, seed=seed)
                    self._open[seat] = _Opponent(inner, seat)
            else:
                session = None
                if branch is not None and branch.turns and branch.seat in self._open:
                    session = self._open[branch.seat].fork(branch.turns, self._env.tools, seed=seed)
                    self.known = 0 if session is None else branch.messages
                self._open[seat] = session or open_session(self._policy, self._env, task, seed=seed)
        self.seat, self.current = seat, self._open[seat]


class _Opponent(PolicySession):
    """An opponent's conversation. Its tokens are removed: the policy did not sample them and must not train on them."""

    def __init__(self, inner: PolicySession, seat: str) -> None:
        self._inner = inner
        self._seat = seat

    async def reply(self, observation: Observation) -> Reply:
        with _opponents_code(self._seat):
            reply = await self._inner.reply(observation)
        return Reply(reply.message, stop_reason=reply.stop_reason, metadata=reply.metadata)

    def unanswered(self) -> InfrastructureError | None:
        return self._inner.unanswered()


@contextmanager
def _opponents_code(seat: str) -> Iterator[None]:
    """Context for an opponent's code. Its exceptions are bugs of the environment, not crashes of the agent."""
    try:
        with agent_code("it"):
            yield
    except AgentError as error:
        raise EnvironmentBugError(f"the opponent at seat {seat!r} crashed: {error.message}") from error


def episode_seed(run_seed: int, name: str) -> int:
    """Seed of a training episode, below 2**32; depends only on the run's seed and the episode's name."""
    return int.from_bytes(blake2b(f"{run_seed}/{name}".encode(), digest_size=4).digest())


def seat_seed(seed: int | None, seat: str) -> int | None:
    """Seed of a seat's session, below 2**31, so that seats played by one model sample differently."""
    if seed is None or not seat:
        return seed
    return int.from_bytes(blake2b(f"{seed}/{seat}".encode(), digest_size=4).digest()) >> 1


def held_out_name(split: str, index: int) -> str:
    """Name of a held-out task's episode."""
    return f"{split}-{index}"


def check_opponents(name: str, seats: Sequence[str], opponents: Collection[str]) -> None:
    """Raise `UsageError` for opponents of unknown seats, or if every seat has an opponent."""
    if unknown := [seat for seat in opponents if seat not in seats]:
        hint = suggestion(unknown[0], seats, f"its seats: {', '.join(seats)}") if seats else "leave opponents out"
        raise UsageError(f"{name} has no seat {unknown[0]!r}", fix=hint)
    if len(opponents) == len(seats):
        raise UsageError(f"every seat of {name} has an opponent", fix="leave one out, for the policy to play")


def open_session(policy: Policy, env: Environment, task: Task, *, seed: int | None) -> PolicySession:
    """Open the policy's session for this episode.

    Raises:
        UsageError: the policy returned an object that is not a `PolicySession`.
    """
    session = policy.session_inside(env, task, seed=seed)
    if not isinstance(session, PolicySession):
        fix = "derive the class of what `session` returns from forge_env.policy.PolicySession"
        raise UsageError(f"{type(policy).__name__} opened a {type(session).__name__}, which is not a session", fix=fix)
    return session


async def _truncate(env: Environment, trajectory: Trajectory, limit: str, limits: EpisodeLimits) -> None:
    """Score a truncated episode. Scoring has the same time limit again; exceeding it is an infrastructure failure."""
    trajectory.truncated, trajectory.truncation = True, limit
    deadline = asyncio.timeout(limits.wall_s)
    try:
        async with deadline:
            what, limit_s = f"{type(env).__name__}.truncate", env.config.code_timeout_s
            async with limited_code(what, trajectory.task_id, limit_s):
                reward, metrics = await env.truncate(limit)
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise InfrastructureError(f"scoring did not end within {limits.wall_s:g} s") from error
    last = trajectory.turns[-1].seat if trajectory.turns else ""
    trajectory.earn(dict.fromkeys(trajectory.rewards or [last], float(reward)))
    trajectory.metrics.update(metrics)


async def _close(env: Environment, *, failed: bool) -> None:
    """Await `env.close()` even if this task is cancelled repeatedly, but no longer than `CLOSE_S`.

    If the episode `failed`, exceptions of `close` are only logged: the first failure is more informative and decides
    whether to retry.
    """
    closing = asyncio.ensure_future(settled(env.close()))
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
        if failure is not None and (failed or isinstance(failure, InfrastructureError)):
            # The episode itself is valid: if a sandbox can't be released, its engine replaces it.
            log.warning("closing the environment failed: %s", failure)
        elif failure is not None:
            with environment_code(f"{type(env).__name__}.close"):
                raise failure
