"""What an environment can offer beyond the contract. A class opts in by defining the methods of a protocol here.

    class Add(fe.ToolEnvironment):
        ...

        def gold_actions(self, task):                # -> HasGold: `validate` and the policy `gold` use it
            return [fe.call_tool("add", a=1, b=2), "3"]

The functions below call what a class defines, or return the default for one that doesn't.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from forge_env.environment.base import (
    Environment,
    as_text_of,
    checked_reset,
    checked_seat,
    checked_step,
    finite_numbers,
)
from forge_env.errors import EnvironmentBugError, environment_code
from forge_env.types import Action, Message, Task, as_message

if TYPE_CHECKING:
    from forge_env.trajectory import Trajectory


@runtime_checkable
class HasGold(Protocol):
    """Gold solutions, other than `Task.gold` as the only message."""

    def gold_actions(self, task: Task) -> list[Action] | None:
        """Actions that earn the full reward, for `forge-env validate`; None if they are unknown.

        With seats: the actions of all seats in turn until the end, at which one seat earns the full reward.

        Args:
            task: the task to solve.
        """


@runtime_checkable
class HasGoldFiles(Protocol):
    """Gold solutions that are files."""

    def gold_files(self, task: Task) -> Mapping[str, str] | None:
        """Files of a perfect solution, by path, if code files are scored; None if not.

        `forge-env validate` submits cheats in their place with `hand_in`. It needs no `gold_files` for code in the
        messages or tool arguments of `gold_actions`.

        Args:
            task: the task to solve.
        """

    def hand_in(self, task: Task, files: Mapping[str, str]) -> list[Action]:
        """Actions with which an agent submits the given files.

        Args:
            task: the task to solve.
            files: text by path.
        """


@runtime_checkable
class Demonstrates(Protocol):
    """Demonstrations for supervised warm-up that are cheaper than playing the gold solution, or make mistakes."""

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message] | None:
        """Make a conversation for supervised warm-up: prompt, replies, observations; None if there is none.

        Warm-up trains on the assistant's messages. Random mistakes help: a model that has only seen perfect
        demonstrations has little left to learn from rewards. It may be called in any thread, but only one call runs at
        a time. With seats, the result is the conversation of one seat.

        Args:
            task: the task to solve.
            rng: source of all randomness, so that the same task and seed give the same demonstration.
        """


@runtime_checkable
class FindsUnplayable(Protocol):
    """Tasks that can't be run everywhere."""

    async def unplayable(self, tasks: Sequence[Task]) -> Mapping[str, str]:
        """Find tasks that can't be run on this machine; return task id -> reason.

        The result may also name entries of the data source that are no tasks here. `forge-env validate` reports all
        of them and skips the tasks.

        Args:
            tasks: tasks to check.
        """


@runtime_checkable
class HasSeats(Protocol):
    """Several players."""

    seats: tuple[str, ...]
    """Names of the players, each with its own conversation and reward. `info["seat"]` names the seat that acts next \
and gets the messages, `reward` is for the seat that has just acted, and `info["rewards"]` holds the rewards of this \
step for other seats. Set in the class or in `__init__`."""


@runtime_checkable
class GivesCredits(Protocol):
    """Rewards of single conversations."""

    def credits(self) -> Mapping[str, float]:
        """Rewards of single conversations of the episode that has just ended, by the names in `info["seat"]`.

        A conversation that is not listed has the episode's reward. Credits are recorded in
        `Trajectory.info["credits"]` and used by `grpo.advantage.name=by_conversation`; the episode's score remains
        its reward.
        """


@runtime_checkable
class ScoresGroups(Protocol):
    """Rewards that compare all episodes of a task, other than those of `rubric`."""

    async def score_group(self, task: Task, trajectories: Sequence[Trajectory]) -> None:
        """Add rewards that depend on comparing all episodes of one task.

        Called for every group in training, on an object that need not have run any of the episodes.

        Args:
            task: the task of the group.
            trajectories: the episodes of the group; their rewards are changed in place.
        """


@runtime_checkable
class HasRandomActions(Protocol):
    """Legal actions for the policy `random`."""

    def random_action(self, rng: random.Random) -> Action | None:
        """Draw a legal action for the current state, uniformly, for the policy `random`.

        None: the policy sends random messages and calls tools at random.

        Args:
            rng: source of randomness.
        """


@runtime_checkable
class HasLuck(Protocol):
    """Tasks that a blind answer can solve."""

    luck: float
    """Fraction of tasks, 0 to 1, that a blind answer solves by chance: 0.1 for a guess among ten. `validate` accepts \
this rate for blind answers. Set in the class or in `__init__`."""


PROTOCOLS: tuple[type, ...] = (
    HasGold,
    HasGoldFiles,
    Demonstrates,
    FindsUnplayable,
    GivesCredits,
    ScoresGroups,
    HasRandomActions,
)
"""Protocols with methods, whose signatures are checked when an environment is loaded."""


def gold_actions(env: Environment, task: Task) -> list[Action] | None:
    """Actions that earn the full reward, from `gold_actions`, `gold_files` or `Task.gold`; None if they are unknown."""
    if isinstance(env, HasGold):
        return env.gold_actions(task)
    files = gold_files(env, task)
    if files is not None:
        return hand_in(env, task, files)
    return None if task.gold is None else [task.gold]


