"""Rubrics: scoring of episodes.

    rubric = fe.Rubric([correct, concise], weights=[1.0, 0.1], metrics=[num_words])

A reward function is any callable, sync or async, that returns a number or a `Score`. Its parameters select its inputs
by name:

    completion  text of the agent's last message, or its submission
    target      `task.data["answer"]`, or else `task.gold`
    prompt      the task's prompt
    task        the `Task`, including hidden data
    messages    the whole conversation
    env         the environment (also as `self`, so that methods in a class body work unchanged)
    state       a dictionary shared by the reward functions of one episode

`response` and `answer` are other names of `completion`, and `info` of `state`. In other libraries `answer` is the
target: a function that takes `answer` beside `completion` or `response` is rejected.

A group function receives all episodes of one task at once (relative scores, diversity, tournaments) and returns one
number for each. Its parameters may be `task`, `trajectories`, `completions` (also as `answers`) and `rewards` (the
episodes' rewards so far). Training calls group functions for every group; an evaluation, whose episodes are
independent, doesn't.

A function that returns less than its maximum may explain why: with a `Score`, or with `forge_env.rewards.explain`.

An exception in a reward function is raised as an `EnvironmentBugError` that names function and task; it never counts
as a score of zero.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import dedent
from typing import TYPE_CHECKING, Any, Never

from forge_env.concurrency import gather_or_cancel, settled
from forge_env.errors import AgentError, EnvironmentBugError, UsageError, environment_code
from forge_env.reading import LARGEST_NUMBER, is_bounded
from forge_env.rewards.reasons import Explanation, Score, explain, explanation, keep_scores
from forge_env.trajectory import Trajectory
from forge_env.types import Message, Task
from forge_env.visible import shown

if TYPE_CHECKING:
    from forge_env.environment.base import Environment

LONGEST_SOURCE = 4_000
"""Maximum characters of each text in a reward's definition."""
INJECTED = (
    "completion", "target", "prompt", "task", "messages", "env", "self", "state", "response", "answer", "info",
)  # fmt: skip

SHOWN_TASKS = 5
"""Maximum number of tasks named in an error."""
TARGET_FIX = "correct or remove these rows; the target is data['answer'], otherwise gold"
INJECTED_GROUP = ("task", "trajectories", "completions", "answers", "rewards")

RewardFunction = Callable[..., Any]
"""`(...) -> float | Score`, or a coroutine function returning one."""


@dataclass(slots=True)
class RubricResult:
    """Result of scoring: `reward` is the weighted sum, `metrics` the unweighted value of each function by name.

    Examples:
        >>> import forge_env as fe
        >>> fe.RubricResult(1.1, {"exact": 1.0, "short": 1.0}).reward
        1.1
    """

    reward: float
    """Reward of the episode."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Name of the function -> its value."""


@dataclass(frozen=True, slots=True)
class _Scorer:
    name: str
    function: RewardFunction
    weight: float
    wanted: tuple[str, ...]
    is_async: bool

    async def __call__(self, values: Mapping[str, Any], task_id: str) -> tuple[float, Explanation]:
        with explanation() as why:
            value = await self.call(values, task_id)
        if isinstance(value, Score):
            with environment_code(f"reward function {self.name!r}", task_id):
                why.scores[self.name] = value.bounded()
        return self._number(value, task_id), why

    async def call(self, values: Mapping[str, Any], task_id: str) -> Any:
        with environment_code(f"reward function {self.name!r}", task_id):
            try:
                return await settled(self.function(**{name: values[name] for name in self.wanted}))
            except AgentError as error:  # raised by a judging policy, not by the agent
                raise EnvironmentBugError(f"reward function {self.name!r}: {error}") from error

    def numbers(self, value: Any, count: int, task_id: str) -> list[float]:
        if not isinstance(value, Sequence) or len(value) != count:
            raise EnvironmentBugError(
                f"group reward function {self.name!r} returned {shown(value)} on task {task_id!r}",
                fix=f"return one number for each of the {count} episodes",
            )
        return [self._number(item, task_id) for item in value]

    def _number(self, value: Any, task_id: str) -> float:
        number = _as_float(value)
        if not is_bounded(number):
            raise EnvironmentBugError(
                f"reward function {self.name!r} returned {shown(value)} on task {task_id!r}",
                fix=f"return a finite number of at most {LARGEST_NUMBER:g}, or an fe.Score with one",
            )
        return number


