"""Grading of an environment: does its judge reject wrong versions of the gold solutions?"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from forge_env.concurrency import for_each
from forge_env.environment.base import Environment
from forge_env.environment.optional import HasRandomActions, gold_actions, gold_files, seats_of
from forge_env.environment.sandbox_environment import SandboxEnvironment
from forge_env.errors import EnvironmentBugError, ForgeError, UsageError, environment_code
from forge_env.evaluation.estimates import Estimate, by_task, mean, share_of
from forge_env.grading.answers import mutants_of
from forge_env.grading.mutants import Mutant, evenly
from forge_env.grading.pieces import Piece, pieces
from forge_env.grading.probes import ENOUGH, Prober, Program, probes, raised_in
from forge_env.grading.recorded import Recorded
from forge_env.grading.states import state_after
from forge_env.policy import Policy, estimated_tokens, words_of
from forge_env.rollout.episode import run_episode
from forge_env.rollout.scripted import GoldPolicy, ReplayPolicy
from forge_env.sandbox import SandboxEngine
from forge_env.schema import with_schema
from forge_env.trajectory import Trajectory
from forge_env.types import Action, Task
from forge_env.validation.cheats import defined_names
from forge_env.validation.checks import CONCURRENCY, LIMITS, NUM_TASKS, Check, Validator

MUTANTS = 30
"""Default number of mutants of each task."""
REPEATS = 3
"""Number of times that each gold solution is judged."""
EPSILON = 1e-9
Verdict = Literal["rejected", "accepted", "undecided", "equivalent", "lost"]


@dataclass(slots=True)
class Tried:
    """A mutant and what the judge made of it."""

    task: str
    split: str
    piece: str
    kind: str
    line: int
    change: str
    verdict: Verdict
    """"accepted": it has the full reward, and differs from the gold solution. "undecided": it has the full reward, and
    it is unknown whether it differs. "equivalent": no difference was seen. "lost": the infrastructure or the
    environment's code failed."""
    reward: float
    test: str = ""
    """A test that fails on it and passes on the gold solution."""
    got: str = ""
    """What the mutant gives in that test."""
    note: str = ""
    text: str = ""
    """The mutant, if it has the full reward."""


@dataclass(slots=True)
class TaskGrade:
    """The grade of one task."""

    id: str
    split: str
    gold: list[float] = field(default_factory=list)
    """Rewards of the gold solution, every time the same unless the judge is flaky."""
    problem: str = ""
    """What is wrong with it, so that no mutants of it are judged."""
    note: str = ""
    """Why mutants of it can't be made or judged."""
    unjudged: list[str] = field(default_factory=list)
    """Pieces of the gold solution that the judge doesn't look at: without them the reward is full."""
    counts: dict[Verdict, int] = field(default_factory=dict)
    judging_s: float = 0.0
    """Seconds of an episode with the gold solution, median."""
    tokens: int = 0
    """Estimated length of that episode's messages."""


@dataclass(slots=True)
class Grade:
    """The grade of an environment."""

    environment: str
    options: dict[str, Any]
    max_reward: float | None
    checks: list[Check] = field(default_factory=list)
    """The checks of `forge-env validate`."""
    rewards: Mapping[str, list[tuple[str, float]]] = field(default_factory=dict)
    """Task and reward of the episodes of the policies `gold`, `empty` and `random`."""
    duplicates: list[tuple[str, str]] = field(default_factory=list)
    """Ids of tasks that are the same."""
    tasks: list[TaskGrade] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)
    seconds: float = 0.0
    recorded: Recorded | None = None
    """What a recorded run says of the tasks."""

    def rejected(self, kind: str | None = None) -> Estimate | None:
        """Share of mutants that the judge rejects, without equivalent ones; None if there are no mutants."""
        totals: dict[str, list[int]] = {}
        for tried in self.tried:
            if tried.verdict in ("rejected", "accepted", "undecided") and kind in (None, tried.kind):
                total = totals.setdefault(tried.task, [0, 0])
                total[0] += tried.verdict == "rejected"
                total[1] += 1
        return share_of([(good, number) for good, number in totals.values()])

    def scores(self) -> dict[str, Estimate]:
        """Mean reward of the policies `gold`, `empty` and `random`, as a share of the maximum if that is known."""
        full = self.max_reward or 1.0
        means: dict[str, Estimate | None] = {}
        for policy, scored in self.rewards.items():
            shares = by_task((task, reward / full) for task, reward in scored).values()
            if all(share in (0.0, 1.0) for own in shares for share in own):
                means[policy] = share_of([(math.fsum(own), len(own)) for own in shares])
            else:
                means[policy] = mean(list(shares))
        return {policy: estimate for policy, estimate in means.items() if estimate is not None}

    def problems(self) -> list[str]:
        """What is wrong with tasks, apart from mutants: each problem with the number of tasks and the first."""
        texts = _grouped((task.problem, task.id) for task in self.tasks)
        if self.duplicates:
            (one, two), *others = self.duplicates
            texts.append(
                f"{two} is the same task as {one}" + (f", and {len(others)} more are repeated" if others else "")
            )
        return texts

    def notes(self) -> list[str]:
        """Why tasks have no mutants: each reason with the number of tasks and the first."""
        return _grouped((task.note, task.id) for task in self.tasks)

    def counted(self, verdict: Verdict) -> int:
        """Number of mutants with a verdict."""
        return sum(tried.verdict == verdict for tried in self.tried)

    @property
    def kinds(self) -> list[str]:
        """Kinds of mutants, the most frequent first."""
        return [kind for kind, _ in Counter(tried.kind for tried in self.tried).most_common()]

    @property
    def survivors(self) -> list[Tried]:
        """Mutants with the full reward that are not known to be equivalent, those with a test first."""
        alive = [tried for tried in self.tried if tried.verdict in ("accepted", "undecided")]
        return sorted(alive, key=lambda tried: (not tried.test, tried.verdict == "undecided", tried.task))

    @property
    def flaky(self) -> list[TaskGrade]:
        """Tasks whose gold solution had different rewards."""
        return [task for task in self.tasks if len(set(task.gold)) > 1]

    def as_json(self) -> dict[str, Any]:
        """The grade as it is written to `grade.json`."""
        total = self.rejected()
        return with_schema(
            {
                "environment": self.environment,
                "options": self.options,
                "max_reward": self.max_reward,
                "rejected": None if total is None else asdict(total),
                "verdicts": dict(Counter(tried.verdict for tried in self.tried)),
                "kinds": {kind: None if (one := self.rejected(kind)) is None else asdict(one) for kind in self.kinds},
                "checks": [asdict(check) for check in self.checks],
                "scores": {policy: asdict(estimate) for policy, estimate in self.scores().items()},
                "duplicates": self.duplicates,
                "tasks": [asdict(task) for task in self.tasks],
                "survivors": [asdict(tried) for tried in self.survivors],
                "equivalent": [asdict(tried) for tried in self.tried if tried.verdict == "equivalent"],
                "recorded": None if self.recorded is None else self.recorded.as_json(),
                "seconds": round(self.seconds, 3),
            }
        )


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
        make_env: makes an environment, with the sandboxes that it needs.
        name: its name.
        options: its options.
        num_tasks: number of tasks of each split.
        mutants: maximum number of mutants of each task.
        on_note: called at the beginning with what can't be graded.
        on_task: called with each task's grade when it is complete.

    Raises:
        ForgeError: an episode could not be played or judged, or the environment has a bug.
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