def gold_files(env: Environment, task: Task) -> Mapping[str, str] | None:
    """Files of a perfect solution, or None."""
    files: Any = getattr(env, "gold_files", None)
    return None if files is None else files(task)


def hand_in(env: Environment, task: Task, files: Mapping[str, str]) -> list[Action]:
    """Actions with which an agent submits files. `EnvironmentBugError`: the environment has no `hand_in`."""
    if isinstance(env, HasGoldFiles):
        return env.hand_in(task, files)
    name = type(env).__name__
    raise EnvironmentBugError(f"{name} has gold_files but no hand_in", fix="define how files are submitted")


async def unplayable(env: Environment, tasks: Sequence[Task]) -> Mapping[str, str]:
    """Tasks that can't be run on this machine: id -> reason."""
    return await env.unplayable(tasks) if isinstance(env, FindsUnplayable) else {}


def seats_of(env: Environment) -> tuple[str, ...]:
    """Names of the players; empty if there is one agent."""
    return getattr(env, "seats", ())


def luck_of(env: Environment) -> float:
    """Fraction of tasks that a blind answer solves by chance."""
    return env.luck if isinstance(env, HasLuck) else 0.0


def random_action(env: Environment, rng: random.Random) -> Action | None:
    """A legal action for the current state, or None."""
    return env.random_action(rng) if isinstance(env, HasRandomActions) else None


def scores_groups(env: Environment | type[Environment]) -> bool:
    """Whether the environment compares the episodes of a task."""
    return isinstance(env, ScoresGroups) or getattr(env.rubric, "scores_groups", False) is True


async def score_group(env: Environment, task: Task, trajectories: Sequence[Trajectory]) -> None:
    """Add rewards that depend on comparing all episodes of one task, by `score_group` or the rubric's group functions.

    Raises:
        EnvironmentBugError: the environment's code failed.
    """
    with environment_code(f"{type(env).__name__}.score_group", task.id):
        if isinstance(env, ScoresGroups):
            await env.score_group(task, trajectories)
        elif env.rubric is not None:
            await env.rubric.score_group(task, trajectories)


def credits_of(env: Environment, names: Collection[str], task_id: str) -> dict[str, float]:
    """Rewards of single conversations (`names`) of the episode that has just ended; empty if there are none.

    Raises:
        EnvironmentBugError: `credits` failed, or its values are not finite numbers by the conversations in `names`.
    """
    if (given := getattr(env, "credits", None)) is None:
        return {}
    with environment_code(f"{type(env).__name__}.credits", task_id):
        credits = given()
    if (result := finite_numbers(credits, names)) is not None:
        return result
    raise EnvironmentBugError(
        f"{type(env).__name__}.credits returned {as_text_of(credits)} on task {task_id!r}",
        fix=f"give finite numbers by conversation, of {', '.join(names) or 'none'}",
    )


def demonstrate(env: Environment, task: Task, rng: random.Random) -> list[Message] | None:
    """Make a conversation for supervised warm-up; None if there is none.

    Without `demonstrate`, the gold solution is played in a new object of the environment's class, with real tool
    results and sandboxes of this machine.

    Raises:
        EnvironmentBugError: the environment's own code failed, or exceeded `code_timeout_s`.
    """
    with environment_code(f"{type(env).__name__}.demonstrate", task.id, limit_s=env.config.code_timeout_s):
        return env.demonstrate(task, rng) if isinstance(env, Demonstrates) else played_gold(env, task, rng)


def played_gold(env: Environment, task: Task, rng: random.Random) -> list[Message] | None:
    """Play the gold solution, if there is one, in a new object of the class; return one seat's conversation."""
    if (actions := gold_actions(env, task)) is None:
        return None
    from forge_env.environment.host import get_host

    host = get_host()
    # The engine is not returned: its warm sandboxes serve the next demonstration. The host closes it at exit.
    engine = host.borrow_engine("auto" if env.sandboxes is None else env.sandboxes.name)
    conversations = host.run(_conversations(type(env)(env.config, sandboxes=engine), task, actions))
    return rng.choice(list(conversations.values())) if len(conversations) > 1 else next(iter(conversations.values()))


async def _conversations(env: Environment, task: Task, actions: Sequence[Action]) -> dict[str, list[Message]]:
    """Run `actions` as an episode; return each seat's messages up to its last action."""
    from forge_env.loop_guard import LoopGuard

    with LoopGuard(math.inf, 0.0, print, code_s=env.config.code_timeout_s):  # only interrupts; never warns
        try:
            observation, info = await checked_reset(env, task, None)
            seat = checked_seat(env, "reset", info, task.id)
            messages: dict[str, list[Message]] = {seat: []}
            for action in actions:
                message = as_message(action)
                messages.setdefault(seat, []).extend([*observation, message])
                observation, _, terminated, truncated, info = await checked_step(env, message, task.id)
                if terminated or truncated:
                    break
                seat = checked_seat(env, "step", info, task.id)
            return messages
        finally:
            await env.close()
