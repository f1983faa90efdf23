"""The environment contract: one asynchronous episode at a time, in the style of gymnasium; and checks of it.

    observation, info = await env.reset(seed=3)
    observation, reward, terminated, truncated, info = await env.step(action)
    await env.close()

An observation is the list of messages that are new to the agent; an action is one assistant message
(or its text). `terminated` means that the task ended the episode, `truncated` that a limit did; never both.
The agent's mistakes are reported in the observation. A failure of the infrastructure is an
`InfrastructureError`, after which the rollout is retried in a new environment object.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from forge_env.errors import EnvironmentBugError, UsageError, environment_code
from forge_env.reading import LARGEST_NUMBER, is_bounded
from forge_env.types import Action, Branch, Message, Observation, ResetResult, StepResult, Task, ToolSpec
from forge_env.visible import shown
from forge_env.working_time import limited_code

if TYPE_CHECKING:
    from forge_env.rewards.rubric import Rubric
    from forge_env.sandbox import SandboxEngine

API_VERSION = 1
_BRANCH = TypeAdapter(Branch)
MAX_OBSERVATION = 10_000_000
"""Maximum characters of an observation: no model can read more, and every turn is stored."""


class EnvironmentConfig(BaseModel):
    """Options of an environment; subclass it to add your own. Unknown options are rejected.

    Objects are immutable, because all environments that are made together share one.

    Examples:
        >>> import forge_env as fe
        >>> class MazeConfig(fe.EnvironmentConfig):
        ...     size: int = 5
        >>> MazeConfig(size=9).max_turns
        8
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    seed: int = 0
    """Seed of the task generator: the same seed gives the same tasks in the same order."""
    max_turns: int = Field(8, ge=1)
    """Assistant messages in one episode before it is truncated."""
    code_timeout_s: float = Field(120.0, gt=0)
    """Maximum seconds of the environment's own code in one reset, or in one step without its tools. Code that exceeds \
them is reported as a bug, with the function and line at which it was."""


class Environment(ABC):
    """Base class of all environments. One object runs one episode at a time; make several for concurrent episodes.

    Tasks are addressed by `(split, index)`: `task("train", 17)` is the same task in every process, so a
    run's data position is one integer. `num_tasks` is None if the number of tasks is unlimited.

    Args:
        config: options, an object of `config_class`; None: the defaults.
        sandboxes: the started sandbox engine, for environments that run code.

    Examples:
        >>> import forge_env as fe
        >>> class Echo(fe.Environment):
        ...     def task(self, split, index):
        ...         return fe.Task(id=f"{split}-{index}", prompt=f"Say {index}.", split=split)
        ...
        ...     async def reset(self, *, seed=None, options=None):
        ...         self.current = fe.resolve_task(self, seed, options)
        ...         return [fe.Message(role="user", content=self.current.prompt)], {}
        ...
        ...     async def step(self, action):
        ...         text = action if isinstance(action, str) else action.content
        ...         return [], float(text == self.current.prompt[4:-1]), True, False, {}
        >>> Echo().task("eval", 3).prompt
        'Say 3.'
    """

    api_version: ClassVar[int] = API_VERSION
    """Version of this contract that the class was written for. Set it in your class: otherwise the installed version
    is assumed, and a later incompatibility can't be detected."""
    config_class: ClassVar[type[EnvironmentConfig]] = EnvironmentConfig
    """Class of the options."""
    splits: ClassVar[tuple[str, ...]] = ("train", "eval")
    """Names of the task sets; the first is the one to train on."""
    max_reward: float | None = 1.0
    """Reward of a perfect episode, for at least one seat; `validate` requires it of gold solutions. None if unknown;
    evaluations then report no fraction of solved tasks. Set in the class or in `__init__`."""
    rubric: Rubric | None = None
    """The rubric that scores episodes, if there is one; shown by `forge-env info` and `validate`."""

    def __init__(self, config: EnvironmentConfig | None = None, *, sandboxes: SandboxEngine | None = None) -> None:
        if config is None:
            for name, field in self.config_class.model_fields.items():
                if field.is_required():
                    raise UsageError(f"{type(self).__name__} has no default {name}", fix=f"give `{name}`")
            config = self.config_class()
        self.config: Any = config
        self.sandboxes = sandboxes

    @abstractmethod
    def task(self, split: str, index: int) -> Task:
        """Return the `index`-th task of `split`; deterministic in `(config.seed, split, index)`.

        Args:
            split: one of `splits`.
            index: from 0, below `num_tasks(split)`.
        """

    def num_tasks(self, split: str) -> int | None:
        """Number of tasks in `split`, or None if it is unlimited.

        Args:
            split: one of `splits`.
        """
        return None

    @property
    def tools(self) -> list[ToolSpec]:
        """Tools that the agent may call, in a stable order; with seats, those of the seat that acts next."""
        return []

    @property
    def reusable(self) -> bool:
        """Whether this object can run another episode; if not, make a new one."""
        return True

    @abstractmethod
    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Start an episode and return its first messages.

        Args:
            seed: selects the task if `options` doesn't.
            options: `{"task": Task}`, or `{"split": str, "index": int}`.
        """

    @abstractmethod
    async def step(self, action: Action) -> StepResult:
        """Apply one assistant message; the module's docstring describes the result.

        Args:
            action: an assistant message, or its text.
        """

    async def truncate(self, reason: str) -> tuple[float, dict[str, float]]:
        """End the episode because of an external limit; return `(reward, metrics)`.

        The reward is for the unfinished episode and is added to the rewards of its steps; 0 by default.

        Args:
            reason: the limit, such as "tokens" or "time".
        """
        return 0.0, {}

    async def close(self) -> None:
        """Release the episode's resources. Called once, also after an error."""
        return


