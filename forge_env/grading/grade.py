"""Grading of an environment: does its judge reject wrong versions of the gold solutions?"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Any

from forge_env.concurrency import for_each
from forge_env.environment.base import Environment
from forge_env.environment.optional import HasRandomActions, gold_actions, gold_files, seats_of
from forge_env.environment.sandbox_environment import SandboxEnvironment
from forge_env.errors import EnvironmentBugError, InfrastructureError, UsageError, environment_code
from forge_env.grading.answers import mutants_of
from forge_env.grading.mutants import Mutant, evenly
from forge_env.grading.pieces import Piece, pieces
from forge_env.grading.probes import ENOUGH, Difference, Prober, Program, probes, raised_in
from forge_env.grading.results import Grade, TaskGrade, Tried
from forge_env.policy import Policy, PolicySession, Reply, estimated_tokens, words_of
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import GoldPolicy, ReplayPolicy, ReplaySession
from forge_env.sandbox import SandboxEngine
from forge_env.trajectory import Trajectory
from forge_env.types import Action, Message, Observation, Task, as_message
from forge_env.validation.cheats import defined_names
from forge_env.validation.checks import CONCURRENCY, LIMITS, NUM_TASKS, Validator

MUTANTS = 30
"""Default number of mutants of each task."""
REPEATS = 3
"""Number of times that each gold solution is judged."""
EPSILON = 1e-9


async def grade_environment(
    make_env: Callable[[], Environment],
    name: str,
    options: dict[str, Any],
    *,
    num_tasks: int = NUM_TASKS,
    mutants: int = MUTANTS,
    on_note: Callable[[str], object] = lambda text: None,
    on_task: Callable[[TaskGrade], object] = lambda task: None,
) -> Grade:
    """Make all checks of an environment, and grade the first tasks of each split.

    Args:
        on_note: called at the beginning with what can't be graded.
        on_task: called with each task's grade when it is complete.

    Raises:
        ForgeError: a check could not be made, or the environment has a bug.
    """
    begun, validator = time.monotonic(), Validator(make_env, num_tasks=num_tasks)
    grader = Grader(make_env, mutants=mutants, on_task=on_task)
    grade = Grade(name, options, validator.env.max_reward, rewards=validator.scores)
    noted = False
    async for check in validator.run():
        grade.checks.append(check)
        if validator.tasks and not noted:
            noted = True
            for text in doubts(validator.env, validator.tasks):
                on_note(text)
            grade.duplicates = list(duplicates(validator.tasks))
    grade.tasks, grade.tried = await grader.run(validator.tasks)
    grade.seconds = time.monotonic() - begun
    return grade


def doubts(env: Environment, tasks: Iterable[Task]) -> list[str]:
    """What can't be graded of an environment, or only with doubts."""
    texts = []
    if all(gold_actions(env, task) is None for task in tasks):
        texts.append(
            "no task has a gold solution, so there are no wrong versions of one; the checks are made all the same "
            "(set Task.gold, or define gold_actions)"
        )
    if isinstance(env, SandboxEnvironment) and any(env.spec_of(task).network for task in tasks):
        texts.append("its sandboxes use the network: a failed connection can look like a rejected solution")
    return texts


def duplicates(tasks: Iterable[Task]) -> Iterator[tuple[str, str]]:
    """Ids of tasks with the same prompt, apart from white space and case, and the same hidden data."""
    first: dict[tuple[str, str | None, str], str] = {}
    for task in tasks:
        data = json.dumps(task.data, sort_keys=True, default=repr)
        key = " ".join(task.prompt.lower().split()), task.gold, data
        if (other := first.setdefault(key, task.id)) != task.id:
            yield other, task.id


