"""Checks of an environment without a model, as run by `forge-env validate`.

A check that could not exercise anything is "open"; an environment with an open check is never called sound.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from array import array
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Literal, overload

from forge_env.concurrency import for_each
from forge_env.environment.base import API_VERSION, Environment, resolve_task
from forge_env.environment.optional import gold_actions, luck_of, score_group, scores_groups, seats_of, unplayable
from forge_env.environment.sandbox_environment import TESTS_RESULTS
from forge_env.errors import ForgeError, UsageError, environment_code
from forge_env.policy import Policy
from forge_env.rollout.episode import EpisodeLimits, run_episode
from forge_env.rollout.scripted import GoldPolicy, RandomPolicy, ReplayPolicy
from forge_env.sandbox import TestsResult
from forge_env.tasks.splits import count_tasks, number_of_tasks
from forge_env.trajectory import Trajectory
from forge_env.types import Observation, Task
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
"""Concurrent episodes; more would only start more sandboxes."""
LIMITS = EpisodeLimits(max_turns=1000, wall_s=300.0)
"""Limits beyond which an episode counts as endless."""
GROUP_SIZE = 4
NUM_GROUPS = 3
NUM_CHEATED = 2
"""Number of tasks on which cheats are tried."""
_UNKNOWN = "the reward of a perfect episode is unknown: set max_reward"
UNPLAYABLE = "can't be played here"
"""End of the name of the check that lists tasks that can't be run on this machine."""
_MOVES = {"turns", "invalid_actions"}
"""Metrics of games that count invalid actions."""
MOST_LUCK = 1e-3
"""Significance level: the check fails if the number of hits is less probable by chance."""
MOST_SEARCHES = 16
"""Maximum episodes that search for one task's hidden data."""
REMEMBERED = 1_000
"""Maximum tasks kept in memory; others are made again when they are played."""


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check. "open": the check applies, but nothing exercised it; "note": it doesn't apply."""

    status: Literal["ok", "note", "open", "failed"]
    name: str
    detail: str


class TaskRange(Sequence[Task]):
    """The first tasks of some splits, made on access."""

    def __init__(self, env: Environment, counts: Mapping[str, int], left_out: Collection[str] = ()) -> None:
        self._counts = counts
        self._left_out = left_out
        self._task = lru_cache(maxsize=REMEMBERED)(
            lambda split, index: resolve_task(env, None, {"split": split, "index": index})
        )

    def __len__(self) -> int:
        return sum(self._counts.values()) - len(self._left_out)

    def __iter__(self) -> Iterator[Task]:
        for split, count in self._counts.items():
            for index in range(count):
                if (task := self._task(split, index)).id not in self._left_out:
                    yield task

    @overload
    def __getitem__(self, place: int) -> Task: ...
    @overload
    def __getitem__(self, place: slice) -> list[Task]: ...
    def __getitem__(self, place: int | slice) -> Task | list[Task]:
        if isinstance(place, slice):
            return list(itertools.islice(self, *place.indices(len(self))))
        return next(itertools.islice(self, range(len(self))[place], None))


class FirstProblem:
    """Problem of the first episode with one in the order of episodes, regardless of the order in which they end."""

    def __init__(self) -> None:
        self.place, self.text = -1, ""
        self.count = 0
        """Number of episodes with a problem."""

    def add(self, place: int, text: str | None) -> None:
        """Record an episode's problem; None: it has none."""
        if text is None:
            return
        self.count += 1
        if self.place < 0 or place < self.place:
            self.place, self.text = place, text


Look = Callable[[int, Task, Trajectory], object]
"""Called at the end of an episode with its index, task and trajectory."""


