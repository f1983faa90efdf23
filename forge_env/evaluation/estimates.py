"""Figures from repeated samples of tasks: means with clustered errors, bootstrap intervals, pass@k, pass^k.

Scores come as one list per task (its valid epochs). Samples of one task are not independent, so every error here
treats the task as the unit: A. C. Cameron and D. L. Miller, "A Practitioner's Guide to Cluster-Robust Inference",
2015, as E. Miller, "Adding Error Bars to Evals", 2024, applies it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from forge_env.config.evaluation import CONFIDENCE
from forge_env.trajectory import Trajectory

Scores = Sequence[Sequence[float]]
"""Scores of each task, [tasks][epochs of it]; tasks without any are left out."""

RESAMPLES = 2000
ALIKE = 8
"""Tasks of each kind, on average, from which on kinds are drawn instead of tasks."""
CHUNK = 2_000_000
"""Random numbers drawn at once, which bounds the memory of a bootstrap."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its uncertainty."""

    value: float
    stderr: float
    low: float
    """Lower end of the interval (bootstrap over tasks)."""
    high: float
    """Upper end."""


def by_task(scored: Iterable[tuple[str, float]]) -> dict[str, list[float]]:
    """Scores of each task, from (task, score) of every sample."""
    tasks: dict[str, list[float]] = {}
    for task, score in scored:
        tasks.setdefault(task, []).append(score)
    return tasks


