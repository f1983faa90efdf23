"""The environment contract: one asynchronous episode at a time, in gymnasium's shape; and what holds authors to it.

    observation, info = await env.reset(seed=3)
    observation, reward, terminated, truncated, info = await env.step(action)
    await env.close()

An observation is the list of messages that are new to the agent; an action is one assistant message
(or its text). `terminated` means the task ended, `truncated` that a limit did; never both for the same
reason. What the agent does wrong is an observation. What the infrastructure does wrong is an
`InfrastructureError`, which the rollout retries on a fresh environment.
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
from forge_env.rollout.working_time import limited_code
from forge_env.types import Action, Branch, Message, Observation, ResetResult, StepResult, Task, ToolSpec, as_message
from forge_env.visible import shown

if TYPE_CHECKING:
    from forge_env.rewards.rubric import Rubric
    from forge_env.sandbox import SandboxEngine
    from forge_env.trajectory import Trajectory

API_VERSION = 1
_BRANCH = TypeAdapter(Branch)
MAX_OBSERVATION = 10_000_000
"""Characters of an observation: no model reads more, and every turn is kept."""


class EnvironmentConfig(BaseModel):
    """Options of an environment; subclass it to add your own. Unknown options are refused.

    It can't be changed: all environments that are made together share one.

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
    """Seconds that the environment's own code may take for one reset, or for one step without its tools: what has not \
ended then is a bug, reported with the function and line where it is."""