class Grader:
    """Makes mutants of gold solutions, and has them judged."""

    def __init__(
        self,
        make_env: Callable[[], Environment],
        *,
        mutants: int = MUTANTS,
        on_task: Callable[[TaskGrade], object] = lambda task: None,
    ) -> None:
        if mutants < 1:
            raise UsageError("a grade needs at least one mutant of a task", fix="use --mutants 1 or more")
        self._make_env = make_env
        self._env = make_env()
        self._mutants = mutants
        self._on_task = on_task
        self._tried: dict[int, list[Tried]] = {}
        self._graded: dict[int, TaskGrade] = {}

    async def run(self, tasks: Iterable[Task]) -> tuple[list[TaskGrade], list[Tried]]:
        """Grade tasks; return their grades and all mutants.

        Raises:
            EnvironmentBugError: the environment's code failed on a gold solution.
        """

        async def one(numbered: tuple[int, Task]) -> None:
            index, task = numbered
            self._graded[index] = TaskGrade(task.id, task.split)
            self._tried[index] = await self._grade(task, self._graded[index])
            self._graded[index].counts = dict(Counter(tried.verdict for tried in self._tried[index]))
            self._on_task(self._graded[index])

        await for_each(enumerate(tasks), one, limit=CONCURRENCY)
        tried = [one for index in sorted(self._tried) for one in self._tried[index]]
        return [self._graded[index] for index in sorted(self._graded)], tried

    async def _grade(self, task: Task, graded: TaskGrade) -> list[Tried]:
        with environment_code(f"{type(self._env).__name__}.gold_actions", task.id):
            known = gold_actions(self._env, task) is not None
        if not known:
            graded.note = "there is no gold solution"
            return []
        played = [await self._play(GoldPolicy(), task) for _ in range(REPEATS)]
        if lost := next((one for one in played if not one.valid), None):
            graded.note = f"its gold solution could not be judged: {lost.error}"
            return []
        graded.gold = [one.reward for one in played]
        graded.judging_s = median(one.wall_s for one in played)
        graded.tokens = sum(
            estimated_tokens(words_of(message))
            for turn in played[0].turns
            for message in (*turn.observation, turn.message)
        )
        full = self._env.max_reward
        if len(set(graded.gold)) > 1:
            graded.problem = f"its gold solution was scored {' and '.join(f'{x:g}' for x in sorted(set(graded.gold)))}"
        elif full is not None and graded.gold[0] < full - EPSILON:
            graded.problem = f"its gold solution scores {graded.gold[0]:g} of {full:g}"
        elif isinstance(self._env, HasRandomActions) or seats_of(self._env):
            graded.note = "other moves than those of the gold solution may win"
        return [] if graded.problem or graded.note else await self._mutate(task, graded)

    async def _play(self, policy: Policy, task: Task) -> Trajectory:
        return await run_episode(self._make_env, policy, task=task, seed=0, limits=LIMITS)

    async def _reward(self, actions: Sequence[Action], task: Task) -> float:
        """The reward of actions; NaN if the infrastructure failed, or the environment's code: a mutant may hang it."""
        try:
            played = await self._play(ReplayPolicy(actions), task)
        except EnvironmentBugError:
            return math.nan
        return played.reward if played.valid else math.nan

    async def _mutate(self, task: Task, graded: TaskGrade) -> list[Tried]:
        with environment_code(f"{type(self._env).__name__}.hand_in", task.id):
            parts = pieces(self._env, task)
        judged, full = list[Piece](), graded.gold[0]
        for piece in parts:
            looked_at = not await self._reward(piece.submit(piece.emptied), task) >= full - EPSILON  # NaN: unknown
            judged += [piece] if looked_at else []
            graded.unjudged += [] if looked_at else [piece.name]
        if not judged:
            graded.problem = "an emptied solution has the full reward" if parts else ""
            graded.note = "" if parts else "no part of the gold solution can be made wrong"
            return []
        drawn = [
            (piece, mutant)
            for piece in judged
            for mutant in await asyncio.to_thread(mutants_of, piece, most=self._mutants, seed=f"{task.id}/{piece.name}")
        ]
        if not drawn:
            graded.note = "no wrong version of the gold solution can be made"
        probers: dict[str, Prober] = {}
        chosen = evenly(drawn, task.id, lambda pair: pair[1].kind)[: self._mutants]
        return [await self._try(task, full, *pair, probers) for pair in chosen]

    async def _try(self, task: Task, full: float, piece: Piece, mutant: Mutant, probers: dict[str, Prober]) -> Tried:
        reward = await self._reward(piece.submit(mutant.text), task)
        tried = Tried(task.id, task.split, piece.name, mutant.kind, mutant.line, mutant.change, "rejected", reward)
        if math.isnan(reward):
            tried.verdict, tried.reward = "lost", 0.0
        elif reward >= full - EPSILON:
            tried.verdict, tried.text = "accepted", mutant.text
            try:
                await self._decide(task, piece, mutant, tried, probers)
            except (InfrastructureError, EnvironmentBugError) as error:
                tried.verdict, tried.note = "undecided", f"could not be tried: {error.message}"
        return tried

    async def _decide(self, task: Task, piece: Piece, mutant: Mutant, tried: Tried, probers: dict[str, Prober]) -> None:
        """Look for an input on which an accepted mutant differs from the gold solution."""
        if piece.kind == "shell":
            await self._compare_states(task, piece, mutant, tried)
        if piece.kind != "python" or self._env.sandboxes is None:
            return
        if piece.name not in probers:
            probers[piece.name] = self._prober(self._env.sandboxes, task, piece)
        prober = probers[piece.name]
        difference = await prober.difference(self._program(task, piece, mutant.text))
        if isinstance(difference, Difference):
            tried.test, tried.got = difference.test, difference.mutant
        elif difference >= ENOUGH:
            tried.verdict, tried.note = "equivalent", f"no difference on {difference} inputs"
        else:
            tried.verdict, tried.note = "undecided", f"only {difference} inputs could be tried"

    async def _compare_states(self, task: Task, piece: Piece, mutant: Mutant, tried: Tried) -> None:
        """Decide whether two commands do the same, by the files that they leave."""
        gold, other = [
            await state_after(self._make_env, task, piece.submit(text)) for text in (piece.text, mutant.text)
        ]
        if gold is None:
            tried.verdict, tried.note = "undecided", "another command may do the same"
        elif gold == other:
            tried.verdict, tried.note = "equivalent", "it leaves the same files"

    def _prober(self, engine: SandboxEngine, task: Task, piece: Piece) -> Prober:
        names = defined_names(piece.text)
        chosen = probes(task, names, piece.text, f"{task.id}/{piece.name}")
        spec = self._env.spec_of(task) if isinstance(self._env, SandboxEnvironment) else None
        return Prober(engine, spec, self._program(task, piece, piece.text), chosen, raised_in(piece.text))

    def _program(self, task: Task, piece: Piece, text: str) -> Program:
        files = dict(self._env.files(task)) if isinstance(self._env, SandboxEnvironment) else {}
        gold = gold_files(self._env, task)
        if gold is None:
            return Program(text, files)
        return Program("", {**files, **gold, piece.name: text})