class Validator:
    """Run all checks on the first `num_tasks` tasks of each split."""

    def __init__(self, make_env: Callable[[], Environment], *, num_tasks: int = NUM_TASKS) -> None:
        if num_tasks < 1:
            raise UsageError("validation needs at least one task", fix="use --num-tasks 1 or more")
        self.make_env = make_env
        self.num_tasks = num_tasks
        self.num_searched = min(num_tasks, 3)
        self.env = make_env()
        self.step_times: array[float] = array("d")
        self.tasks: Sequence[Task] = ()
        """The tasks that are played; known after the checks of the splits."""
        self.scores: dict[str, list[tuple[str, float]]] = {}
        """Task and reward of every episode of the policies `gold`, `empty` and `random`."""
        self.highest: tuple[float, str] | None = None
        """Highest reward and the id of its task."""
        self._results: list[TestsResult] = []
        """Results of hidden tests since the last episode ended."""
        self._verdicts = 0
        """Number of verdicts of hidden tests in all episodes."""
        self._doubts = FirstProblem()
        """Verdicts that the judged code could have influenced."""
        self._under_way: dict[object, tuple[str, str, float]] = {}
        self._split_of: dict[str, str] = {}

    async def run(self) -> AsyncIterator[Check]:
        """Yield checks as they finish; if there are no tasks to play, the later ones are skipped.

        Raises:
            ForgeError: an error not caused by the environment, such as a missing sandbox.
        """
        yield self._version()
        shared = _shared_state(type(self.env))
        if nameless := [tool.name for tool in self.env.tools if not tool.description.strip()]:
            text = f"{', '.join(nameless)}: a docstring tells the model what a tool does"
            yield Check("note", "tools without a description", text)
        wanted: dict[str, int] = {}
        counts = count_tasks(self.env)
        for split in self.env.splits:
            if split in counts:
                wanted[split], check = await self._tasks(split)
                yield check
            else:
                yield Check("note", f"tasks of {split!r}", "none")
        tasks = TaskRange(self.env, wanted)
        if missing := await unplayable(self.env, tasks):
            reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
            yield Check("note", f"{len(missing)} {UNPLAYABLE}", reasons)
            tasks = TaskRange(self.env, wanted, {task.id for task in tasks if task.id in missing})
        if not tasks:
            yield Check("failed", "tasks", "there are none")
            return
        self.tasks = tasks
        for check_function in (self._determinism, self._gold, self._wrong):
            yield await check_function(tasks)
        for check in await self._random(tasks):
            yield check
        yield await self._search(tasks)
        yield await self._cheats(tasks)
        if self._verdicts:
            yield self._apart()
        if scores_groups(self.env):
            yield await self._groups(tasks)
        yield self._highest_reward()
        changed = [name for name, before in shared.items() if _shared_state(type(self.env))[name] != before]
        if changed:
            text = f"{', '.join(changed)} changed during episodes, which all share it: create the state of"
            yield Check("note", "attributes of the class", f"{text} an episode in `setup`")
        yield self._cost()

    def longest_wait(self) -> tuple[str, str, float]:
        """`(task id, activity, seconds)` of the episode whose activity has not changed for longest. Thread-safe."""
        now = time.monotonic()
        waits = [(task, doing, now - since) for task, doing, since in list(self._under_way.values())]
        return max(waits, key=lambda wait: wait[2], default=("", "", 0.0))

    def _version(self) -> Check:
        ours = Environment.__module__.partition(".")[0]
        declared = [cls for cls in type(self.env).__mro__ if "api_version" in vars(cls)]
        if declared[0].__module__.partition(".")[0] == ours and not type(self.env).__module__.startswith(f"{ours}."):
            text = (
                f"write `api_version = {API_VERSION}` into the class, so that later versions of forge-env can check it"
            )
            return Check("note", "API version", text)
        return Check("ok", "API version", str(self.env.api_version))

    async def _tasks(self, split: str) -> tuple[int, Check]:
        """Return the number of tasks of a split to play, and a check that reports the first task with a problem."""
        name = f"tasks of {split!r}"
        count = number_of_tasks(self.env, split)
        wanted = self.num_tasks if count is None else min(count, self.num_tasks)
        looked_at = 2 if wanted == 1 and count != 1 else wanted  # with a single task, duplicate ids would go unnoticed
        twin, problems = self.make_env(), FirstProblem()

        async def look(index: int) -> None:
            options = {"split": split, "index": index}
            with environment_code(f"{type(self.env).__name__}.task", split):
                task, again = resolve_task(self.env, None, options), resolve_task(twin, None, options)
            problems.add(index, next(self._problems_of(split, index, task, again), None))

        await for_each(range(looked_at), look, limit=CONCURRENCY)
        if problems.count:
            return wanted, Check("failed", name, problems.text)
        if not wanted:
            return 0, Check("note", name, "none")
        total = "endless" if count is None else str(count)
        return wanted, Check("ok", name, f"{total}; {wanted} checked: ids are unique and the same every time")

    def _problems_of(self, split: str, index: int, task: Task, twin: Task) -> Iterator[str]:
        if (other := self._split_of.get(task.id)) is None:
            self._split_of[task.id] = split
        elif other == split:
            yield f"two tasks have the id {task.id!r}"
        else:
            yield f"task {task.id!r} is also the id of one of {other!r}: put the split into the id"
        yield from _task_problems(split, index, task, twin)
        if self.env.rubric is not None and (reason := self.env.rubric.unscorable(task)):
            yield f"task {task.id!r} can't be scored: {reason}"

    async def _played(self, *episodes: tuple[Policy, Task]) -> list[Trajectory]:
        """Play a few episodes; return their trajectories in order."""
        played: dict[int, Trajectory] = {}
        await self._play(episodes, lambda place, task, trajectory: played.update({place: trajectory}))
        return [played[place] for place in range(len(episodes))]

    async def _play(self, episodes: Iterable[tuple[Policy, Task]], look: Look, *, seed: int = 0) -> None:
        async def one(episode: tuple[int, tuple[Policy, Task]]) -> None:
            place, (policy, task) = episode
            key = object()

            def watch(doing: str) -> None:
                self._under_way[key] = (task.id, doing, time.monotonic())

            try:
                played = await run_episode(self.make_env, policy, task=task, seed=seed, limits=LIMITS, watch=watch)
            finally:
                self._under_way.pop(key, None)
            self._note(played)
            look(place, task, played)

        token = TESTS_RESULTS.set(self._results)
        try:
            await for_each(enumerate(episodes), one, limit=CONCURRENCY)
        finally:
            TESTS_RESULTS.reset(token)

    def _note(self, trajectory: Trajectory) -> None:
        """Record an episode's results. `ForgeError`: it did not finish."""
        seen = _best(trajectory), trajectory.task_id
        self.highest = seen if self.highest is None else max(seen, self.highest)
        self.step_times.extend(turn.step_s for turn in trajectory.turns)
        for result in self._results:
            self._verdicts += 1
            if result.share and not result.cheat_proof:
                self._doubts.add(self._verdicts, result.doubts[0])
        self._results.clear()
        if not trajectory.valid:
            raise ForgeError(f"task {trajectory.task_id!r} could not be played: {trajectory.error}")
        if trajectory.truncation == "time":
            raise ForgeError(f"task {trajectory.task_id!r} has not ended after {LIMITS.wall_s:g} s")
        if trajectory.truncated and len(trajectory.turns) >= (LIMITS.max_turns or 0):
            raise ForgeError(
                f"task {trajectory.task_id!r} has not ended after {LIMITS.max_turns} turns",
                fix="end it: truncate at config.max_turns",
            )

    def _score(self, policy: str, task: Task, played: Trajectory) -> None:
        self.scores.setdefault(policy, []).append((task.id, _best(played)))

    async def _determinism(self, tasks: Sequence[Task]) -> Check:
        name, first_tasks = "same seed, same episode", tasks[:5]
        for policy in (ReplayPolicy(), RandomPolicy()):
            first, second = [await self._played(*((policy, task) for task in first_tasks)) for _ in range(2)]
            for one, two in zip(first, second, strict=True):
                if not one.turns[0].observation and not seats_of(self.env):
                    return Check("failed", name, f"task {one.task_id!r} shows the agent nothing at the start")
                if _shown(one) != _shown(two):
                    return Check("failed", name, f"task {one.task_id!r} was shown differently the second time")
                if (one.reward, one.rewards) != (two.reward, two.rewards):
                    first_time, second_time = one.rewards or one.reward, two.rewards or two.reward
                    text = f"task {one.task_id!r} was scored {first_time} and then {second_time}"
                    return Check("failed", name, text)
        return Check("ok", name, f"{len(first_tasks)} tasks played twice")

    async def _gold(self, tasks: Sequence[Task]) -> Check:
        name, full = "gold solutions score full marks", self.env.max_reward
        number, best, acting = 0, -math.inf, set[str]()
        low, failing = FirstProblem(), FirstProblem()

        def look(place: int, task: Task, played: Trajectory) -> None:
            nonlocal number, best
            number, best = number + 1, max(best, _best(played))
            self._score("gold", task, played)
            acting.update(turn.seat for turn in played.turns)
            failing.add(place, _failing_call(played))
            if full is not None and _best(played) < full - 1e-9:
                notes = ": ".join([played.reason, *played.failures[:1]])
                why = f"; {one_line(notes, 300)}" if notes else ""
                low.add(place, f"task {played.task_id!r} scores {_best(played):g} of {full:g}{why}")

        known = (task for task in tasks if gold_actions(self.env, task) is not None)
        await self._play(((GoldPolicy(), task) for task in known), look)
        if not number:
            return Check("open", name, "no task has one (set Task.gold, or define gold_actions)")
        if full is None:
            return Check("open", name, f"{_UNKNOWN}; gold solutions score up to {best:g}")
        if low.count:
            return Check("failed", name, f"{low.count} of {number} don't: {low.text}")
        if idle := [seat for seat in seats_of(self.env) if seat not in acting]:
            return Check("failed", name, f"the seat {idle[0]!r} never acts in them: name it in info['seat']")
        if failing.count:
            return Check("note", name, f"{number} of {number}, but {failing.text}")
        seats = seats_of(self.env)
        by_seat = f", each seat's in turn: {', '.join(seats)}" if seats else ""
        return Check("ok", name, f"{number} of {number}{by_seat}")

    async def _wrong(self, tasks: Sequence[Task]) -> Check:
        name = "empty and wrong answers score below maximum"
        if (full := self.env.max_reward) is None:
            return Check("open", name, _UNKNOWN)
        most, luck = 0, luck_of(self.env)
        for answer in ("", *WRONG_ANSWERS):
            paid = FirstProblem()

            def look(
                place: int, task: Task, played: Trajectory, answer: str = answer, paid: FirstProblem = paid
            ) -> None:
                if not answer:
                    self._score("empty", task, played)
                is_right = task.gold is not None and task.gold.strip() == answer.strip()
                if played.reward >= full - 1e-9 and not is_right:
                    paid.add(place, f"task {task.id!r} gives full marks for {answer!r}")

            policy = ReplayPolicy([answer] * 100)
            await self._play(((policy, task) for task in tasks), look)
            most = max(most, paid.count)
            if paid.count and _chance(paid.count, len(tasks), luck) < MOST_LUCK:
                text = paid.text
                if paid.count < len(tasks):
                    share = paid.count / len(tasks)
                    text += f", as {paid.count} of {len(tasks)} tasks do; if that is chance, declare it: luck={share:g}"
                return Check("failed", name, text)
        lucky = f", of which one answer solves {most} by chance (luck={luck:g})" if luck else ""
        return Check("ok", name, f"{1 + len(WRONG_ANSWERS)} answers to {len(tasks)} tasks{lucky}")

    async def _random(self, tasks: Sequence[Task]) -> list[Check]:
        """Play random messages and tool calls; check that they are answered and accepted, and reveal no hidden data."""
        number, moves, invalid, counted = 0, 0, 0, False
        shown = FirstProblem()

        def look(place: int, task: Task, played: Trajectory) -> None:
            nonlocal number, moves, invalid, counted
            number += 1
            if number <= len(tasks):
                self._score("random", task, played)
            shown.add(place, shown_hidden(played, task))
            if played.metrics.keys() >= _MOVES:
                counted = True
                moves += int(played.metrics["turns"])
                invalid += int(played.metrics["invalid_actions"])

        for seed, legal in enumerate((True, False, False)):
            await self._play(((RandomPolicy(legal=legal), task) for task in tasks), look, seed=seed)
        detail = f"{number} episodes of random messages and tool calls"
        answered = Check("ok", "any output is answered", detail)
        taken = Check("ok", "valid actions are accepted", f"{moves - invalid} of {moves} random ones")
        if moves == invalid:
            text = f"none of {moves} random ones was: give legal ones in `random_action`"
            taken = Check("open", "valid actions are accepted", text)
        return [answered, *([taken] if counted else []), _nothing_shown(tasks, shown)]

    async def _search(self, tasks: Sequence[Task]) -> Check:
        """Search files, variables and processes with every tool, and try small numbers and all choices."""
        name = "hidden data can't be found with the tools"
        chosen = list(itertools.islice((task for task in tasks if hidden_texts(task)), self.num_searched))
        if not chosen:
            if not (self.env.tools and any(map(hides_text, tasks))):
                return Check("note", name, "there is no tool to search with, or nothing hidden")
            return Check("open", name, f"no hidden text is as long as {SHORTEST_TEXT} characters")
        calls = 0
        for _ in range(MOST_SEARCHES):  # limits may end an episode before all calls are made: continue in the next one
            played = await self._played(*((SearchPolicy(calls), task) for task in chosen))
            for trajectory, task in zip(played, chosen, strict=True):
                if shown := shown_hidden(trajectory, task):
                    return Check("failed", name, shown)
            made = min(sum(len(turn.message.tool_calls) for turn in item.turns) for item in played)
            calls += made
            if not made:
                break
        if not calls:
            return Check("note", name, "there is no tool to search with")
        return Check("ok", name, f"{calls} calls that look through files, variables and processes")

    def _apart(self) -> Check:
        """Check that judged code could not influence the verdicts of hidden tests."""
        name = "hidden tests are cheat-proof"
        if self._doubts.count:
            text = f"{self._doubts.count} of {self._verdicts} verdicts are not"
            return Check("open", name, f"{text}: {one_line(self._doubts.text, 200)}")
        return Check("ok", name, f"{self._verdicts} verdicts could not be influenced by the judged code")

    async def _cheats(self, tasks: Sequence[Task]) -> Check:
        """Submit cheats in place of gold solutions with code; none may earn more than code that does nothing."""
        name = "cheats earn nothing"
        tried, looked_at = 0, 0
        for task in tasks:
            with environment_code(f"{type(self.env).__name__}.hand_in", task.id):
                submissions = cheats.submissions(self.env, task)
            if submissions is None:
                continue
            played = await self._played(*((ReplayPolicy(actions), task) for _, actions in submissions))
            stub = played[0].reward
            for (cheat, _), trajectory in zip(submissions[1:], played[1:], strict=True):
                if trajectory.reward > stub + 1e-9:
                    text = f"task {task.id!r} gives {trajectory.reward:g} to the cheat {cheat!r}"
                    text = f"{text}, {stub:g} to code that does nothing: judge with run_tests or run_calls"
                    return Check("failed", name, text)
            tried, looked_at = tried + len(submissions) - 1, looked_at + 1
            if looked_at == NUM_CHEATED:
                break
        if not tried:
            text = "nothing to try: no gold solution submits Python code (see gold_files)"
            return Check("open" if self._verdicts else "note", name, text)
        return Check("ok", name, f"{tried} of them, on {looked_at} tasks")

    async def _groups(self, tasks: Sequence[Task]) -> Check:
        """Run group functions on groups of gold episodes; their exceptions propagate."""
        name = "group functions score groups"
        known = list(itertools.islice((task for task in tasks if gold_actions(self.env, task) is not None), NUM_GROUPS))
        chosen = known or tasks[:NUM_GROUPS]
        policy: Policy = GoldPolicy() if known else ReplayPolicy()
        for task in chosen:
            group = await self._played(*[(policy, task)] * GROUP_SIZE)
            await score_group(self.env, task, group)
        return Check("ok", name, f"{len(chosen)} groups of {GROUP_SIZE} episodes")

    def _highest_reward(self) -> Check:
        """Check the highest reward before group functions, whose rewards are relative."""
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


