"""Statistics of repeated samples of tasks: means with clustered errors, bootstrap intervals, pass@k, pass^k.

Scores come as one list per task (its valid epochs). Samples of one task are not independent, so every error here
treats the task as the unit: A. C. Cameron and D. L. Miller, "A Practitioner's Guide to Cluster-Robust Inference",
2015, as applied by E. Miller, "Adding Error Bars to Evals", 2024.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from forge_env.config.evaluation import CONFIDENCE
from forge_env.figures import duration, percent

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Scores = Sequence[Sequence[float]]
"""Scores of each task, [tasks][epochs of the task]; tasks without scores are ignored."""

Totals: TypeAlias = "NDArray[Any] | Sequence[tuple[float, int]]"
"""Sum and number of each task's scores, [tasks, 2]."""

RESAMPLES, FLIPS = 2_000, 20_000
"""Samples of a bootstrap, and random patterns of signs of a permutation test."""
ALIKE = 8
"""Mean number of tasks per distinct total from which the bootstrap draws counts per total instead of single tasks."""
NORMAL_TASKS = 50_000
"""Number of tasks with differing scores from which a normal interval is used; a bootstrap would take seconds to give
about the same."""
CHUNK = 2_000_000
"""Random numbers drawn at once; bounds the memory of a bootstrap."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A statistic with its uncertainty."""

    value: float
    stderr: float
    low: float
    """Lower end of the interval, bootstrapped over tasks; for paired differences see `PairedDifference`."""
    high: float


@dataclass(frozen=True, slots=True)
class Times:
    """Mean duration of a sample in seconds, with the parts that add up to it."""

    wall: float
    """Seconds from the first reset to the end, including retries."""
    model: float
    environment: float
    """Seconds of tools and scoring."""
    reset: float
    close: float
    waited: float
    """Seconds spent waiting for the endpoint's limits or for a sandbox; included in the other parts."""

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by name, longest first; "other" covers earlier attempts and turns that a limit interrupted."""
        parts = {
            "model": self.model,
            "tools and scoring": self.environment,
            "reset": self.reset,
            "closing": self.close,
        }
        parts["other"] = max(0.0, self.wall - sum(parts.values()))
        return dict(sorted(parts.items(), key=lambda item: -item[1]))

    def words(self) -> str:
        """Describe the durations: `4.2s on average: model 2.1s (50 %), ...`, without parts below 1 %."""
        shares = [
            f"{name} {duration(spent, fine=True)} ({percent(spent / self.wall)})"
            for name, spent in self.parts.items()
            if self.wall > 0 and spent >= 0.01 * self.wall
        ]
        waited = f"; waiting {duration(self.waited, fine=True)} of these" if self.waited >= 0.005 else ""
        return f"{duration(self.wall, fine=True)} on average" + (f": {', '.join(shares)}{waited}" if shares else "")


def by_task(scored: Iterable[tuple[str, float]]) -> dict[str, list[float]]:
    """Group `(task, score)` pairs of samples by task."""
    tasks: dict[str, list[float]] = {}
    for task, score in scored:
        tasks.setdefault(task, []).append(score)
    return tasks


def clustered(totals: Totals) -> tuple[float, float]:
    """Mean of all samples and its standard error, from the sum and number of each task's scores.

    With task sums S_g over n_g samples, N samples, G tasks and mean m:
    sqrt(G / (G - 1) * sum_g (S_g - n_g m)^2) / N. With one sample per task this is the usual s / sqrt(N).
    """
    sums, counts = _columns(totals)
    tasks, samples = len(sums), int(counts.sum())
    middle = math.fsum(sums) / samples
    if tasks < 2:
        return middle, 0.0
    squares = math.fsum((sums - counts * middle) ** 2)
    return middle, math.sqrt(tasks / (tasks - 1) * squares) / samples


class TaskScores:
    """Accumulates scores of samples as a sum and a number per task.

    Takes about 200 bytes per task, however many samples it has. The current mean and error take constant time.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._sums, self._counts = array("d"), array("q")
        self.samples = 0
        self._total = 0.0
        # sums over tasks of S * S, S * n and n * n, with sum S and number n of each task's scores
        self._squares, self._products, self._sizes = 0.0, 0.0, 0

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, task: str, score: float) -> None:
        """Add the score of one sample of a task."""
        number = self._numbers.setdefault(task, len(self._numbers))
        if number == len(self._sums):
            self._sums.append(0.0)
            self._counts.append(0)
        total, count = self._sums[number], self._counts[number]
        self._sums[number], self._counts[number] = total + score, count + 1
        self.samples += 1
        self._total += score
        self._squares += score * (2 * total + score)
        self._products += total + score * (count + 1)
        self._sizes += 2 * count + 1

    def totals(self) -> NDArray[np.float64]:
        """Sum and number of each task's scores, [tasks, 2]."""
        import numpy as np

        return np.column_stack([np.array(self._sums), np.array(self._counts)])

    def so_far(self) -> tuple[float, float]:
        """Current mean and standard error, equal to those of `clustered` except for rounding."""
        middle, tasks = self._total / self.samples, len(self)
        if tasks < 2:
            return middle, 0.0
        squares = self._squares - 2 * middle * self._products + middle * middle * self._sizes
        return middle, math.sqrt(tasks / (tasks - 1) * max(squares, 0.0)) / self.samples

    def estimate(self) -> Estimate | None:
        """Mean over all samples; None if there are none."""
        return mean_of(self.totals())