def clustered(totals: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Mean of all samples and its standard error, from sum and number of each task's scores.

    With task sums S_g over n_g samples, N samples, G tasks and mean m:
    sqrt(G / (G - 1) * sum_g (S_g - n_g m)^2) / N. With one sample a task it is the usual s / sqrt(N).
    """
    tasks, samples = len(totals), sum(number for _, number in totals)
    middle = math.fsum(total for total, _ in totals) / samples
    if tasks < 2:
        return middle, 0.0
    squares = math.fsum((total - number * middle) ** 2 for total, number in totals)
    return middle, math.sqrt(tasks / (tasks - 1) * squares) / samples


def bootstrap(totals: Sequence[tuple[float, int]], *, confidence: float, seed: int = 0) -> tuple[float, float]:
    """Percentile interval of the mean of all samples, tasks drawn with replacement (B. Efron, 1979).

    Where many tasks are alike (solved or not), how often each kind is drawn is drawn at once: it is multinomial.
    """
    import numpy as np

    rng = np.random.default_rng(seed)
    tasks = len(totals)
    sums, counts = np.array(totals, dtype=float).T
    kinds, sizes = np.unique(np.stack([sums, counts]), axis=1, return_counts=True)
    means = []
    if ALIKE * len(sizes) <= tasks:
        drawn = rng.multinomial(tasks, sizes / tasks, size=RESAMPLES)
        means.append((drawn @ kinds[0]) / (drawn @ kinds[1]))
    step = max(1, CHUNK // tasks)
    for start in range(0, 0 if means else RESAMPLES, step):
        drawn = rng.integers(0, tasks, size=(min(step, RESAMPLES - start), tasks))
        means.append(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(low), float(high)


def mean(scores: Scores, *, confidence: float = CONFIDENCE) -> Estimate | None:
    """Mean over all samples; None when there is none."""
    totals = [(math.fsum(values), len(values)) for values in scores if values]
    if not totals:
        return None
    return Estimate(*clustered(totals), *bootstrap(totals, confidence=confidence))


def score(
    trajectories: Iterable[Trajectory], metric: str = "reward", *, confidence: float = CONFIDENCE
) -> Estimate | None:
    """Mean score of the valid episodes; None when there is none.

    Args:
        trajectories: of any tasks; those that are not valid are left out.
        metric: what is scored; an episode without it counts with its reward.
        confidence: of the interval.
    """
    valid = [trajectory for trajectory in trajectories if trajectory.valid]
    scored = ((trajectory.task_id, trajectory.metrics.get(metric, trajectory.reward)) for trajectory in valid)
    return mean([*by_task(scored).values()], confidence=confidence)


def pass_at(samples: int, solved: int, k: int) -> float:
    """Chance that at least one of k samples solves the task, unbiased: 1 - C(n - c, k) / C(n, k).

    Chen et al., "Evaluating Large Language Models Trained on Code", 2021.
    """
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def pass_all(samples: int, solved: int, k: int) -> float:
    """Chance that all of k samples solve the task ("pass^k"), unbiased: C(c, k) / C(n, k).

    Yao et al., "tau-bench", 2024.
    """
    return math.comb(solved, k) / math.comb(samples, k)


def passes(scores: Scores, threshold: float, *, confidence: float = CONFIDENCE) -> dict[int, tuple[Estimate, Estimate]]:
    """pass@k and pass^k for k = 1, 2, 4, ... and the number of epochs; over tasks with at least k valid samples.

    Args:
        scores: see `Scores`.
        threshold: a sample with at least this score has solved its task.
        confidence: of the intervals.
    """
    counted = [(len(values), sum(value >= threshold - 1e-9 for value in values)) for values in scores if values]
    most = max((samples for samples, _ in counted), default=0)
    result: dict[int, tuple[Estimate, Estimate]] = {}
    for k in sorted({*(2**i for i in range(most.bit_length())), most} - {0}):
        enough = [(samples, solved) for samples, solved in counted if samples >= k]
        at = mean([[pass_at(samples, solved, k)] for samples, solved in enough], confidence=confidence)
        all_of = mean([[pass_all(samples, solved, k)] for samples, solved in enough], confidence=confidence)
        if at is not None and all_of is not None:
            result[k] = (at, all_of)
    return result


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """B minus A over the tasks that both have."""

    tasks: int
    mean_a: float
    mean_b: float
    difference: Estimate
    p_value: float
    """Chance of a difference at least this large if A and B were interchangeable on every task."""
    better: int
    """Tasks on which B's mean is higher."""
    worse: int
    """Tasks on which it is lower."""


def compare(
    a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]], *, confidence: float = CONFIDENCE
) -> PairedDifference | None:
    """Paired comparison of two runs' scores by task; None when no task has valid samples in both."""
    tasks = sorted(task for task in a.keys() & b.keys() if a[task] and b[task])
    if not tasks:
        return None
    means_a = [math.fsum(a[task]) / len(a[task]) for task in tasks]
    means_b = [math.fsum(b[task]) / len(b[task]) for task in tasks]
    differences = [two - one for one, two in zip(means_a, means_b, strict=True)]
    difference = mean([[value] for value in differences], confidence=confidence)
    assert difference is not None
    return PairedDifference(
        tasks=len(tasks),
        mean_a=math.fsum(means_a) / len(tasks),
        mean_b=math.fsum(means_b) / len(tasks),
        difference=difference,
        p_value=sign_flip_test(differences),
        better=sum(value > 1e-12 for value in differences),
        worse=sum(value < -1e-12 for value in differences),
    )


def sign_flip_test(differences: Sequence[float], *, seed: int = 0, flips: int = 20_000) -> float:
    """Two-sided paired permutation test (R. A. Fisher, 1935): every pair's sign may as well be the other.

    Exact where all sign patterns can be tried, else by `flips` random ones with the +1 that keeps it valid.
    """
    import numpy as np

    moved = np.abs([value for value in differences if abs(value) > 1e-12])
    if not len(moved):
        return 1.0
    observed = abs(math.fsum(differences)) - 1e-9
    if len(moved) <= 14:
        patterns = np.array(np.meshgrid(*[[-1.0, 1.0]] * len(moved))).reshape(len(moved), -1)
        return float((np.abs(moved @ patterns) >= observed).mean())
    rng = np.random.default_rng(seed)
    step = max(1, CHUNK // len(moved))
    hits = 0
    for start in range(0, flips, step):
        signs = rng.integers(0, 2, size=(min(step, flips - start), len(moved))) * 2.0 - 1.0
        hits += int((np.abs(np.einsum("ij,j->i", signs, moved)) >= observed).sum())  # `@` would wake BLAS' threads
    return (hits + 1) / (flips + 1)