class Environment(ABC):
    """Base of every environment. One object plays one episode at a time; make many for many at once.

    Tasks are addressed by `(split, index)`: `task("train", 17)` is the same task in every process, so a
    run's data position is one integer. `num_tasks` is None where a generator never runs out.

    Args:
        config: its options, an object of `config_class`; None: the defaults.
        sandboxes: the started engine that its code runs in, where it runs any.

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
        ...         said = action if isinstance(action, str) else action.content
        ...         return [], float(said == self.current.prompt[4:-1]), True, False, {}
        >>> Echo().task("eval", 3).prompt
        'Say 3.'
    """

    api_version: ClassVar[int] = API_VERSION
    """The version of this contract that the class was written for. Write the number down in your class: what isn't
    declared is taken for the installed version, and can't be told apart from it later."""
    config_class: ClassVar[type[EnvironmentConfig]] = EnvironmentConfig
    """The class of its options."""
    splits: ClassVar[tuple[str, ...]] = ("train", "eval")
    """Names of its task sets, the one to train on first."""
    seats: tuple[str, ...] = ()
    """Names of the players that each have a conversation and a reward of their own; empty: there is one agent. Where \
there are several, `info["seat"]` says who acts next and is shown the messages, `reward` is for the seat that has \
acted, and `info["rewards"]` holds what the step earned others. Of the class, or set in `__init__`."""
    max_reward: float | None = 1.0
    """Reward of a perfect episode, for at least one seat; `validate` requires it of gold solutions. None if unknown;
    evaluations then report no solved share. Set in the class or in `__init__`."""
    luck: float = 0.0
    """Fraction of tasks, 0 to 1, that a blind answer solves by chance: 0.1 for a guess among ten. `validate` accepts
    this rate for blind answers. Set in the class or in `__init__`."""
    rubric: Rubric | None = None
    """How episodes are scored, where a rubric does it; `forge-env info` and `validate` show it."""

    def __init__(self, config: EnvironmentConfig | None = None, *, sandboxes: SandboxEngine | None = None) -> None:
        needed = [name for name, field in self.config_class.model_fields.items() if field.is_required()]
        if config is None and needed:
            raise UsageError(f"{type(self).__name__} has no default {needed[0]}", fix=f"give `{needed[0]}`")
        self.config: Any = config if config is not None else self.config_class()
        self.sandboxes = sandboxes

    @abstractmethod
    def task(self, split: str, index: int) -> Task:
        """The `index`-th task of `split`; deterministic in `(config.seed, split, index)`.

        Args:
            split: one of `splits`.
            index: from 0, below `num_tasks(split)`.
        """

    def num_tasks(self, split: str) -> int | None:
        """How many tasks `split` has, or None when it is endless.

        Args:
            split: one of `splits`.
        """
        return None

    async def unplayable(self, tasks: Sequence[Task]) -> Mapping[str, str]:
        """What can't be played here, with the reason: tasks by id, and what its source has and isn't a task here.

        `forge-env validate` asks before it plays them, tells all of it, and leaves them out.

        Args:
            tasks: that would be played.
        """
        return {}

    @property
    def tools(self) -> list[ToolSpec]:
        """The tools the agent may call, in a stable order; where there are seats, of the one that acts next."""
        return []

    @property
    def reusable(self) -> bool:
        """Whether another episode may be played in this object; where not, make a new one."""
        return True

    @abstractmethod
    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Start an episode and return its first messages.

        Args:
            seed: chooses the task when `options` names none.
            options: `{"task": Task}`, or `{"split": str, "index": int}`.
        """

    @abstractmethod
    async def step(self, action: Action) -> StepResult:
        """Apply one assistant message; see the module docstring.

        Args:
            action: an assistant message, or its text.
        """

    async def truncate(self, reason: str) -> tuple[float, dict[str, float]]:
        """A limit that the environment doesn't know ("tokens", "time") ended the episode: `(reward, metrics)`.

        The reward is for what there is so far, on top of what steps gave; by default nothing.

        Args:
            reason: which limit.
        """
        return 0.0, {}

    def given_answer(self) -> str | None:
        """What the agent answered in the episode that has just ended; None: its last message."""
        return None

    def credits(self) -> Mapping[str, float]:
        """What single conversations of the episode that has just ended earned, where `info["seat"]` names several; by
        their names. Those left out earned what the episode did.

        They are recorded in `Trajectory.info["credits"]`, and trained with by `grpo.advantage.name=by_conversation`;
        the episode's reward stays its score.
        """
        return {}

    async def score_group(self, task: Task, trajectories: Sequence[Trajectory]) -> None:
        """Add to the rewards of all episodes of one task what only shows beside each other; by default nothing.

        Called in training on every group, of an object that need not have played any of them.

        Args:
            task: that all of them played.
            trajectories: its episodes.
        """
        return

    async def close(self) -> None:
        """Release what the episode holds. Called once, also after an error."""
        return

    def gold_actions(self, task: Task) -> list[Action] | None:
        """Actions that score full marks, for `forge-env validate`; None when none are known.

        Where there are seats: what they say in turn, until the end, which gives one of them full marks.

        Args:
            task: what is solved.
        """
        files = self.gold_files(task)
        if files is not None:
            return self.hand_in(task, files)
        return None if task.gold is None else [task.gold]

    def gold_files(self, task: Task) -> Mapping[str, str] | None:
        """Where files of code are judged: those of a perfect solution, by path. None: no files are.

        `forge-env validate` hands in cheats in their place, with `hand_in`; code that a gold solution says in a
        message or in a tool's argument it finds by itself.

        Args:
            task: what is solved.
        """
        return None

    def hand_in(self, task: Task, files: Mapping[str, str]) -> list[Action]:
        """What an agent does to hand in these files. Written together with `gold_files`.

        Args:
            task: what is solved.
            files: text by path.
        """
        name = type(self).__name__
        raise EnvironmentBugError(f"{name} has gold_files, and no hand_in", fix="say how files are handed in")

    def random_action(self, rng: random.Random) -> Action | None:
        """Draw a legal action for the current state, uniformly; the policy `random` plays it.

        None: it says random messages and calls tools at random.

        Args:
            rng: what it is drawn with.
        """
        return None

    def demonstrate(self, task: Task, rng: random.Random) -> list[Message] | None:
        """A conversation to learn from before RL: prompt, replies, observations; None where there are none.

        By default `gold_actions`, played in a new object of this class, with what its tools really answered; sandboxes
        are of this machine. Supervised warm-up trains on the assistant's messages. Override it for demonstrations that
        are cheaper to make, or that err on purpose, as `rng` says: a model that has only seen perfect ones has little
        left to learn from rewards. It is called in any thread, but one call at a time. Where there are seats, it is
        the conversation of one of them.

        Args:
            task: what is solved.
            rng: of all that is left to chance, so that the same task and seed give the same demonstration.

        Raises:
            EnvironmentBugError: the environment's own code failed.
        """
        if (actions := self.gold_actions(task)) is None:
            return None
        from forge_env.gym.host import get_host

        host = get_host()
        # Not given back: sandboxes that are warm serve the next demonstration. The host closes them at exit.
        engine = host.borrow_engine("auto" if self.sandboxes is None else self.sandboxes.name)
        seats = host.run(_conversations(type(self)(self.config, sandboxes=engine), task, actions))
        return rng.choice(list(seats.values())) if len(seats) > 1 else next(iter(seats.values()))

    def resolve_task(self, seed: int | None, options: dict[str, Any] | None) -> Task:
        """The task that `reset(seed=..., options=...)` asks for.

        Args:
            seed: as of `reset`.
            options: as of `reset`.
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
                _check_signature(name, self.task, split, index)  # takes as long as making a simple task
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


# What an author's `task`, `reset` and `step` return, held to the contract: a wrong shape is named at once.
#
# Without this a text instead of a list of messages is shown letter by letter, and a NaN becomes a score.