def resolve_task(env: Environment, seed: int | None, options: Mapping[str, Any] | None) -> Task:
    """Find the task that `reset(seed=..., options=...)` selects.

    Args:
        env: the environment.
        seed: as in `reset`.
        options: as in `reset`.

    Raises:
        UsageError: there is no such task.
        EnvironmentBugError: the environment's `task` failed, or returned something else.

    Examples:
        >>> import forge_env as fe
        >>> fe.resolve_task(fe.make("calculator"), None, {"split": "eval", "index": 2}).split
        'eval'
    """
    options = options or {}
    if isinstance(task := options.get("task"), Task):
        return task
    split = options.get("split", env.splits[0])
    if split not in env.splits:
        raise UsageError(f"no split {split!r} in {type(env).__name__}", fix=f"use one of {', '.join(env.splits)}")
    given = options.get("index", seed or 0)
    try:
        index = int(given)
    except (TypeError, ValueError, OverflowError):
        index = -1
    if index < 0:
        raise UsageError(f"there is no task {given!r}", fix="use a whole `index` (or a `seed`) of 0 or more")
    name = f"{type(env).__name__}.task"
    with environment_code(name, f"{split}/{index}", limit_s=env.config.code_timeout_s):
        count = env.num_tasks(split)
        if count == 0:
            raise UsageError(f"{type(env).__name__} has no tasks in split {split!r}")
        try:
            task = env.task(split, index if count is None else index % count)
        except TypeError:
            _check_signature(name, env.task, split, index)  # only on errors: as slow as making a simple task
            raise
    return checked_task(name, task)


def checked_task(what: str, task: Any) -> Task:
    """Check that the method `what` returned a task. `EnvironmentBugError`: it returned something else."""
    if not isinstance(task, Task):
        if inspect.iscoroutine(task):
            task.close()
        raise EnvironmentBugError(f"{what} returned a {type(task).__name__}", fix="return an fe.Task, without async")
    return task


def _check_signature(what: str, method: Callable[..., object], *args: object) -> None:
    try:
        inspect.signature(method).bind(*args)
    except TypeError as error:
        raise EnvironmentBugError(f"{what}: {error}", fix="write `def task(self, split, index)`") from error


# Checks that results of an author's `task`, `reset` and `step` follow the contract, so that errors are found at once.
# Otherwise, a string in place of a list of messages would be read letter by letter, and a NaN would become a score.


async def checked_reset(env: Environment, task: Task, seed: int | None) -> ResetResult:
    """Call `env.reset` for a task and check the result.

    Raises:
        EnvironmentBugError: it failed, or its result breaks the contract.
    """
    what = f"{type(env).__name__}.reset"
    async with limited_code(what, task.id, env.config.code_timeout_s):
        result = await _awaited(what, env.reset(seed=seed, options={"task": task}))
    if not isinstance(env.config, EnvironmentConfig):
        message = f"{what} made self.config a {type(env.config).__name__}"
        raise EnvironmentBugError(message, fix="the platform uses that name: choose another")
    if not (isinstance(result, tuple) and len(result) == 2):
        raise EnvironmentBugError(f"{what} returned {as_text_of(result)}", fix="return (messages, info)")
    observation, info = result
    return as_observation(what, observation), _info(what, info)


