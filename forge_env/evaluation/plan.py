"""The samples of an evaluation, and the result that is kept in memory for each finished one."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

from forge_env.config.evaluation import ENDLESS_N, EvaluationConfig
from forge_env.environment.base import Environment
from forge_env.environment.tool_environment import ToolEnvironment
from forge_env.errors import EnvironmentBugError, UsageError
from forge_env.evaluation.metering import TokenUsage
from forge_env.reading import LARGEST_NUMBER, is_bounded
from forge_env.tasks.splits import number_of_tasks
from forge_env.trajectory import Trajectory
from forge_env.types import Task

MOST_SAMPLES = 10**12
"""Maximum samples of one environment; at a million per second they take eleven days."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One episode to play. The same configuration gives the same samples in every process."""

    label: str
    split: str
    index: int
    epoch: int

    def seed(self, seed: int) -> int:
        """Derive the sample's seed, 31 bits, from the evaluation's seed."""
        text = f"{seed}/{self.label}/{self.split}/{self.index}/{self.epoch}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1

    @property
    def id(self) -> str:
        """Id in the record."""
        return f"{self.label}/{self.split}/{self.index}/{self.epoch}"


def task_digest(task: Task) -> str:
    """Digest of a task's prompt and hidden data, by which a resumed evaluation recognizes the task.

    Values that are not JSON contribute only their type.
    """
    parts = [task.prompt, [message.model_dump() for message in task.history], task.gold, task.data]
    try:
        text = json.dumps(parts, sort_keys=True, default=lambda value: type(value).__name__)
    except (TypeError, ValueError, RecursionError):  # keys of several types, or an object that contains itself
        text = json.dumps([task.prompt, task.gold])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Share:
    """The samples of one environment, numbered epoch by epoch."""

    label: str
    split: str
    tasks: int
    epochs: int
    asked: int = 0
    """Number of samples requested; above the number planned if the split has too few tasks or gold solutions."""
    left_out: Set[int] = frozenset()
    """Numbers of the samples that are not played."""

    def __len__(self) -> int:
        return self.tasks * self.epochs

    def __getitem__(self, number: int) -> Sample:
        epoch, index = divmod(number, self.tasks)
        return Sample(self.label, self.split, index, epoch)

    @property
    def played(self) -> int:
        """Number of samples to play."""
        return len(self) - len(self.left_out)

    def number(self, split: str, index: int, epoch: int) -> int | None:
        """Number of the sample; None if it is not to be played."""
        if not (split == self.split and 0 <= index < self.tasks and 0 <= epoch < self.epochs):
            return None
        number = epoch * self.tasks + index
        return None if number in self.left_out else number


class Plan:
    """All samples to play, epoch by epoch and interleaved over environments, so that early scores are representative.

    Samples are created on demand, as there may be more than fit in memory.
    """

    def __init__(self, shares: Sequence[Share]) -> None:
        self.shares = {share.label: share for share in shares}

    def __len__(self) -> int:
        return sum(share.played for share in self.shares.values())

    def __iter__(self) -> Iterator[Sample]:
        """Samples, interleaved: at any point every environment is about equally far through."""

        def places(order: int, share: Share) -> Iterator[tuple[float, int, int]]:
            for number in range(len(share)):
                if number not in share.left_out:
                    yield (number + 0.5) / len(share), order, number

        shares = list(self.shares.values())
        for _, order, number in heapq.merge(*(places(order, share) for order, share in enumerate(shares))):
            yield shares[order][number]

    def only(self, wanted: Callable[[Sample], bool]) -> Plan:
        """Restrict the plan to the samples for which `wanted` is true."""
        return self.without(
            (label, number)
            for label, share in self.shares.items()
            for number in range(len(share))
            if number not in share.left_out and not wanted(share[number])
        )

    def without(self, samples: Iterable[tuple[str, int]]) -> Plan:
        """Remove samples, given by label and number in the label's share."""
        left_out = {label: set(share.left_out) for label, share in self.shares.items()}
        for label, number in samples:
            left_out[label].add(number)
        return Plan([replace(share, left_out=left_out[label]) for label, share in self.shares.items()])