def _nothing_shown(tasks: Iterable[Task], shown: FirstProblem) -> Check:
    name = "the agent is shown no hidden data"
    if shown.count:
        return Check("failed", name, shown.text)
    number = hiding = looked_for = 0
    for task in tasks:
        number, hiding, looked_for = number + 1, hiding + hides_text(task), looked_for + is_looked_for(task)
    if not hiding:
        return Check("note", name, "tasks hide no text")
    if not looked_for:
        return Check("open", name, f"no hidden text is as long as {SHORTEST_TEXT} characters: it occurs by chance")
    return Check("ok", name, f"checked {looked_for} of {number} tasks")


def _chance(hits: int, count: int, luck: float) -> float:
    """Probability of at least `hits` hits among `count` tasks, each with probability `luck`."""
    if not 0 < luck < 1:
        return float(hits <= count * luck)

    def log_of(k: int) -> float:
        ways = math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
        return ways + k * math.log(luck) + (count - k) * math.log1p(-luck)

    return math.fsum(math.exp(log_of(k)) for k in range(hits, count + 1))


def _best(trajectory: Trajectory) -> float:
    """The reward, or the highest reward of a seat."""
    return max(trajectory.rewards.values(), default=trajectory.reward)


def _shown(trajectory: Trajectory) -> list[Observation]:
    """All observations shown to the agent."""
    return [*(turn.observation for turn in trajectory.turns), trajectory.final_observation]


