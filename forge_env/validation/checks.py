"""Checks of an environment without a model: what `forge-env validate` runs.

A check that exercised nothing is "open"; an environment with an open check is never called sound.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Literal

from forge_env.environment.base import API_VERSION, Environment
from forge_env.environment.sandbox_environment import TESTS_RESULTS
from forge_env.environment.tool_environment import ToolEnvironment
from forge_env.errors import ForgeError, UsageError, environment_code
from forge_env.policy import Policy
from forge_env.rollout.episode import EpisodeLimits, run_episode
from forge_env.rollout.scripted import GoldPolicy, RandomPolicy, ReplayPolicy
from forge_env.sandbox import TestsResult
from forge_env.tasks.splits import count_tasks, number_of_tasks
from forge_env.trajectory import Trajectory
from forge_env.types import Action, Observation, Task
from forge_env.validation import cheats
from forge_env.validation.leaks import (
    SHORTEST_TEXT,
    SearchPolicy,
    hidden_texts,
    hides_text,
    is_looked_for,
    shown_hidden,
)
from forge_env.visible import one_line

WRONG_ANSWERS = ("I don't know.", "0", "```python\npass\n```")
NUM_TASKS = 20
"""Default number of tasks of each split."""
CONCURRENCY = 4
"""Episodes at once: more of them only start more sandboxes."""
LIMITS = EpisodeLimits(max_turns=1000, wall_s=300.0)
"""An episode that takes longer has no end."""
GROUP_SIZE = 4
NUM_GROUPS = 3
NUM_CHEATED = 2
"""Tasks on which cheats are tried."""
_UNKNOWN = "the reward of a perfect episode is unknown: set max_reward"
_MOVES = {"turns", "invalid_actions"}
"""Metrics of games that count invalid actions."""
MOST_LUCK = 1e-3
"""Significance level: hits that are less probable by chance are a failure."""
MOST_SEARCHES = 16
"""Episodes in which one task's hidden data is looked for."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. "open": the check applies, but nothing exercised it; "note": it doesn't apply."""

    status: Literal["ok", "note", "open", "failed"]
    name: str
    detail: str


class Validator:
    """Runs every check on the first `num_tasks` tasks of each split."""

    def __init__(self, make_env: Callable[[], Environment], *, num_tasks: int = NUM_TASKS) -> None:
        if num_tasks < 1:
            raise UsageError("validation needs at least one task", fix="--tasks 1 or more")
        self.make_env = make_env
        self.num_tasks = num_tasks
        self.num_searched = min(num_tasks, 3)
        self.env = make_env()
        self.step_times: list[float] = []
        self.highest: tuple[float, str] | None = None
        """The highest reward, and its task."""
        self._results: list[TestsResult] = []
        """Of hidden tests."""
        self._random_episodes: list[Trajectory] = []
        self._under_way: dict[object, tuple[str, str, float]] = {}
        self._split_of: dict[str, str] = {}

    async def run(self) -> AsyncIterator[Check]:
        """Checks as they finish; later ones are left out when there are no tasks to play.

        Raises:
            ForgeError: an error that is not the environment's (no sandbox, for example).
        """
        yield self._version()
        shared = _shared_state(type(self.env))
        if nameless := [tool.name for tool in self.env.tools if not tool.description.strip()]:
            text = f"{', '.join(nameless)}: a docstring tells the model what a tool does"
            yield Check("note", "tools without a description", text)
        tasks: list[Task] = []
        counts = count_tasks(self.env)
        for split in self.env.splits:
            found, check = self._tasks(split) if split in counts else ([], Check("note", f"tasks of {split!r}", "none"))
            tasks += found
            yield check
        if missing := await self.env.unplayable(tasks):
            told = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
            yield Check("note", f"{len(missing)} can't be played here", told)
            tasks = [task for task in tasks if task.id not in missing]
        if not tasks:
            yield Check("failed", "tasks", "there are none")
            return
        for check_function in (self._determinism, self._gold, self._wrong, self._random):
            yield await check_function(tasks)
        if counted := [item.metrics for item in self._random_episodes if item.metrics.keys() >= _MOVES]:
            yield _moves(counted)
        yield self._nothing_shown(tasks)
        yield await self._search(tasks)
        yield await self._cheats(tasks)
        if self._results:
            yield self._apart()
        if _has_group_rewards(self.env):
            yield await self._groups(tasks)
        yield self._highest_reward()
        changed = [name for name, before in shared.items() if _shared_state(type(self.env))[name] != before]
        if changed:
            text = f"{', '.join(changed)} changed while episodes were played, and all of them share it: what belongs to"
            yield Check("note", "attributes of the class", f"{text} one episode is made in `setup`")
        yield self._cost()

    def longest_wait(self) -> tuple[str, str, float]:
        """`(task, what it waits for, seconds)` of the episode that has stood still longest; any thread may ask."""
        now = time.monotonic()
        waits = [(task, doing, now - since) for task, doing, since in list(self._under_way.values())]
        return max(waits, key=lambda wait: wait[2], default=("", "", 0.0))

    def _version(self) -> Check:
        ours = Environment.__module__.partition(".")[0]
        declared = [cls for cls in type(self.env).__mro__ if "api_version" in vars(cls)]
        if declared[0].__module__.partition(".")[0] == ours and not type(self.env).__module__.startswith(f"{ours}."):
            text = f"write `api_version = {API_VERSION}` into the class, so that a later forge-env knows what it is for"
            return Check("note", "API version", text)
        return Check("ok", "API version", str(self.env.api_version))

    def _tasks(self, split: str) -> tuple[list[Task], Check]:
        name = f"tasks of {split!r}"
        count = number_of_tasks(self.env, split)
        wanted = self.num_tasks if count is None else min(count, self.num_tasks)
        with environment_code(f"{type(self.env).__name__}.task", split):
            tasks = [self.env.resolve_task(None, {"split": split, "index": index}) for index in range(wanted)]
            if wanted == 1 and count != 1:  # one alone has no equal
                tasks.append(self.env.resolve_task(None, {"split": split, "index": 1}))
            twin = self.make_env()
            again = [twin.resolve_task(None, {"split": split, "index": index}) for index in range(len(tasks))]
        problems = list(_task_problems(split, tasks, again, self._split_of))
        if self.env.rubric is not None:
            reasons = ((task.id, self.env.rubric.unscorable(task)) for task in tasks)
            problems += [f"task {task_id!r} can't be scored: {reason}" for task_id, reason in reasons if reason]
        tasks = tasks[:wanted]
        if problems:
            return tasks, Check("failed", name, problems[0])
        if not tasks:
            return tasks, Check("note", name, "none")
        total = "endless" if count is None else str(count)
        return tasks, Check("ok", name, f"{total}; {len(tasks)} looked at: distinct ids, the same every time")

    async def _play(self, policy: Policy, tasks: Sequence[Task], *, seed: int = 0) -> list[Trajectory]:
        return await self._play_all([(policy, task) for task in tasks], seed=seed)

    async def _play_each(self, task: Task, scripts: Sequence[Sequence[Action]]) -> list[Trajectory]:
        return await self._play_all([(ReplayPolicy(actions), task) for actions in scripts])

    async def _play_all(self, episodes: Sequence[tuple[Policy, Task]], *, seed: int = 0) -> list[Trajectory]:
        gate = asyncio.Semaphore(CONCURRENCY)

        async def one(policy: Policy, task: Task) -> Trajectory:
            async with gate:
                key = object()

                def watch(doing: str) -> None:
                    self._under_way[key] = (task.id, doing, time.monotonic())

                try:
                    return await run_episode(self.make_env, policy, task=task, seed=seed, limits=LIMITS, watch=watch)
                finally:
                    self._under_way.pop(key, None)

        token = TESTS_RESULTS.set(self._results)
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(one(policy, task)) for policy, task in episodes]
        finally:
            TESTS_RESULTS.reset(token)
        done = [item.result() for item in running]
        seen = [(_best(item), item.task_id) for item in done]
        self.highest = max(seen if self.highest is None else [self.highest, *seen], default=None)
        self.step_times += [turn.step_s for trajectory in done for turn in trajectory.turns]
        for trajectory in done:
            if not trajectory.valid:
                raise ForgeError(f"task {trajectory.task_id!r} could not be played: {trajectory.error}")
            if trajectory.truncation == "time":
                raise ForgeError(f"task {trajectory.task_id!r} has not ended after {LIMITS.wall_s:g} s")
            if trajectory.truncated and len(trajectory.turns) >= (LIMITS.max_turns or 0):
                raise ForgeError(
                    f"task {trajectory.task_id!r} has not ended after {LIMITS.max_turns} turns",
                    fix="end it: truncate at config.max_turns",
                )
        return done

    async def _determinism(self, tasks: Sequence[Task]) -> Check:
        name = "same seed, same episode"
        for policy in (ReplayPolicy(), RandomPolicy()):
            first = await self._play(policy, tasks[:5])
            second = await self._play(policy, tasks[:5])
            for one, two in zip(first, second, strict=True):
                if not one.turns[0].observation and not self.env.seats:
                    return Check("failed", name, f"task {one.task_id!r} shows the agent nothing at the start")
                if _shown(one) != _shown(two):
                    return Check("failed", name, f"task {one.task_id!r} was shown differently the second time")
                if (one.reward, one.rewards) != (two.reward, two.rewards):
                    first_time, second_time = one.rewards or one.reward, two.rewards or two.reward
                    text = f"task {one.task_id!r} was scored {first_time} and then {second_time}"
                    return Check("failed", name, text)
        return Check("ok", name, f"{len(tasks[:5])} tasks played twice")

    async def _gold(self, tasks: Sequence[Task]) -> Check:
        name = "gold solutions score full marks"
        known = [task for task in tasks if self.env.gold_actions(task) is not None]
        if not known:
            return Check("open", name, "no task has one (set Task.gold, or override gold_actions)")
        played = await self._play(GoldPolicy(), known)
        if (full := self.env.max_reward) is None:
            return Check("open", name, f"{_UNKNOWN}; gold solutions score up to {max(map(_best, played)):g}")
        if low := [trajectory for trajectory in played if _best(trajectory) < full - 1e-9]:
            said = ": ".join([low[0].reason, *low[0].failures[:1]])
            why = f"; {one_line(said, 300)}" if said else ""
            first = f"task {low[0].task_id!r} scores {_best(low[0]):g} of {full:g}"
            return Check("failed", name, f"{len(low)} of {len(played)} don't: {first}{why}")
        acting = {turn.seat for trajectory in played for turn in trajectory.turns}
        if idle := [seat for seat in self.env.seats if seat not in acting]:
            return Check("failed", name, f"the seat {idle[0]!r} never acts in them: name it in info['seat']")
        if failing := _failing_call(played):
            return Check("note", name, f"{len(played)} of {len(played)}, but {failing}")
        by_seat = f", each seat's in turn: {', '.join(self.env.seats)}" if self.env.seats else ""
        return Check("ok", name, f"{len(played)} of {len(played)}{by_seat}")

    async def _wrong(self, tasks: Sequence[Task]) -> Check:
        name = "empty and wrong answers don't"
        if (full := self.env.max_reward) is None:
            return Check("open", name, _UNKNOWN)
        golds = {task.id: (task.gold or "").strip() for task in tasks if task.gold is not None}
        most, luck = 0, self.env.luck
        for answer in ("", *WRONG_ANSWERS):
            played = await self._play(ReplayPolicy([answer] * 100), tasks)
            paid = [item.task_id for item in played if item.reward >= full - 1e-9]
            paid = [task_id for task_id in paid if golds.get(task_id) != answer.strip()]  # where it is the right answer
            most = max(most, len(paid))
            if paid and _chance(len(paid), len(tasks), luck) < MOST_LUCK:
                text = f"task {paid[0]!r} gives full marks for {answer!r}"
                if len(paid) < len(tasks):
                    share = len(paid) / len(tasks)
                    text += f", as {len(paid)} of {len(tasks)} tasks do; if that is chance, declare it: luck={share:g}"
                return Check("failed", name, text)
        lucky = f", of which one answer solves {most} by chance (luck={luck:g})" if luck else ""
        return Check("ok", name, f"{1 + len(WRONG_ANSWERS)} answers to {len(tasks)} tasks{lucky}")

    async def _random(self, tasks: Sequence[Task]) -> Check:
        for seed, policy in enumerate((RandomPolicy(), RandomPolicy(legal=False), RandomPolicy(legal=False))):
            self._random_episodes += await self._play(policy, tasks, seed=seed)
        detail = f"{len(self._random_episodes)} episodes of random messages and tool calls"
        return Check("ok", "any output is answered", detail)

    def _nothing_shown(self, tasks: Sequence[Task]) -> Check:
        name = "the agent is shown no hidden data"
        if shown := shown_hidden(self._random_episodes, tasks):
            return Check("failed", name, shown)
        if not any(map(hides_text, tasks)):
            return Check("note", name, "tasks hide no text")
        looked_for = sum(map(is_looked_for, tasks))
        if not looked_for:
            return Check("open", name, f"no hidden text is as long as {SHORTEST_TEXT} characters: it occurs by chance")
        return Check("ok", name, f"looked for that of {looked_for} of {len(tasks)} tasks")

    async def _search(self, tasks: Sequence[Task]) -> Check:
        """With every tool, look through files, environment and processes, and try small numbers and every choice."""
        name = "hidden data can't be found with the tools"
        chosen = [task for task in tasks if hidden_texts(task)][: self.num_searched]
        if not chosen:
            if not (self.env.tools and any(map(hides_text, tasks))):
                return Check("note", name, "there is no tool to search with, or nothing hidden")
            return Check("open", name, f"no hidden text is as long as {SHORTEST_TEXT} characters")
        calls = 0
        for _ in range(MOST_SEARCHES):  # limits end an episode before everything is tried: the next one goes on
            played = await self._play(SearchPolicy(calls), chosen)
            if shown := shown_hidden(played, chosen):
                return Check("failed", name, shown)
            made = min(sum(len(turn.message.tool_calls) for turn in item.turns) for item in played)
            calls += made
            if not made:
                break
        if not calls:
            return Check("note", name, "there is no tool to search with")
        return Check("ok", name, f"{calls} calls that look through files, variables and processes")

    def _apart(self) -> Check:
        """Whether judged code could influence the verdicts of hidden tests."""
        name = "hidden tests are cheat-proof"
        doubted = [result for result in self._results if result.share and not result.cheat_proof]
        if doubted:
            text = f"{len(doubted)} of {len(self._results)} verdicts are not"
            return Check("open", name, f"{text}: {one_line(doubted[0].doubts[0], 200)}")
        return Check("ok", name, f"{len(self._results)} verdicts could not be influenced by the judged code")

    async def _cheats(self, tasks: Sequence[Task]) -> Check:
        """Hand in cheats where gold solutions hand in code: none may earn more than code that does nothing."""
        name = "cheats earn nothing"
        tried, looked_at = 0, 0
        for task in tasks:
            with environment_code(f"{type(self.env).__name__}.hand_in", task.id):
                found = cheats.submissions(self.env, task)
            if found is None:
                continue
            played = await self._play_each(task, [actions for _, actions in found])
            stub = played[0].reward
            for (cheat, _), trajectory in zip(found[1:], played[1:], strict=True):
                if trajectory.reward > stub + 1e-9:
                    text = f"task {task.id!r} gives {trajectory.reward:g} to the cheat {cheat!r}"
                    text = f"{text}, {stub:g} to code that does nothing: judge with run_tests or run_calls"
                    return Check("failed", name, text)
            tried, looked_at = tried + len(found) - 1, looked_at + 1
            if looked_at == NUM_CHEATED:
                break
        if not tried:
            text = "nothing to try: no gold solution hands in Python code (see gold_files)"
            return Check("open" if self._results else "note", name, text)
        return Check("ok", name, f"{tried} of them, on {looked_at} tasks")

    async def _groups(self, tasks: Sequence[Task]) -> Check:
        """Group functions run on groups of gold episodes; what they raise is raised, like that of other functions."""
        name = "group functions score groups"
        known = [task for task in tasks if self.env.gold_actions(task) is not None]
        chosen = (known or tasks)[:NUM_GROUPS]
        policy: Policy = GoldPolicy() if known else ReplayPolicy()
        for task in chosen:
            group = await self._play(policy, [task] * GROUP_SIZE)
            with environment_code(f"{type(self.env).__name__}.score_group", task.id):
                await self.env.score_group(task, group)
        return Check("ok", name, f"{len(chosen)} groups of {GROUP_SIZE} episodes")

    def _highest_reward(self) -> Check:
        """Before group functions, whose rewards are relative."""
        name, full = "no reward is above max_reward", self.env.max_reward
        if self.highest is None:
            return Check("note", name, "no episode was played")
        reward, task_id = self.highest
        if full is None:
            return Check("open", name, f"{_UNKNOWN}; the highest was {reward:g}")
        if reward > full + 1e-6:
            option = "max_reward" in type(self.env.config).model_fields
            fix = f"set the option max_reward={reward:g}" if option else "raise max_reward in the class"
            text = f"task {task_id!r} scored {reward:g} of {full:g}: {fix}, or lower the reward"
            return Check("failed", name, text)
        return Check("ok", name, f"the highest was {reward:g} of {full:g}")

    def _cost(self) -> Check:
        if not self.step_times:
            return Check("note", "cost of a step", "no step was taken")
        ordered = sorted(self.step_times)
        middle, high = statistics.median(ordered), ordered[int(0.95 * (len(ordered) - 1))]
        detail = f"median {1000 * middle:.2f} ms, 95 % under {1000 * high:.2f} ms, of {len(ordered)} steps"
        return Check("ok", "cost of a step", detail)


def _moves(counted: Sequence[Mapping[str, float]]) -> Check:
    """Whether a game that counts invalid actions accepted any action."""
    name = "valid actions are taken"
    turns = int(sum(metrics["turns"] for metrics in counted))
    taken = turns - int(sum(metrics["invalid_actions"] for metrics in counted))
    if not taken:
        return Check("open", name, f"none of {turns} random ones was: give legal ones in `random_action`")
    return Check("ok", name, f"{taken} of {turns} random ones")


def _chance(hits: int, count: int, luck: float) -> float:
    """Probability of at least so many hits among `count` tasks, if each is one with the probability `luck`."""
    return sum(math.comb(count, k) * luck**k * (1 - luck) ** (count - k) for k in range(hits, count + 1))


def _best(trajectory: Trajectory) -> float:
    """The reward, or that of the seat that earned most."""
    return max(trajectory.rewards.values(), default=trajectory.reward)


def _shown(trajectory: Trajectory) -> list[Observation]:
    """All that the agent was shown."""
    return [*(turn.observation for turn in trajectory.turns), trajectory.final_observation]


def _failing_call(played: Sequence[Trajectory]) -> str | None:
    """The first answer of a tool to a gold solution that says it called it wrongly."""
    for trajectory in played:
        for message in (message for shown in _shown(trajectory) for message in shown):
            if message.role == "tool" and message.content.startswith("Error: "):
                return f"a tool answers in task {trajectory.task_id!r}: {message.content.splitlines()[0][:160]}"
    return None


def _shared_state(cls: type) -> dict[str, list[object] | dict[object, object] | set[object]]:
    """Copies of the lists, dictionaries and sets that an author's class holds itself, by `Class.name`."""
    found: dict[str, list[object] | dict[object, object] | set[object]] = {}
    for base in cls.__mro__:
        if not base.__module__.startswith("forge_env."):
            for name, value in vars(base).items():
                if isinstance(value, list | dict | set) and not name.startswith("_"):
                    found[f"{base.__name__}.{name}"] = value.copy()
    return found