def _grouped(texts: Iterable[tuple[str, str]]) -> list[str]:
    """Each text with the number of its tasks and the first."""
    tasks: dict[str, list[str]] = {}
    for text, task in texts:
        if text:
            tasks.setdefault(text, []).append(task)
    return [f"{text}: {ids[0]}" + (f" and {len(ids) - 1} more" if ids[1:] else "") for text, ids in tasks.items()]


class Grader:
    """Makes mutants of gold solutions, and has them judged.

    Args:
        make_env: makes an environment, with the sandboxes that it needs.
        mutants: maximum number of mutants of each task.
        on_task: called with each task's grade when it is complete.
    """

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
            ForgeError: a gold solution could not be judged, or the environment has a bug.
        """

        async def one(numbered: tuple[int, Task]) -> None:
            place, task = numbered
            self._graded[place] = TaskGrade(task.id, task.split)
            self._tried[place] = await self._grade(task, self._graded[place])
            self._graded[place].counts = dict(Counter(tried.verdict for tried in self._tried[place]))
            self._on_task(self._graded[place])

        await for_each(enumerate(tasks), one, limit=CONCURRENCY)
        tried = [one for place in sorted(self._tried) for one in self._tried[place]]
        return [self._graded[place] for place in sorted(self._graded)], tried

    async def _grade(self, task: Task, graded: TaskGrade) -> list[Tried]:
        with environment_code(f"{type(self._env).__name__}.gold_actions", task.id):
            known = gold_actions(self._env, task) is not None
        if not known:
            graded.note = "there is no gold solution"
            return []
        played = [await self._play(GoldPolicy(), task) for _ in range(REPEATS)]
        if lost := next((one for one in played if not one.valid), None):
            raise ForgeError(f"task {task.id!r} could not be played: {lost.error}")
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
            found = pieces(self._env, task)
        judged, full = list[Piece](), graded.gold[0]
        for piece in found:
            looked_at = await self._reward(piece.submit(piece.emptied), task) < full - EPSILON
            judged += [piece] if looked_at else []
            graded.unjudged += [] if looked_at else [piece.name]
        if not judged:
            graded.problem = "an emptied solution has the full reward" if found else ""
            graded.note = "" if found else "no part of the gold solution can be made wrong"
            return []
        drawn = [
            _Drawn(piece, mutant)
            for piece in judged
            for mutant in await asyncio.to_thread(mutants_of, piece, most=self._mutants, seed=f"{task.id}/{piece.name}")
        ]
        if not drawn:
            graded.note = "no wrong version of the gold solution can be made"
        probers: dict[str, Prober] = {}
        return [await self._try(task, full, one, probers) for one in evenly(drawn, task.id)[: self._mutants]]

    async def _try(self, task: Task, full: float, drawn: _Drawn, probers: dict[str, Prober]) -> Tried:
        piece, mutant = drawn.piece, drawn.mutant
        reward = await self._reward(piece.submit(mutant.text), task)
        tried = Tried(task.id, task.split, piece.name, mutant.kind, mutant.line, mutant.change, "rejected", reward)
        if math.isnan(reward):
            tried.verdict, tried.reward = "lost", 0.0
        elif reward >= full - EPSILON:
            tried.verdict, tried.text = "accepted", mutant.text
            await self._decide(task, piece, mutant, tried, probers)
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
        if difference is not None:
            tried.test, tried.got = difference.test, difference.mutant
        elif prober.number >= ENOUGH:
            tried.verdict, tried.note = "equivalent", f"no difference on {prober.number} inputs"
        else:
            tried.verdict, tried.note = "undecided", f"only {prober.number} inputs could be tried"

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


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A mutant of a piece."""

    piece: Piece
    mutant: Mutant

    @property
    def kind(self) -> str:
        """The kind of the mutant."""
        return self.mutant.kind
