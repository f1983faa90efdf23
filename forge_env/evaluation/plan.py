"""Which samples a run consists of, and what is kept in memory of each one that is done."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

from forge_env.config.evaluation import ENDLESS_N, EnvironmentChoice, EvaluationConfig
from forge_env.environment.base import Environment
from forge_env.environment.tool_environment import ToolEnvironment
from forge_env.errors import EnvironmentBugError, UsageError
from forge_env.evaluation.metering import TokenUsage
from forge_env.tasks.splits import number_of_tasks
from forge_env.trajectory import Trajectory
from forge_env.types import Task

MOST_SAMPLES = 10**12
"""Of one environment: at a million a second, eleven days."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One episode to be played. The same configuration gives the same samples in every process."""

    label: str
    split: str
    index: int
    epoch: int

    def seed(self, seed: int) -> int:
        """The sample's own seed, 31 bits."""
        text = f"{seed}/{self.label}/{self.split}/{self.index}/{self.epoch}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1

    @property
    def id(self) -> str:
        """Name in the record."""
        return f"{self.label}/{self.split}/{self.index}/{self.epoch}"


def task_digest(task: Task) -> str:
    """A digest of what a task asks and of its hidden data, by which a resumed evaluation recognizes it.

    Of values that are not JSON, only the type counts.
    """
    parts = [task.prompt, [message.model_dump() for message in task.history], task.gold, task.data]
    try:
        text = json.dumps(parts, sort_keys=True, default=lambda value: type(value).__name__)
    except (TypeError, ValueError, RecursionError):  # keys of several types, or an object that contains itself
        text = json.dumps([task.prompt, task.gold])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Share:
    """The samples of one environment, numbered epoch after epoch."""

    label: str
    split: str
    tasks: int
    epochs: int
    left_out: Set[int] = frozenset()
    """Numbers of the samples that are not played."""

    def __len__(self) -> int:
        return self.tasks * self.epochs

    def __getitem__(self, number: int) -> Sample:
        epoch, index = divmod(number, self.tasks)
        return Sample(self.label, self.split, index, epoch)

    @property
    def played(self) -> int:
        """Number of samples that are played."""
        return len(self) - len(self.left_out)

    def number(self, split: str, index: int, epoch: int) -> int | None:
        """Of the sample; None if it is not one to be played."""
        if not (split == self.split and 0 <= index < self.tasks and 0 <= epoch < self.epochs):
            return None
        number = epoch * self.tasks + index
        return None if number in self.left_out else number


class Plan:
    """Every sample to be played, epoch after epoch, the environments taking turns: early figures then stand for all.

    Samples are made as they are asked for: there may be more than memory has room for.
    """

    def __init__(self, shares: Sequence[Share]) -> None:
        self.shares = {share.label: share for share in shares}

    def __len__(self) -> int:
        return sum(share.played for share in self.shares.values())

    def __iter__(self) -> Iterator[Sample]:
        return (sample for sample, _ in self._numbered())

    def _numbered(self) -> Iterator[tuple[Sample, int]]:
        """In turns: after any part of the whole, every environment has given about that part of its own."""

        def places(order: int, share: Share) -> Iterator[tuple[float, int, int]]:
            for number in range(len(share)):
                if number not in share.left_out:
                    yield (number + 0.5) / len(share), order, number

        shares = list(self.shares.values())
        for _, order, number in heapq.merge(*(places(order, share) for order, share in enumerate(shares))):
            yield shares[order][number], number

    def only(self, wanted: Callable[[Sample], bool]) -> Plan:
        """Those that are wanted."""
        return self.without((sample.label, number) for sample, number in self._numbered() if not wanted(sample))

    def without(self, samples: Iterable[tuple[str, int]]) -> Plan:
        """Those that are not among `samples`: label, and number in its share."""
        left_out = {label: set(share.left_out) for label, share in self.shares.items()}
        for label, number in samples:
            left_out[label].add(number)
        return Plan([replace(share, left_out=left_out[label]) for label, share in self.shares.items()])


