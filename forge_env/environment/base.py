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
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from forge_env.errors import EnvironmentBugError, UsageError, environment_code
from forge_env.types import Action, Branch, Message, Observation, ResetResult, StepResult, Task, ToolSpec, as_message
from forge_env.visible import shown
from forge_env.working_time import limited_code

if TYPE_CHECKING:
    from forge_env.rewards.rubric import Rubric
    from forge_env.sandbox import SandboxEngine
    from forge_env.trajectory import Trajectory

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
        ...         self.current = self.resolve_task(seed, options)
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
    seats: tuple[str, ...] = ()
    """Names of the players, each with its own conversation and reward; empty: there is one agent. With several seats, \
`info["seat"]` names the seat that acts next and gets the messages, `reward` is for the seat that has just acted, and \
`info["rewards"]` holds the rewards of this step for other seats. Set in the class or in `__init__`."""
    max_reward: float | None = 1.0
    """Reward of a perfect episode, for at least one seat; `validate` requires it of gold solutions. None if unknown;
    evaluations then report no fraction of solved tasks. Set in the class or in `__init__`."""
    luck: float = 0.0
    """Fraction of tasks, 0 to 1, that a blind answer solves by chance: 0.1 for a guess among ten. `validate` accepts
    this rate for blind answers. Set in the class or in `__init__`."""
    rubric: Rubric | None = None
    """The rubric that scores episodes, if there is one; shown by `forge-env info` and `validate`."""

    def __init__(self, config: EnvironmentConfig | None = None, *, sandboxes: SandboxEngine | None = None) -> None:
        needed = [name for name, field in self.config_class.model_fields.items() if field.is_required()]
        if config is None and needed:
            raise UsageError(f"{type(self).__name__} has no default {needed[0]}", fix=f"give `{needed[0]}`")
        self.config: Any = config if config is not None else self.config_class()
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

    async def unplayable(self, tasks: Sequence[Task]) -> Mapping[str, str]:
        """Find tasks that can't be run on this machine; return task id -> reason.

        The result may also name entries of the data source that are no tasks here. `forge-env validate` reports all
        of them and skips the tasks.

        Args:
            tasks: tasks to check.
        """
        return {}

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

    def given_answer(self) -> str | None:
        """The agent's answer in the episode that has just ended; None: its last message."""
        return None

    def credits(self) -> Mapping[str, float]:
        """Rewards of single conversations of the episode that has just ended, by the names in `info["seat"]`.

        A conversation that is not listed has the episode's reward. Credits are recorded in
        `Trajectory.info["credits"]` and used by `grpo.advantage.name=by_conversation`; the episode's score remains
        its reward.
        """
        return {}

    async def score_group(self, task: Task, trajectories: Sequence[Trajectory]) -> None:
        """Add rewards that depend on comparing all episodes of one task; does nothing by default.

        Called for every group in training, on an object that need not have run any of the episodes.

        Args:
            task: the task of the group.
            trajectories: the episodes of the group; their rewards are changed in place.
        """
        return

    async def close(self) -> None:
        """Release the episode's resources. Called once, also after an error."""
        return

    def gold_actions(self, task: Task) -> list[Action] | None:
        """Actions that earn the full reward, for `forge-env validate`; None if they are unknown.

        With seats: the actions of all seats in turn until the end, at which one seat earns the full reward.

        Args:
            task: the task to solve.
        """
        files = self.gold_files(task)
        if files is not None:
            return self.hand_in(task, files)
        return None if task.gold is None else [task.gold]

    def gold_files(self, task: Task) -> Mapping[str, str] | None:
        """Files of a perfect solution, by path, if code files are scored; None if not.

        `forge-env validate` submits cheats in their place with `hand_in`. It needs no `gold_files` for code in the
        messages or tool arguments of `gold_actions`.

        Args:
            task: the task to solve.
        """
        return None

    def hand_in(self, task: Task, files: Mapping[str, str]) -> list[Action]:
        """Actions with which an agent submits the given files. Define it together with `gold_files`.

        Args:
            task: the task to solve.
            files: text by path.
        """
        name = type(self).__name__
        raise EnvironmentBugError(f"{name} has gold_files, and no hand_in", fix="say how files are handed in")

    def random_action(self, rng: random.Random) -> Action | None:
        """Draw a legal action for the current state, uniformly, for the policy `random`.

        None: the policy sends random messages and calls tools at random.

        Args:
            rng: source of randomness.
        """
        return None

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message] | None:
        """Make a conversation for supervised warm-up: prompt, replies, observations; None if there is none.

        By default, `gold_actions` are run in a new object of this class, with real tool results and sandboxes of this
        machine. Warm-up trains on the assistant's messages. Override it for demonstrations that are cheaper to make,
        or that contain random mistakes: a model that has only seen perfect demonstrations has little left to learn
        from rewards. It may be called in any thread, but only one call runs at a time. With seats, the result is the
        conversation of one seat.

        Args:
            task: the task to solve.
            rng: source of all randomness, so that the same task and seed give the same demonstration.

        Raises:
            EnvironmentBugError: the environment's own code failed.
        """
        if (actions := self.gold_actions(task)) is None:
            return None
        from forge_env.environment.host import get_host

        host = get_host()
        # The engine is not returned: its warm sandboxes serve the next demonstration. The host closes it at exit.
        engine = host.borrow_engine("auto" if self.sandboxes is None else self.sandboxes.name)
        seats = host.run(_conversations(type(self)(self.config, sandboxes=engine), task, actions))
        return rng.choice(list(seats.values())) if len(seats) > 1 else next(iter(seats.values()))

    def resolve_task(self, seed: int | None, options: dict[str, Any] | None) -> Task:
        """Find the task that `reset(seed=..., options=...)` selects.

        Args:
            seed: as in `reset`.
            options: as in `reset`.
        """
        options = options or {}
        if isinstance(task := options.get("task"), Task):
            return task
        split = options.get("split", self.splits[0])
        if split not in self.splits:
            raise UsageError(f"no split {split!r} in {type(self).__name__}", fix=f"use one of {', '.join(self.splits)}")
        index = int(options.get("index", seed or 0))
        if index < 0:
            raise UsageError(f"there is no task {index}", fix="use an `index` (or a `seed`) of 0 or more")
        name = f"{type(self).__name__}.task"
        with environment_code(name, f"{split}/{index}", limit_s=self.config.code_timeout_s):
            count = self.num_tasks(split)
            if count == 0:
                raise UsageError(f"{type(self).__name__} has no tasks in split {split!r}")
            try:
                task = self.task(split, index if count is None else index % count)
            except TypeError:
                _check_signature(name, self.task, split, index)  # only on errors: as slow as making a simple task
                raise
        if not isinstance(task, Task):
            if inspect.iscoroutine(task):
                task.close()
            raise EnvironmentBugError(f"{name} returned a {type(task).__name__}", fix="return an fe.Task, not async")
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
        raise EnvironmentBugError(message, fix="that name is the platform's: use another")
    if not (isinstance(result, tuple) and len(result) == 2):
        raise EnvironmentBugError(f"{what} returned {_shown(result)}", fix="return (messages, info)")
    observation, info = result
    return as_observation(what, observation), _info(what, info)