async def checked_step(env: Environment, action: Message, task_id: str) -> StepResult:
    """Call `env.step` and check the result. `EnvironmentBugError`: it failed, or its result breaks the contract."""
    what = f"{type(env).__name__}.step"
    async with limited_code(what, task_id, env.config.code_timeout_s):
        result = await _awaited(what, env.step(action))
    if not (isinstance(result, tuple) and len(result) == 5):
        fix = "return (messages, reward, terminated, truncated, info)"
        raise EnvironmentBugError(f"{what} returned {as_text_of(result)} on task {task_id!r}", fix=fix)
    observation, reward, terminated, truncated, info = result
    try:
        number = float(reward)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not is_bounded(number):
        raise EnvironmentBugError(
            f"{what} returned the reward {as_text_of(reward)} on task {task_id!r}",
            fix=f"give a finite number of at most {LARGEST_NUMBER:g}",
        )
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if type(flag).__name__ not in ("bool", "bool_"):  # Python's or numpy's, which has both names
            raise EnvironmentBugError(f"{what} returned {as_text_of(flag)} as {name}", fix="give True or False")
    if terminated and truncated:
        fix = "terminated means that the task ended, truncated that a limit was reached"
        raise EnvironmentBugError(f"{what} returned terminated and truncated together on task {task_id!r}", fix=fix)
    metrics = _info(what, info).get("metrics", {})
    if finite_numbers(metrics, metrics) is None:
        fix = f"give finite numbers of at most {LARGEST_NUMBER:g} by name"
        raise EnvironmentBugError(f"{what} returned {as_text_of(metrics)} as info['metrics']", fix=fix)
    return as_observation(what, observation), number, bool(terminated), bool(truncated), info


def checked_seat(env: Environment, method: str, info: dict[str, Any], task_id: str) -> str:
    """The seat in `info` that acts next; without seats, any string, "" by default.

    Raises:
        EnvironmentBugError: the seat is missing or unknown.
    """
    seat = info.get("seat", "")
    seats = getattr(env, "seats", ())
    if seat in seats or (not seats and isinstance(seat, str)):
        return seat  # type: ignore[no-any-return]  # seats are strings
    what = f"{type(env).__name__}.{method}"
    fix = f"set info['seat'] to the seat that acts next, one of {', '.join(seats)}" if seats else "give a text"
    raise EnvironmentBugError(f"{what} returned the seat {as_text_of(seat)} on task {task_id!r}", fix=fix)


def checked_branch(env: Environment, info: dict[str, Any], task_id: str) -> Branch | None:
    """Validate `info["branch"]`, which describes how a conversation branched off another one; None if it is absent.

    Raises:
        EnvironmentBugError: it isn't a `Branch`.
    """
    if (branch := info.get("branch")) is None:
        return None
    try:
        return _BRANCH.validate_python(branch)
    except ValidationError as error:
        what = f"{type(env).__name__} returned {as_text_of(branch)} as info['branch'] on task {task_id!r}"
        raise EnvironmentBugError(what, fix="give the fields of forge_env.types.Branch") from error


def checked_rewards(env: Environment, info: dict[str, Any], task_id: str) -> dict[str, float]:
    """Validate `info["rewards"]`, the rewards of other seats in a step.

    Raises:
        EnvironmentBugError: they are not finite numbers by seat.
    """
    rewards = info["rewards"]
    if (result := finite_numbers(rewards, getattr(env, "seats", ()))) is not None:
        return result
    raise EnvironmentBugError(
        f"{type(env).__name__}.step returned {as_text_of(rewards)} as info['rewards'] on task {task_id!r}",
        fix="give finite numbers by seat, of those in `seats`",
    )


def finite_numbers(values: Any, names: Collection[str]) -> dict[str, float] | None:
    """Return a mapping's numbers, or None if a key is not in `names` or a value is not a number within
    `LARGEST_NUMBER`."""
    try:
        numbers = {name: float(value) for name, value in values.items() if name in names and not isinstance(value, str)}
        return numbers if len(numbers) == len(values) and all(map(is_bounded, numbers.values())) else None
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None


def as_observation(what: str, value: Any) -> Observation:
    """Check that the result `value` of the method `what` is a list or tuple of messages, and return it as a list.

    Raises:
        EnvironmentBugError: it is something else, or too long.
    """
    if isinstance(value, list | tuple) and all(isinstance(message, Message) for message in value):
        if (length := sum(len(message.content) + sum(map(len, message.images)) for message in value)) > MAX_OBSERVATION:
            raise EnvironmentBugError(
                f"{what} returned messages of {length:,} characters together",
                fix=f"keep them below {MAX_OBSERVATION:,}",
            )
        return value if isinstance(value, list) else list(value)
    raise EnvironmentBugError(
        f"{what} returned {as_text_of(value)} as messages", fix='give a list: [fe.Message(role="user", content=text)]'
    )


def _info(what: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise EnvironmentBugError(
            f"{what} returned {as_text_of(value)} as info", fix="give a dictionary, {} if there is none"
        )
    return value


async def _awaited(what: str, value: Any) -> Any:
    if not inspect.isawaitable(value):
        raise EnvironmentBugError(f"{what} is a plain function", fix=f"write `async def {what.rpartition('.')[2]}`")
    return await value


def as_text_of(value: Any) -> str:
    """Type and text of a value that breaks the contract, for errors."""
    return f"a {type(value).__name__}, {shown(value)}"