def plan(config: EvaluationConfig, environments: dict[str, Environment]) -> Plan:
    """Build the plan of all samples that are configured and that the environments have."""
    shares = []
    for choice in config.environments:
        env = environments[choice.label]
        split = choice.split or config.split or ("eval" if "eval" in env.splits else env.splits[0])
        if split not in env.splits:
            raise UsageError(f"{choice.label} has no split {split!r}", fix=f"use one of {', '.join(env.splits)}")
        wanted, total = choice.num_tasks or config.num_tasks, number_of_tasks(env, split)
        count = (wanted or ENDLESS_N) if total is None else min(wanted or total, total)
        if count == 0:
            raise UsageError(f"{choice.label} has no tasks in split {split!r}")
        if (samples := count * config.epochs) > MOST_SAMPLES:
            fix = "lower --num-tasks or --epochs"
            raise UsageError(f"{samples:,} samples of {choice.label} are too many", fix=fix)
        shares.append(Share(choice.label, split, count, config.epochs, max(count, wanted or 0) * config.epochs))
    return Plan(shares)


@dataclass(frozen=True, slots=True)
class Planned:
    """Numbers of samples of one environment."""

    split: str
    samples: int
    asked: int
    """See `Share.asked`."""


class Outcome:
    """Properties of a sample's outcome, derived from `valid` and `error`."""

    __slots__ = ()
    valid: bool
    error: str | None

    @property
    def error_kind(self) -> str | None:
        """Class name of the error that made the sample invalid; else None."""
        return None if self.valid or self.error is None else self.error.partition(":")[0]

    @property
    def is_bug(self) -> bool:
        """Whether the environment's code made the sample invalid."""
        return self.error_kind == EnvironmentBugError.__name__

    @property
    def crashed(self) -> bool:
        """Whether the agent's code failed, so that the sample scores 0."""
        return self.valid and self.error is not None


@dataclass(slots=True)
class SampleResult(Outcome):
    """Result of a played sample; its transcript is in the folder under the same id."""

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
    """Number of requests whose tokens are estimated."""
    cut_replies: int = 0


class NoSuchMetricError(UsageError):
    """Error for a score name that is not a metric of the environment."""


def check_score(score: str, label: str, env: Environment) -> None:
    """Check that the environment has the metric, as far as known before an episode: `step` may add others."""
    methods = ("step", "truncate", "score")
    if score == "reward" or not isinstance(env, ToolEnvironment):
        return
    if any(getattr(type(env), name) is not getattr(ToolEnvironment, name) for name in methods):
        return
    known = [*env.rubric.weights, *env.counters()]
    if score not in known:
        raise NoSuchMetricError(f"{label} has no metric {score!r}", fix=f"its metrics: {', '.join(known)}")


USAGE = TokenUsage.__slots__
INFO = ("index", "epoch", "max_reward", "usage", "credits", "branches", "task")


def check_record(trajectory: Trajectory) -> None:
    """Check that the runner could have written a record, as a damaged line may still parse as a trajectory."""
    info = trajectory.info
    usage = info.get("usage", {})
    if unknown := [*(info.keys() - set(INFO)), *(usage.keys() - set(USAGE))]:
        raise ValueError(f"unknown figure {unknown[0]!r}")
    highest = [] if info["max_reward"] is None else [info["max_reward"]]
    figures = [trajectory.reward, *highest, *usage.values(), *trajectory.metrics.values()]
    if not all(isinstance(figure, int | float) for figure in figures):
        raise ValueError("a figure is not a number")
    if not all(map(is_bounded, figures)):
        raise ValueError(f"a figure is infinite, or beyond {LARGEST_NUMBER:g}")
    index, epoch = info["index"], info["epoch"]
    if not (trajectory.id.startswith(f"{trajectory.environment}/") and trajectory.id.endswith(f"/{index}/{epoch}")):
        raise ValueError(f"{trajectory.id!r} is not sample {epoch} of task {index} of {trajectory.environment!r}")
    # raises UnicodeEncodeError for an unpaired surrogate
    "".join([trajectory.task_id, trajectory.split, *trajectory.tags, *trajectory.metrics]).encode()
    result_of(trajectory, "reward")


def split_of(trajectory: Trajectory) -> str:
    """The split requested for the sample; `Task.split` may differ."""
    return trajectory.id.removeprefix(f"{trajectory.environment}/").rsplit("/", 2)[0]


def in_plan(config: EvaluationConfig, trajectory: Trajectory) -> bool:
    """Whether a recorded sample is in the configuration that was last requested: resuming may request fewer."""
    for choice in config.environments:
        if choice.label == trajectory.environment:
            count = choice.num_tasks or config.num_tasks
            inside = count is None or trajectory.info["index"] < count
            return inside and bool(trajectory.info["epoch"] < config.epochs)
    return False


def result_of(trajectory: Trajectory, score: str) -> SampleResult:
    """Result of a stored trajectory."""
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
        cut_replies=trajectory.cut_replies,
    )