async def checked_reset(env: Environment, task: Task, seed: int | None) -> ResetResult:
    """`env.reset` for a task. `EnvironmentBugError`: it failed, or returned something else than its contract says."""
    what = f"{type(env).__name__}.reset"
    async with limited_code(what, task.id, env.config.code_timeout_s):
        result = await _awaited(what, env.reset(seed=seed, options={"task": task}))
    if not isinstance(env.config, EnvironmentConfig):
        said = f"{what} made self.config a {type(env.config).__name__}"
        raise EnvironmentBugError(said, fix="that name is the platform's: use another")
    if not (isinstance(result, tuple) and len(result) == 2):
        raise EnvironmentBugError(f"{what} returned {_shown(result)}", fix="return (messages, info)")
    observation, info = result
    return as_observation(what, observation), _info(what, info)


async def checked_step(env: Environment, action: Message, task_id: str) -> StepResult:
    """`env.step`. `EnvironmentBugError`: it failed, or returned something else than its contract says."""
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
        if type(flag).__name__ not in ("bool", "bool_"):  # Python's, or numpy's by either of its names
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
    """Whose turn `info` says it is; "" where there is one agent. `EnvironmentBugError`: nobody's, or a stranger's."""
    seat = info.get("seat", "")
    if seat in env.seats or (not env.seats and isinstance(seat, str)):
        return seat  # type: ignore[no-any-return]  # seats are texts
    what = f"{type(env).__name__}.{method}"
    fix = f"put the seat that acts next into info, one of {', '.join(env.seats)}" if env.seats else "give a text"
    raise EnvironmentBugError(f"{what} gave the seat {_shown(seat)} on task {task_id!r}", fix=fix)


def checked_branch(env: Environment, info: dict[str, Any], task_id: str) -> Branch | None:
    """What `info` says of a conversation that begins as another did. `EnvironmentBugError`: it isn't a `Branch`."""
    if (told := info.get("branch")) is None:
        return None
    try:
        return _BRANCH.validate_python(told)
    except ValidationError as error:
        what = f"{type(env).__name__} gave {_shown(told)} as info['branch'] on task {task_id!r}"
        raise EnvironmentBugError(what, fix="give the fields of forge_env.types.Branch") from error


def checked_rewards(env: Environment, info: dict[str, Any], task_id: str) -> dict[str, float]:
    """What a step earned other seats. `EnvironmentBugError`: it isn't finite numbers for seats."""
    rewards = info["rewards"]
    try:
        found = {seat: float(reward) for seat, reward in rewards.items() if seat in env.seats}
        if len(found) == len(rewards) and math.isfinite(sum(found.values())):
            return found
    except (AttributeError, TypeError, ValueError, OverflowError):
        pass
    raise EnvironmentBugError(
        f"{type(env).__name__}.step gave {_shown(rewards)} as info['rewards'] on task {task_id!r}",
        fix="give finite numbers by seat, of those in `seats`",
    )


def checked_credits(env: Environment, names: Collection[str], task_id: str) -> dict[str, float]:
    """What conversations earned. `EnvironmentBugError`: it isn't finite numbers for conversations of these names."""
    with environment_code(f"{type(env).__name__}.credits", task_id):
        credits = env.credits()
    try:
        found = {name: float(credit) for name, credit in credits.items() if name in names}
        if len(found) == len(credits) and all(map(math.isfinite, found.values())):
            return found
    except (AttributeError, TypeError, ValueError, OverflowError):
        pass
    raise EnvironmentBugError(
        f"{type(env).__name__}.credits gave {_shown(credits)} on task {task_id!r}",
        fix=f"give finite numbers by conversation, of {', '.join(names) or 'those that there are: none'}",
    )


async def _conversations(env: Environment, task: Task, actions: Sequence[Action]) -> dict[str, list[Message]]:
    """The messages of an episode in which the agent says `actions`, up to the last one of them that is heard; by seat.

    Messages after a seat's last action are left out.
    """
    from forge_env.run.held_up import LoopGuard

    with LoopGuard(math.inf, 0.0, print, code_s=env.config.code_timeout_s):  # it tells nothing, and breaks off
        try:
            observation, info = await checked_reset(env, task, None)
            seat = checked_seat(env, "reset", info, task.id)
            said: dict[str, list[Message]] = {seat: []}
            for action in actions:
                message = as_message(action)
                said.setdefault(seat, []).extend([*observation, message])
                observation, _, terminated, truncated, info = await checked_step(env, message, task.id)
                if terminated or truncated:
                    break
                seat = checked_seat(env, "step", info, task.id)
            return said
        finally:
            await env.close()


def checked_demonstration(env: Environment, task: Task, rng: random.Random) -> list[Message] | None:
    """`env.demonstrate`. `EnvironmentBugError`: it failed, or does not end."""
    with environment_code(f"{type(env).__name__}.demonstrate", task.id, limit_s=env.config.code_timeout_s):
        return env.demonstrate(task, rng)


def as_observation(what: str, value: Any) -> Observation:
    """`value` as a list of messages. `EnvironmentBugError`: it is none; `what` is who gave it."""
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