class Rubric:
    """Reward functions with weights, and metrics that are logged but not rewarded.

    Args:
        functions: one or several callables, sync or async, that return a number or a `Score`. They receive the inputs
            that their parameters name: `completion`, `target`, `prompt`, `task`, `messages`, `env`, `state`. Results
            are logged by the functions' names; to choose others, give a dictionary from name to function.
        weights: weight of each function; None: 1 each.
        metrics: functions that are logged but not rewarded, or a dictionary of them by name.
        group: functions that score all episodes of one task together, with their weights, or 1 each.
        others: names of other frameworks, which are refused with a hint.

    Raises:
        UsageError: there is no function, there are not as many weights as functions, or two have the same name.

    Examples:
        >>> import asyncio
        >>> import forge_env as fe
        >>> def short(completion):
        ...     return float(len(completion) < 10)
        >>> rubric = fe.Rubric([fe.rewards.ExactMatch(), short], weights=[1.0, 0.1])
        >>> task = fe.Task(id="0", prompt="What is 6 * 7?", gold="42")
        >>> asyncio.run(rubric.score(task=task, answer="42")).reward
        1.1
    """

    def __init__(
        self,
        functions: RewardFunction | Sequence[RewardFunction] | Mapping[str, RewardFunction] = (),
        weights: float | Sequence[float] | None = None,
        *,
        metrics: RewardFunction | Sequence[RewardFunction] | Mapping[str, RewardFunction] = (),
        group: RewardFunction | Sequence[RewardFunction] | Mapping[RewardFunction, float] = (),
        **others: Never,
    ) -> None:
        if others:
            fix = "write fe.Rubric([f, g], weights=[1.0, 0.5], metrics=[h], group=[k])"
            raise UsageError(f"fe.Rubric has no argument {next(iter(others))!r}", fix=fix)
        chosen, unweighted = _with_names(functions), _with_names(metrics)
        if weights is None or isinstance(weights, int | float):
            weights = [1.0] * len(chosen) if weights is None else [weights]
        if len(weights) != len(chosen):
            raise UsageError(
                f"a rubric has {len(chosen)} reward functions but {len(weights)} weights", fix="give one for each"
            )
        pairs = zip([*chosen, *unweighted], [*weights, *(0.0 for _ in unweighted)], strict=True)
        self._scorers = [_scorer(name, function, weight) for (name, function), weight in pairs]
        weighted = group.items() if isinstance(group, Mapping) else [(function, 1.0) for function in as_sequence(group)]
        self._group_scorers = [
            _scorer(name_of(function), function, weight, INJECTED_GROUP) for function, weight in weighted
        ]
        if not chosen and not self._group_scorers:
            raise UsageError(
                "a rubric without a reward function gives every episode 0",
                fix="give it one: fe.Rubric(correct); a metric alone earns nothing",
            )
        names = [scorer.name for scorer in [*self._scorers, *self._group_scorers]]
        if repeated := {name for name in names if names.count(name) > 1}:
            fix = 'rename one, or give names: fe.Rubric({"exact": f, "close": g})'
            raise UsageError(f"two reward functions are named {sorted(repeated)[0]!r}", fix=fix)

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each function by name; metrics have weight 0."""
        return {scorer.name: scorer.weight for scorer in [*self._scorers, *self._group_scorers]}

    def unscorable(self, task: Task) -> str | None:
        """Why a function can't score any answer to `task`, from its `check_target(target)`; None if all can.

        Args:
            task: the task with its hidden data.
        """
        for scorer in self._scorers:
            check = getattr(scorer.function, "check_target", None)
            if check is not None and (reason := check(target_of(task))) is not None:
                return str(reason)
        return None

    @property
    def scores_groups(self) -> bool:
        """Whether there are group functions."""
        return bool(self._group_scorers)

    async def score(
        self,
        *,
        task: Task,
        answer: str,
        messages: Sequence[Message] = (),
        env: Any = None,
        info: dict[str, Any] | None = None,
    ) -> RubricResult:
        """Score one finished episode; async functions run concurrently.

        Args:
            task: the task that was played.
            answer: the agent's submission, or its last message.
            messages: the conversation.
            env: the environment.
            info: a dictionary shared by the functions.

        Raises:
            EnvironmentBugError: a function raised an exception or did not return a finite number.
            InfrastructureError: raised by a function.
        """
        values: dict[str, Any] = {
            **dict.fromkeys(("completion", "response", "answer"), answer),
            **dict.fromkeys(("state", "info"), {} if info is None else info),
            **dict.fromkeys(("env", "self"), env),
            "target": target_of(task),
            "prompt": task.prompt,
            "task": task,
            "messages": messages,
        }
        if sum(scorer.is_async for scorer in self._scorers) < 2:  # nothing to run concurrently: create no tasks
            given = [await scorer(values, task.id) for scorer in self._scorers]
        else:
            given = await gather_or_cancel([scorer(values, task.id) for scorer in self._scorers])
        named = {scorer.name: number for scorer, (number, _) in zip(self._scorers, given, strict=True)}
        keep_scores({name: score for _, why in given for name, score in why.scores.items()})
        explained = [why for scorer, (_, why) in zip(self._scorers, given, strict=True) if scorer.weight and why.reason]
        if explained:  # the reason of the first function, and the failures of all
            explain(explained[0].reason, [line for why in explained for line in why.failures])
        reward = sum(scorer.weight * named[scorer.name] for scorer in self._scorers)
        return RubricResult(reward=float(reward), metrics=named)

    async def score_group(self, task: Task, trajectories: Sequence[Trajectory]) -> None:
        """Add the group functions' rewards and metrics to the episodes of one task; invalid episodes are left out.

        Args:
            task: the task that all episodes played.
            trajectories: episodes of the task.
        """
        valid = [trajectory for trajectory in trajectories if trajectory.valid]
        if not valid or not self._group_scorers:
            return
        completions = [answer_of(trajectory) for trajectory in valid]
        values = {
            "task": task,
            "trajectories": valid,
            "completions": completions,
            "answers": completions,
            "rewards": [trajectory.reward for trajectory in valid],
        }
        returned = await gather_or_cancel([scorer.call(values, task.id) for scorer in self._group_scorers])
        for scorer, value in zip(self._group_scorers, returned, strict=True):
            numbers = scorer.numbers(value, len(valid), task.id)
            for trajectory, number, given in zip(valid, numbers, value, strict=True):
                if isinstance(given, Score):
                    trajectory.scores[scorer.name] = given.bounded()
                trajectory.metrics[scorer.name] = number
                trajectory.reward += scorer.weight * number
                if trajectory.turns:
                    trajectory.turns[-1].reward += scorer.weight * number


def target_of(task: Task) -> Any:
    """The `target` argument of a task's reward functions."""
    return task.data.get("answer", task.gold)