def plan(config: EvaluationConfig, environments: dict[str, Environment]) -> Plan:
    """Every sample that the configuration asks for and the environments have."""
    return Plan(
        [
            Share(choice.label, *tasks_of(choice, config, environments[choice.label]), config.epochs)
            for choice in config.environments
        ]
    )


@dataclass(frozen=True, slots=True)
class Planned:
    """Samples of one environment."""

    split: str
    samples: int
    """Samples to play."""
    asked: int
    """Samples requested; more than `samples` if the split has too few tasks, or too few with a reference solution."""


def planned(config: EvaluationConfig, possible: Plan, samples: Plan) -> dict[str, Planned]:
    """The samples to play of each environment, by label.

    Args:
        config: the evaluation.
        possible: every sample, as `plan` made them.
        samples: those of them that are played.
    """
    return {
        choice.label: Planned(
            possible.shares[choice.label].split,
            samples.shares[choice.label].played,
            max(possible.shares[choice.label].played, (choice.n or config.n or 0) * config.epochs),
        )
        for choice in config.environments
    }


def tasks_of(choice: EnvironmentChoice, config: EvaluationConfig, env: Environment) -> tuple[str, int]:
    """`(split, number of tasks)` of one environment."""
    split = choice.split or config.split or ("eval" if "eval" in env.splits else env.splits[0])
    if split not in env.splits:
        raise UsageError(f"{choice.label} has no split {split!r}", fix=f"use one of {', '.join(env.splits)}")
    wanted, total = choice.n or config.n, number_of_tasks(env, split)
    count = (wanted or ENDLESS_N) if total is None else min(wanted or total, total)
    if count == 0:
        raise UsageError(f"{choice.label} has no tasks in split {split!r}")
    if count * config.epochs > MOST_SAMPLES:
        raise UsageError(
            f"{count * config.epochs:,} samples of {choice.label} would never end", fix="lower --n or --epochs"
        )
    return split, count


class Outcome:
    """How a sample ended, in `valid` and `error`."""

    __slots__ = ()
    valid: bool
    error: str | None

    @property
    def error_kind(self) -> str | None:
        """Class of the error that made it invalid."""
        return None if self.valid or self.error is None else self.error.partition(":")[0]

    @property
    def is_bug(self) -> bool:
        """Whether the environment's own code made it invalid."""
        return self.error_kind == EnvironmentBugError.__name__

    @property
    def crashed(self) -> bool:
        """Whether the agent's own code failed, so that it scores 0."""
        return self.valid and self.error is not None


@dataclass(slots=True)
class SampleResult(Outcome):
    """What is kept of a sample that was played; its transcript is in the folder under the same id."""

    id: str
    environment: str
    task_id: str
    split: str
    epoch: int
    score: float
    reward: float
    max_score: float | None
    """Score of a perfect episode; None if unknown."""
    metrics: dict[str, float]
    valid: bool
    truncation: str | None
    error: str | None
    difficulty: int
    tags: list[str]
    turns: int
    wall_s: float
    waited_s: float
    generate_s: float
    step_s: float
    reset_s: float
    close_s: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cost: float
    retries: int
    requests: int = 0
    estimated_requests: int = 0
    """Of these, those whose tokens are estimated."""
    cut_replies: int = 0
    """Replies that ended at the limit of one reply's tokens."""


class NoSuchMetricError(UsageError):
    """What should be reported is not a metric of the environment."""


def check_score(score: str, label: str, env: Environment) -> None:
    """Whether the environment has the metric, as far as that is known before an episode: others may come in `step`.

    Raises:
        NoSuchMetricError: it has none of that name.
    """
    own = ("step", "truncate", "score")
    if score == "reward" or not isinstance(env, ToolEnvironment):
        return
    if any(getattr(type(env), name) is not getattr(ToolEnvironment, name) for name in own):
        return
    known = [*env.rubric.weights, *env.counters()]
    if score not in known:
        raise NoSuchMetricError(f"{label} has no metric {score!r}", fix=f"its metrics: {', '.join(known)}")