async def checked_step(env: Environment, action: Message, task_id: str) -> StepResult:
    """Call `env.step` and check the result.

    Raises:
        EnvironmentBugError: it failed, or its result breaks the contract.
    """
    what = f"{type(env).__name__}.step"
    async with limited_code(what, task_id, env.config.code_timeout_s):
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
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if type(flag).__name__ not in ("bool", "bool_"):  # Python's or numpy's, which has both names
            raise EnvironmentBugError(f"{what} gave {_shown(flag)} as {name}", fix="give True or False")
    if terminated and truncated:
        fix = "terminated is the task's end, truncated a limit's"
        raise EnvironmentBugError(f"{what} returned terminated and truncated together on task {task_id!r}", fix=fix)
    _check_metrics(what, _info(what, info))
    return as_observation(what, observation), number, bool(terminated), bool(truncated), info


def _check_metrics(what: str, info: dict[str, Any]) -> None:
    metrics = info.get("metrics", {})
    try:
        for name, value in metrics.items():
            if isinstance(value, str) or not math.isfinite(float(value)):
                raise ValueError(name)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        fix = "give finite numbers by name"
        raise EnvironmentBugError(f"{what} gave {_shown(metrics)} as info['metrics']", fix=fix) from error


def checked_seat(env: Environment, method: str, info: dict[str, Any], task_id: str) -> str:
    """The seat in `info` that acts next; without seats, any string, "" by default.

    Raises:
        EnvironmentBugError: the seat is missing or unknown.
    """
    seat = info.get("seat", "")
    if seat in env.seats or (not env.seats and isinstance(seat, str)):
        return seat  # type: ignore[no-any-return]  # seats are strings
    what = f"{type(env).__name__}.{method}"
    fix = f"put the seat that acts next into info, one of {', '.join(env.seats)}" if env.seats else "give a text"
    raise EnvironmentBugError(f"{what} gave the seat {_shown(seat)} on task {task_id!r}", fix=fix)


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
        what = f"{type(env).__name__} gave {_shown(branch)} as info['branch'] on task {task_id!r}"
        raise EnvironmentBugError(what, fix="give the fields of forge_env.types.Branch") from error