CHECKED_TASKS = 4_096
"""Number of tasks whose targets are checked before any task is played, which takes seconds."""


def check_targets(environment: Environment, tasks: Iterable[Task]) -> None:
    """Raise `UsageError` if the rubric can't score some of the first `CHECKED_TASKS` tasks, whatever the answer."""
    rubric = environment.rubric
    if rubric is None or not any(hasattr(scorer.function, "check_target") for scorer in rubric._scorers):
        return
    checked = itertools.islice(tasks, CHECKED_TASKS)
    reasons = {task.id: reason for task in checked if (reason := rubric.unscorable(task)) is not None}
    if not reasons:
        return
    shown = "; ".join(f"{task_id}: {reason}" for task_id, reason in list(reasons.items())[:SHOWN_TASKS])
    more = f"; and {len(reasons) - SHOWN_TASKS} more" if len(reasons) > SHOWN_TASKS else ""
    count = "1 task" if len(reasons) == 1 else f"{len(reasons)} tasks"
    raise UsageError(f"{count} of {type(environment).__name__} can't be scored: {shown}{more}", fix=TARGET_FIX)


def answer_of(trajectory: Trajectory) -> str:
    """The `completion` argument for an episode's functions; the agent's last message if the record has no answer."""
    if trajectory.answer is not None:
        return trajectory.answer
    return trajectory.turns[-1].message.content if trajectory.turns else ""