# --- the files that a solution leaves: two commands that leave the same ones do the same

_LISTING = """{
find . -mindepth 1 -printf '%p %M %l\\n' | sort; find . -type f -exec sha256sum {} + 2>/dev/null | sort
} | sha256sum"""
"""Hash of the paths, modes, links and contents of the work folder: a list of them might be cut."""


async def state_after(make_env: Callable[[], Environment], task: Task, actions: Sequence[Action]) -> str | None:
    """Hash of the work folder before the last action; None if the earlier actions don't change it.

    Raises:
        InfrastructureError: the infrastructure failed, or the work folder can't be read.
        EnvironmentBugError: the environment's code failed.
    """
    policy = _Watching(actions)
    played = await run_episode(make_env, policy, task=task, seed=0, limits=LIMITS)
    if not played.valid or "" in policy.states:
        raise InfrastructureError(f"the work folder can't be read: {played.error or 'its listing failed'}")
    return policy.states[-1] if len(set(policy.states)) > 1 else None


class _Watching(ReplayPolicy):
    """Plays actions, and looks at the work folder before each."""

    def __init__(self, actions: Sequence[Action]) -> None:
        super().__init__(actions)
        self._actions = [as_message(action) for action in actions]
        self.states: list[str] = []

    def session_inside(self, env: Environment, task: Task, *, seed: int | None = None) -> PolicySession:
        return _WatchingSession(self._actions, env, self.states)


class _WatchingSession(ReplaySession):
    def __init__(self, messages: Sequence[Message], env: Environment, states: list[str]) -> None:
        super().__init__(messages)
        self._env, self._states = env, states

    async def reply(self, observation: Observation) -> Reply:
        """Look at the work folder, and return the next message."""
        if isinstance(self._env, SandboxEnvironment):
            try:
                result = await self._env.sandbox.exec(["sh", "-c", _LISTING])
                self._states.append(result.stdout if result.ok else "")
            except UsageError:  # it has been given back: the episode is being scored
                pass
        return await super().reply(observation)