def _failing_call(played: Trajectory) -> str | None:
    """Describe the first tool error in an episode of a gold solution, or return None."""
    for message in (message for shown in _shown(played) for message in shown):
        if message.role == "tool" and message.content.startswith("Error: "):
            return f"a tool answers in task {played.task_id!r}: {message.content.splitlines()[0][:160]}"
    return None


def _shared_state(cls: type) -> dict[str, list[object] | dict[object, object] | set[object]]:
    """Copies of the lists, dictionaries and sets that are public attributes of an author's classes, by `Class.name`."""
    state: dict[str, list[object] | dict[object, object] | set[object]] = {}
    for base in cls.__mro__:
        if not base.__module__.startswith("forge_env."):
            for name, value in vars(base).items():
                if isinstance(value, list | dict | set) and not name.startswith("_"):
                    state[f"{base.__name__}.{name}"] = value.copy()
    return state


def _function_in(value: object) -> str | None:
    """Location of a function in nested data as a Python subscript expression, or None."""
    if isinstance(value, dict):
        items = [(f"[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"[{index}]", item) for index, item in enumerate(value)]
    else:
        return "" if isinstance(value, FunctionType | MethodType | BuiltinFunctionType) else None
    return next((position + rest for position, item in items if (rest := _function_in(item)) is not None), None)


def _task_problems(split: str, index: int, task: Task, twin: Task) -> Iterator[str]:
    if (position := _function_in(task.data)) is not None:
        yield f"task({split!r}, {index}).data{position} is a function, which can't be compared or recorded"
    elif wrong := _not_json(task):
        yield f"task {task.id!r} can't be written as JSON: {wrong}"
    elif task != twin:
        yield f"task({split!r}, {index}) is different in a second environment of the same seed"
    if task.split != split:
        yield f"task {task.id!r} says split={task.split!r}: set Task.split to the requested split"
    if not task.prompt.strip():
        yield f"task {task.id!r} has an empty prompt"


def _not_json(task: Task) -> str:
    """Why a task can't be written as JSON, or ""; such data (an array, say) may not be comparable either."""
    try:
        task.model_dump_json()
    except ValueError as error:
        return str(error)
    return ""


async def example_episode(make_env: Callable[[], Environment], split: str) -> Trajectory:
    """Play the first task of a split with its gold solution, or with an empty answer if there is none."""
    env = make_env()
    task = resolve_task(env, None, {"split": split, "index": 0})
    known = gold_actions(env, task) is not None
    return await run_episode(make_env, GoldPolicy() if known else ReplayPolicy(), task=task)