def _has_group_rewards(env: Environment) -> bool:
    if env.rubric is not None and env.rubric.scores_groups:
        return True
    return type(env).score_group not in (Environment.score_group, ToolEnvironment.score_group)


def _function_in(value: object) -> str | None:
    """Where in nested data there is a function, as one would write it in Python."""
    if isinstance(value, dict):
        items = [(f"[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"[{index}]", item) for index, item in enumerate(value)]
    else:
        return "" if isinstance(value, FunctionType | MethodType | BuiltinFunctionType) else None
    return next((place + rest for place, item in items if (rest := _function_in(item)) is not None), None)


def _task_problems(split: str, tasks: Sequence[Task], again: Sequence[Task], split_of: dict[str, str]) -> Iterator[str]:
    """`split_of`: the splits of the ids that were seen before; those of `tasks` are added."""
    for index, (task, twin) in enumerate(zip(tasks, again, strict=True)):
        if (other := split_of.setdefault(task.id, split)) != split:
            yield f"task {task.id!r} is also the id of one of {other!r}: put the split into the id"
        elif task.id in [task.id for task in tasks[:index]]:
            yield f"two tasks have the id {task.id!r}"
        if (place := _function_in(task.data)) is not None:
            yield f"task({split!r}, {index}).data{place} is a function, which can't be compared or recorded"
        elif wrong := _not_json(task):
            yield f"task {task.id!r} can't be written as JSON: {wrong}"
        elif task != twin:
            yield f"task({split!r}, {index}) is different in a second environment of the same seed"
        if task.split != split:
            yield f"task {task.id!r} says split={task.split!r}: set Task.split to the split it was asked for"
        if not task.prompt.strip():
            yield f"task {task.id!r} has an empty prompt"


def _not_json(task: Task) -> str:
    """What keeps a task from being recorded; such a thing (an array, say) may not be comparable either."""
    try:
        task.model_dump_json()
    except ValueError as error:
        return str(error)
    return ""


async def example_episode(make_env: Callable[[], Environment], split: str) -> Trajectory:
    """The gold solution of the first task played, or where there is none, an empty answer."""
    env = make_env()
    task = env.resolve_task(None, {"split": split, "index": 0})
    known = env.gold_actions(task) is not None
    return await run_episode(make_env, GoldPolicy() if known else ReplayPolicy(), task=task)