USAGE = TokenUsage.__slots__
INFO = ("index", "epoch", "max_reward", "usage", "credits", "branches", "task")


def check_record(trajectory: Trajectory) -> None:
    """Whether the runner can have written it: a damaged line may still be a trajectory by its form.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it is not one of its records.
    """
    info = trajectory.info
    usage = info.get("usage", {})
    if unknown := [*(info.keys() - set(INFO)), *(usage.keys() - set(USAGE))]:
        raise ValueError(f"there is no figure {unknown[0]!r}")
    highest = [] if info["max_reward"] is None else [info["max_reward"]]
    figures = [trajectory.reward, *highest, *usage.values(), *trajectory.metrics.values()]
    if not all(isinstance(figure, int | float) for figure in figures):
        raise ValueError("a figure is not a number")
    for figure in figures:
        float(figure)  # OverflowError: it has hundreds of digits
    index, epoch = info["index"], info["epoch"]
    if not (trajectory.id.startswith(f"{trajectory.environment}/") and trajectory.id.endswith(f"/{index}/{epoch}")):
        raise ValueError(f"{trajectory.id!r} is not sample {epoch} of task {index} of {trajectory.environment!r}")
    "".join([trajectory.task_id, trajectory.split, *trajectory.tags, *trajectory.metrics]).encode()  # or half a pair
    result_of(trajectory, "reward")


def split_of(trajectory: Trajectory) -> str:
    """The split that the sample was asked for: a task may name another."""
    return trajectory.id.removeprefix(f"{trajectory.environment}/").rsplit("/", 2)[0]


def in_plan(config: EvaluationConfig, trajectory: Trajectory) -> bool:
    """Whether a recorded sample belongs to what was asked for last: resuming may ask for fewer."""
    for choice in config.environments:
        if choice.label == trajectory.environment:
            count = choice.n or config.n
            inside = count is None or trajectory.info["index"] < count
            return inside and bool(trajectory.info["epoch"] < config.epochs)
    return False


def result_of(trajectory: Trajectory, score: str) -> SampleResult:
    """The figures of a stored trajectory.

    Args:
        trajectory: as the runner recorded it.
        score: "reward", or the metric that is reported.

    Raises:
        NoSuchMetricError: a valid episode has no such metric.
    """
    info, usage = trajectory.info, trajectory.info.get("usage", {})
    value, best = trajectory.reward, info.get("max_reward", 1.0)
    if score != "reward":
        if trajectory.valid and not trajectory.crashed and score not in trajectory.metrics:
            known = ", ".join(trajectory.metrics) or "none"
            raise NoSuchMetricError(f"{trajectory.environment} has no metric {score!r}", fix=f"its metrics: {known}")
        value, best = 0.0 if trajectory.crashed else trajectory.metrics.get(score, 0.0), 1.0
    return SampleResult(
        id=trajectory.id,
        environment=trajectory.environment,
        task_id=trajectory.task_id,
        split=trajectory.split,
        epoch=int(info.get("epoch", 0)),
        score=value,
        reward=trajectory.reward,
        max_score=best,
        metrics=dict(trajectory.metrics),
        valid=trajectory.valid,
        truncation=trajectory.truncation,
        error=trajectory.error,
        difficulty=trajectory.difficulty,
        tags=list(trajectory.tags),
        turns=len(trajectory.turns),
        wall_s=trajectory.wall_s,
        waited_s=trajectory.waited_s,
        generate_s=sum(turn.generate_s for turn in trajectory.turns),
        step_s=sum(turn.step_s for turn in trajectory.turns),
        reset_s=trajectory.reset_s,
        close_s=trajectory.close_s,
        prompt_tokens=usage.get("prompt", 0),
        completion_tokens=usage.get("completion", 0),
        cached_tokens=usage.get("cached", 0),
        cost=usage.get("cost", 0.0),
        retries=trajectory.retries,
        requests=usage.get("requests", 0),
        estimated_requests=usage.get("estimated", 0),
        cut_replies=sum(turn.reply.stop_reason == "length" for turn in trajectory.turns),
    )