def checked_rewards(env: Environment, info: dict[str, Any], task_id: str) -> dict[str, float]:
    """Validate `info["rewards"]`, the rewards of other seats in a step.

    Raises:
        EnvironmentBugError: they are not finite numbers by seat.
    """
    rewards = info["rewards"]
    try:
        result = {seat: float(reward) for seat, reward in rewards.items() if seat in env.seats}
        if len(result) == len(rewards) and math.isfinite(sum(result.values())):
            return result
    except (AttributeError, TypeError, ValueError, OverflowError):
        pass
    raise EnvironmentBugError(
        f"{type(env).__name__}.step gave {_shown(rewards)} as info['rewards'] on task {task_id!r}",
        fix="give finite numbers by seat, of those in `seats`",
    )


def checked_credits(env: Environment, names: Collection[str], task_id: str) -> dict[str, float]:
    """Call `env.credits` and check the result.

    Raises:
        EnvironmentBugError: it failed, or its values are not finite numbers by the conversations in `names`.
    """
    with environment_code(f"{type(env).__name__}.credits", task_id):
        credits = env.credits()
    try:
        result = {name: float(credit) for name, credit in credits.items() if name in names}
        if len(result) == len(credits) and all(map(math.isfinite, result.values())):
            return result
    except (AttributeError, TypeError, ValueError, OverflowError):
        pass
    raise EnvironmentBugError(
        f"{type(env).__name__}.credits gave {_shown(credits)} on task {task_id!r}",
        fix=f"give finite numbers by conversation, of {', '.join(names) or 'those that there are: none'}",
    )


async def _conversations(env: Environment, task: Task, actions: Sequence[Action]) -> dict[str, list[Message]]:
    """Run `actions` as an episode, until they or the episode end; return each seat's messages.

    Messages after a seat's last action are left out.
    """
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


def checked_demonstration(env: Environment, task: Task, rng: random.Random) -> list[Message] | None:
    """Call `env.demonstrate` with the time limit `code_timeout_s`.

    Raises:
        EnvironmentBugError: it failed, or exceeded the time limit.
    """
    with environment_code(f"{type(env).__name__}.demonstrate", task.id, limit_s=env.config.code_timeout_s):
        return env.demonstrate(task, rng)


def as_observation(what: str, value: Any) -> Observation:
    """Check that `value` is a list or tuple of messages, and return it as a list.

    Args:
        what: name of the method that returned it, for the error.
        value: the method's result.

    Raises:
        EnvironmentBugError: it is something else, or too long.
    """
    if isinstance(value, list | tuple) and all(isinstance(message, Message) for message in value):
        if (length := sum(len(message.content) + sum(map(len, message.images)) for message in value)) > MAX_OBSERVATION:
            raise EnvironmentBugError(
                f"{what} gave messages of {length:,} characters together", fix=f"keep them below {MAX_OBSERVATION:,}"
            )
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
    return f"a {type(value).__name__}, {shown(value)}"
