"""The grade of an environment: mutants with their verdicts, tasks, and shares with intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from forge_env.evaluation.estimates import Estimate, by_task, mean, share_of
from forge_env.grading.recorded import Recorded
from forge_env.schema import with_schema
from forge_env.validation.checks import Check

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
            if all(share in (0.0, 1.0) for scores in shares for share in scores):
                means[policy] = share_of([(math.fsum(scores), len(scores)) for scores in shares])
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


def _grouped(texts: Iterable[tuple[str, str]]) -> list[str]:
    """Each text with the number of its tasks and the first."""
    tasks: dict[str, list[str]] = {}
    for text, task in texts:
        if text:
            tasks.setdefault(text, []).append(task)
    return [f"{text}: {ids[0]}" + (f" and {len(ids) - 1} more" if ids[1:] else "") for text, ids in tasks.items()]