def _as_float(value: Any) -> float:
    """Convert to a float; NaN for values that are not numbers, including texts."""
    try:
        if isinstance(value, str | bytes):
            return math.nan
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def reward_definition(environment: Environment) -> dict[str, Any]:
    """Describe how episodes are scored, for readers of a run's record; JSON-ready.

    Returns:
        `about`: the docstring of the environment; `max_reward`; `functions`: each function of its rubric with `name`,
        `weight` and `source`, if available; empty if the environment scores episodes without a rubric.
    """
    about, rubric = inspect.getdoc(type(environment)) or "", environment.rubric
    scorers = [] if rubric is None else [*rubric._scorers, *rubric._group_scorers]
    functions = [
        {"name": scorer.name, "weight": scorer.weight, "source": _source(scorer.function)} for scorer in scorers
    ]
    return {"about": about[:LONGEST_SOURCE], "max_reward": environment.max_reward, "functions": functions}


def _source(function: RewardFunction) -> str:
    try:
        source = inspect.getsource(inspect.unwrap(function))
    except (TypeError, OSError):  # a built-in, a callable object, or defined in an interactive interpreter
        source = inspect.getdoc(function) or ""
    return dedent(source)[:LONGEST_SOURCE]


def _with_names(
    functions: RewardFunction | Sequence[RewardFunction] | Mapping[str, RewardFunction],
) -> list[tuple[str, RewardFunction]]:
    if isinstance(functions, Mapping):
        return list(functions.items())
    return [(name_of(function), function) for function in as_sequence(functions)]


def as_sequence(functions: RewardFunction | Iterable[RewardFunction]) -> Sequence[RewardFunction]:
    """Return one or several functions as a sequence."""
    if isinstance(functions, str) or callable(functions) or not isinstance(functions, Iterable):
        return [functions]
    return list(functions)


def name_of(function: RewardFunction) -> str:
    """Return the name of a function, or of a callable object's class."""
    return getattr(function, "__name__", None) or type(function).__name__


def _scorer(name: str, function: RewardFunction, weight: float, injected: tuple[str, ...] = INJECTED) -> _Scorer:
    wanted = inputs_of("reward function", name, function, injected)
    if not math.isfinite(_as_float(weight)):
        raise UsageError(f"the weight {weight!r} of {name!r} is not valid", fix="give a finite number")
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return _Scorer(name, function, float(weight), wanted, is_async)


def inputs_of(kind: str, name: str, function: Any, known: Sequence[str]) -> tuple[str, ...]:
    """Return the names in `known` that a function takes as parameters; `**` takes all except `self`.

    Args:
        kind: kind of function, for error messages.

    Raises:
        UsageError: it is not a function, a parameter is unknown or positional-only, or it takes `answer` together with
            `completion` or `response`.
    """
    if isinstance(function, str):
        module, _, attribute = function.rpartition(":")
        fix = f"from {module} import {attribute}, and " if module else ""
        fix += f"pass the function {attribute}, without quotes"
        raise UsageError(f"{function!r} is a string, not a {kind}", fix=fix)
    if not callable(function):
        raise UsageError(f"{shown(function)} is not a {kind}", fix="give a function, or a list of them")
    if inspect.isclass(function):
        raise UsageError(f"{kind} {name!r} is a class", fix=f"write {function.__name__}()")
    label, hint = f"{kind} {name!r}", f"known: {', '.join(known)}"
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:  # some built-in functions
        fix = f"wrap it in a function with named parameters; {hint}"
        raise UsageError(f"the parameters of {label} have no names", fix=fix) from error
    if "answer" in parameters and (others := parameters.keys() & {"completion", "response"}) and "answer" in known:
        raise UsageError(
            f"{label} takes `{others.pop()}` and `answer`, which are both the agent's reply",
            fix="use `target` instead of `answer`: it is the task's answer, also from a column `answer`",
        )
    selected: list[str] = []
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            return tuple(key for key in known if key != "self")
        if name in known and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            mark = "/" if parameter.kind is parameter.POSITIONAL_ONLY else "*"
            fix = f"remove the `{mark}`: inputs are passed by name"
            raise UsageError(f"{label} takes `{name}` by position only", fix=fix)
        if name in known:
            selected.append(name)
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
            raise UsageError(f"{label} has an unknown parameter {name!r}", fix=hint)
    return tuple(selected)