def bootstrap(totals: Totals, *, confidence: float) -> tuple[float, float]:
    """Percentile interval of the mean of all samples, drawing tasks with replacement (B. Efron, 1979).

    If many tasks have equal totals (solved or not), the counts of each kind are drawn from a multinomial distribution
    instead. From `NORMAL_TASKS` tasks with differing scores on, the interval of the normal distribution is returned.
    """
    import numpy as np

    rng = np.random.default_rng(0)
    sums, counts = _columns(totals)
    order = np.lexsort((counts, sums))  # makes the interval independent of the order of tasks
    sums, counts, tasks = sums[order], counts[order], len(sums)
    kinds, sizes = np.unique(np.stack([sums, counts]), axis=1, return_counts=True)
    means = []
    if ALIKE * len(sizes) <= tasks:
        drawn = rng.multinomial(tasks, sizes / tasks, size=RESAMPLES)
        means.append((drawn @ kinds[0]) / (drawn @ kinds[1]))
    elif tasks >= NORMAL_TASKS:
        middle, error = clustered(totals)
        reach = error * NormalDist().inv_cdf((1 + confidence) / 2)
        return middle - reach, middle + reach
    step = max(1, CHUNK // tasks)
    for start in range(0, 0 if means else RESAMPLES, step):
        drawn = rng.integers(0, tasks, size=(min(step, RESAMPLES - start), tasks))
        means.append(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(low), float(high)


def _columns(totals: Totals) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    import numpy as np

    columns = np.asarray(totals, dtype=float)
    return columns[:, 0], columns[:, 1]


def mean(scores: Scores, *, confidence: float = CONFIDENCE) -> Estimate | None:
    """Mean over all samples; None if there are none."""
    return mean_of([(math.fsum(values), len(values)) for values in scores if values], confidence=confidence)


def mean_of(totals: Totals, *, confidence: float = CONFIDENCE) -> Estimate | None:
    """Mean over all samples, from the sum and number of each task's scores; None if there are none."""
    if not len(totals):
        return None
    return Estimate(*clustered(totals), *bootstrap(totals, confidence=confidence))


def share_of(totals: Totals) -> Estimate | None:
    """Share of successes over all samples, from the successes and samples of each task; None if there are none.

    The interval is Wilson's (1927), which is not empty at 0 and 1, with as many samples as independent ones with the
    same clustered error would be: n = p (1 - p) / stderr^2, at most all of them. At 0 and 1 the clustering is unknown,
    and all samples count.
    """
    totals = [(successes, samples) for successes, samples in totals if samples]
    if not totals:
        return None
    share, stderr = clustered(totals)
    number = float(sum(samples for _, samples in totals))
    if 0 < share < 1 and stderr:
        number = min(number, share * (1 - share) / stderr**2)
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    middle = (share + z * z / (2 * number)) / (1 + z * z / number)
    reach = z / (1 + z * z / number) * math.sqrt(share * (1 - share) / number + z * z / (4 * number * number))
    low, high = max(0.0, middle - reach), min(1.0, middle + reach)
    return Estimate(share, stderr, low if share else 0.0, high if share < 1 else 1.0)


def bounds(scores: Sequence[float], unscored: int, *, highest: float | None = 1.0) -> tuple[float, float] | None:
    """Mean if every sample without a score had the lowest score, and if every one had the highest.

    Args:
        highest: score of a perfect episode; None if unknown. The lowest is 0. A score beyond one of these limits
            replaces it.
    """
    if unscored <= 0 or highest is None:
        return None
    number, total = len(scores) + unscored, math.fsum(scores)
    lowest, highest = min([0.0, *scores]), max([highest, *scores])
    return (total + unscored * lowest) / number, (total + unscored * highest) / number


def pass_at(samples: int, solved: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples is correct: 1 - C(n - c, k) / C(n, k).

    Chen et al., "Evaluating Large Language Models Trained on Code", 2021.
    """
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def pass_all(samples: int, solved: int, k: int) -> float:
    """Unbiased estimate of the probability that all of k samples are correct ("pass^k"): C(c, k) / C(n, k).

    Yao et al., "tau-bench", 2024.
    """
    return math.comb(solved, k) / math.comb(samples, k)


def passes(counts: Totals, *, confidence: float = CONFIDENCE) -> dict[int, tuple[Estimate, Estimate]]:
    """pass@k and pass^k for k = 1, 2, 4, ... and the number of epochs, over tasks with at least k valid samples.

    Args:
        counts: number of valid samples that solved the task, and number of valid samples, of each task.
    """
    import numpy as np

    if not len(counts):
        return {}
    kinds, sizes = np.unique(np.asarray(counts, dtype=int), axis=0, return_counts=True)  # many tasks are equal
    most = int(kinds[:, 1].max())

    def estimate(chance: Callable[[int, int, int], float], k: int) -> Estimate | None:
        enough = kinds[:, 1] >= k
        values = [chance(samples, solved, k) for solved, samples in kinds[enough].tolist()]
        totals = np.repeat(np.column_stack([values, np.ones(len(values))]), sizes[enough], axis=0)
        return mean_of(totals, confidence=confidence)

    result: dict[int, tuple[Estimate, Estimate]] = {}
    for k in sorted({*(2**i for i in range(most.bit_length())), most} - {0}):
        at, all_of = estimate(pass_at, k), estimate(pass_all, k)
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
    """Its interval contains every difference that the test does not reject, so it excludes 0 exactly if `verdict` is
    "better" or "worse". If too few tasks differ to reject any, it is as wide as the range of scores."""
    p_value: float
    """Probability of a difference at least this large if A and B were interchangeable on every task."""
    verdict: Literal["better", "worse", "noise"]
    """Verdict on B relative to A, from `p_value` at the chosen confidence alone."""
    better: int
    """Number of tasks on which B's mean is higher."""
    worse: int
    """Number of tasks on which B's mean is lower."""


def compare(
    a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]], *, confidence: float = CONFIDENCE
) -> PairedDifference | None:
    """Compare two runs' scores, paired by task; None if no task has valid samples in both."""
    tasks = sorted(task for task in a.keys() & b.keys() if a[task] and b[task])
    if not tasks:
        return None
    means_a = [math.fsum(a[task]) / len(a[task]) for task in tasks]
    means_b = [math.fsum(b[task]) / len(b[task]) for task in tasks]
    differences = [two - one for one, two in zip(means_a, means_b, strict=True)]
    test = SignFlipTest(differences)
    value, error = clustered([(value, 1) for value in differences])
    sure = test.p_value() < 1 - confidence
    scores = [*means_a, *means_b]
    return PairedDifference(
        tasks=len(tasks),
        mean_a=math.fsum(means_a) / len(tasks),
        mean_b=math.fsum(means_b) / len(tasks),
        difference=Estimate(value, error, *test.interval(confidence, widest=max(scores) - min(scores))),
        p_value=test.p_value(),
        verdict="noise" if not sure else "better" if value > 0 else "worse",
        better=sum(value > 1e-12 for value in differences),
        worse=sum(value < -1e-12 for value in differences),
    )


class SignFlipTest:
    """Two-sided paired permutation test (R. A. Fisher, 1935): under the null hypothesis each pair's sign is random.

    Exact if all sign patterns can be enumerated; else it draws `FLIPS` random patterns and adds the +1 that keeps the
    test valid.
    """

    EXACT = 14
    """Maximum number of tasks for which all sign patterns are enumerated."""

    def __init__(self, differences: Sequence[float]) -> None:
        import numpy as np

        self._moved = np.array([value for value in differences if abs(value) > 1e-12], dtype=float)
        self._tasks, self._total = len(differences), math.fsum(self._moved)
        if self._tasks <= self.EXACT:
            patterns = _patterns(self._tasks)
            self._sums = self._moved @ patterns[: len(self._moved)]
            self._signs, self._extra = patterns.sum(axis=0), 0
            return
        rng, number = np.random.default_rng(0), len(self._moved)
        step = max(1, CHUNK // max(1, number))
        sums, signs = [], []
        for start in range(0, FLIPS, step):
            drawn = rng.integers(0, 2, size=(min(step, FLIPS - start), number)) * 2.0 - 1.0
            sums.append(np.einsum("ij,j->i", drawn, self._moved))  # `@` would start BLAS threads
            signs.append(drawn.sum(axis=1))
        alike = self._tasks - number  # for tasks without a difference, only the sum of signs matters
        self._sums = np.concatenate(sums)
        self._signs = np.concatenate(signs) + 2.0 * rng.binomial(alike, 0.5, size=FLIPS) - alike
        self._extra = 1

    def p_value(self, shift: float = 0.0) -> float:
        """The p-value of the hypothesis that the differences are symmetric around `shift`."""
        import numpy as np

        observed = abs(self._total - shift * self._tasks) - 1e-9
        if not shift and len(self._moved) <= self.EXACT:
            return float((np.abs(self._moved @ _patterns(len(self._moved))) >= observed).mean())
        hits = int((np.abs(self._sums - shift * self._signs) >= observed).sum())
        return (hits + self._extra) / (len(self._sums) + self._extra)

    def interval(self, confidence: float, *, widest: float) -> tuple[float, float]:
        """Range of the shifts that are not rejected, at most `widest` away from 0."""
        middle = self._total / self._tasks
        return self._end(middle, -widest, 1 - confidence), self._end(middle, widest, 1 - confidence)

    def _end(self, inside: float, outside: float, level: float) -> float:
        """The last shift from `inside` towards `outside` that is not rejected, found by bisection."""
        if self.p_value(outside) >= level:
            return outside
        for candidate in [0.0] if min(inside, outside) < 0 < max(inside, outside) else []:
            # the interval must agree with the verdict even if p is not monotonic in between
            inside, outside = (candidate, outside) if self.p_value(candidate) >= level else (inside, candidate)
        for _ in range(50):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if self.p_value(middle) >= level else (inside, middle)
        return inside


def _patterns(number: int) -> NDArray[np.float64]:
    """All combinations of signs, [number, 2**number]."""
    import numpy as np

    bits = np.arange(2**number) >> np.arange(number)[:, None] & 1
    return np.where(bits, -1.0, 1.0)
