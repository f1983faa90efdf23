"""What an author's `task`, `reset` and `step` return, held to the contract: a wrong shape is named at once.

Without this a text instead of a list of messages is shown letter by letter, and a NaN becomes a score.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

from forge_env.environment import Environment
from forge_env.errors import EnvironmentBugError, environment_code
from forge_env.types import Message, Observation, StepResult, Task


async def checked_reset(env: Environment, task: Task, seed: int | None) -> tuple[Observation, dict[str, Any]]:
    """`env.reset` for a task. `EnvironmentBugError`: it failed, or returned something else than its contract says."""
    what = f"{type(env).__name__}.reset"
    with environment_code(what, task.id):
        result = await _awaited(what, env.reset(seed=seed, options={"task": task}))
    if not (isinstance(result, tuple) and len(result) == 2):
        raise EnvironmentBugError(f"{what} returned {_shown(result)}", fix="return (messages, info)")
    observation, info = result
    return as_observation(what, observation), _info(what, info)


async def checked_step(env: Environment, action: Message, task_id: str) -> StepResult:
    """`env.step`. `EnvironmentBugError`: it failed, or returned something else than its contract says."""
    what = f"{type(env).__name__}.step"
    with environment_code(what, task_id):
        result = await _awaited(what, env.step(action))
    if not (isinstance(result, tuple) and len(result) == 5):
        fix = "return (messages, reward, terminated, truncated, info)"
        raise EnvironmentBugError(f"{what} returned {_shown(result)} on task {task_id!r}", fix=fix)
    observation, reward, terminated, truncated, info = result
    try:
        number = float(reward)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise EnvironmentBugError(
            f"{what} gave the reward {_shown(reward)} on task {task_id!r}", fix="give a finite number"
        )
    if terminated and truncated:
        fix = "terminated is the task's end, truncated a limit's"
        raise EnvironmentBugError(f"{what} said terminated and truncated at once on task {task_id!r}", fix=fix)
    return as_observation(what, observation), number, bool(terminated), bool(truncated), _info(what, info)


def as_observation(what: str, value: Any) -> Observation:
    """`value` as a list of messages. `EnvironmentBugError`: it is none; `what` is who gave it."""
    if isinstance(value, list | tuple) and all(isinstance(message, Message) for message in value):
        return value if isinstance(value, list) else list(value)
    raise EnvironmentBugError(
        f"{what} gave {_shown(value)} as messages", fix='give a list: [fe.Message(role="user", content=text)]'
    )


def _info(what: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise EnvironmentBugError(f"{what} gave {_shown(value)} as info", fix="give a dictionary, {} if there is none")
    return value


async def _awaited(what: str, value: Any) -> Any:
    if not inspect.isawaitable(value):
        raise EnvironmentBugError(f"{what} is a plain function", fix=f"write `async def {what.rpartition('.')[2]}`")
    return await value


def _shown(value: Any) -> str:
    text = repr(value)
    return f"a {type(value).__name__}, {text if len(text) <= 80 else text[:77] + '...'}"
