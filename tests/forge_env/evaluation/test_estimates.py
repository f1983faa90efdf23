"""Statistics against brute force and known formulas."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_env.config.evaluation import EvaluationConfig
from forge_env.evaluation.estimates import (
    SignFlipTest,
    TaskScores,
    bootstrap,
    clustered,
    compare,
    mean,
    pass_all,
    pass_at,
    passes,
    share_of,
)
from forge_env.evaluation.plan import Planned, result_of
from forge_env.evaluation.progress import EvaluationProgress
from forge_env.evaluation.results import ResultTable
from forge_env.evaluation.summary import summarize
from forge_env.trajectory import Trajectory

outcomes = st.lists(st.booleans(), min_size=1, max_size=7)


@given(outcomes, st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(solved: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(solved)))
    subsets = list(itertools.combinations(solved, k))
    assert pass_at(len(solved), sum(solved), k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert pass_all(len(solved), sum(solved), k) == pytest.approx(sum(map(all, subsets)) / len(subsets))


def test_one_sample_a_task_gives_the_usual_error() -> None:
    values = [0.1, 0.5, 0.4, 0.9, 1.0]
    found = mean([[value] for value in values])
    assert found.value == pytest.approx(statistics.mean(values))
    assert found.stderr == pytest.approx(statistics.stdev(values) / math.sqrt(len(values)))
    assert found.low <= found.value <= found.high


def test_repeating_samples_of_a_task_does_not_shrink_the_error() -> None:
    once, often = mean([[0.0], [1.0], [1.0]]), mean([[0.0] * 50, [1.0] * 50, [1.0] * 50])
    assert often.stderr == pytest.approx(once.stderr)
    assert (often.low, often.high) == pytest.approx((once.low, once.high))


def test_the_bootstrap_agrees_with_the_clustered_error() -> None:
    rng = np.random.default_rng(1)
    counts = rng.integers(1, 5, size=200)
    totals = list(zip((rng.normal(0.5, 0.3, size=200) * counts).tolist(), counts.tolist(), strict=True))
    low, high = bootstrap(totals, confidence=0.95)
    assert (high - low) / (2 * 1.96) == pytest.approx(clustered(totals)[1], rel=0.15)


def test_drawing_kinds_of_tasks_is_drawing_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    counts = rng.integers(1, 3, size=400)
    totals = list(zip(rng.binomial(counts, 0.3).tolist(), counts.tolist(), strict=True))
    kinds = bootstrap(totals, confidence=0.9)
    monkeypatch.setattr("forge_env.evaluation.estimates.ALIKE", 1000)
    assert kinds == pytest.approx(bootstrap(totals, confidence=0.9), abs=0.005)


def test_tasks_with_too_few_valid_samples_are_left_out_of_larger_k() -> None:
    found = passes([(2, 3), (0, 1), (0, 0)])
    assert list(found) == [1, 2, 3]
    assert found[1][0].value == pytest.approx((2 / 3 + 0) / 2)
    assert found[2][0].value == pytest.approx(1.0)
    assert found[2][1].value == pytest.approx(1 / 3)


def test_training_and_evaluation_score_the_same_episodes_alike() -> None:
    played = [
        Trajectory(
            id=f"toy/eval/{index}/{epoch}",
            environment="toy",
            task_id=f"task-{index}",
            split="eval",
            reward=float((index + epoch) % 3 == 0),
            valid=(index, epoch) != (1, 1),
            info={"index": index, "epoch": epoch, "max_reward": 1.0, "usage": {}},
        )
        for index in range(4)
        for epoch in range(3)
    ]
    config = EvaluationConfig.model_validate({"environments": ["toy"], "model": "gold"})
    results = ResultTable(result_of(item, "reward") for item in played)
    summary = summarize(config, results, {"toy": Planned("eval", 12, 12)}, EvaluationProgress("first", "gold"))
    scores = TaskScores()
    for item in played:
        if item.valid:
            scores.add(item.task_id, item.reward)
    held_out = scores.estimate()
    assert held_out == summary.environments["toy"].score
    rewards = [item.reward for item in played if item.valid]
    assert held_out.stderr != pytest.approx(statistics.stdev(rewards) / math.sqrt(len(rewards)))  # as if independent
    assert TaskScores().estimate() is None


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(-100, 100)), min_size=1, max_size=60))
def test_scores_that_are_added_one_at_a_time_give_the_same_figures(scored: list[tuple[int, float]]) -> None:
    scores, by_task = TaskScores(), dict[int, list[float]]()
    for task, value in scored:
        scores.add(str(task), value)
        by_task.setdefault(task, []).append(value)
    totals = [(math.fsum(values), len(values)) for values in by_task.values()]
    assert (len(scores), scores.samples) == (len(by_task), len(scored))
    assert scores.so_far() == pytest.approx(clustered(totals), rel=1e-6, abs=1e-4)
    assert scores.totals() == pytest.approx(np.array(totals), abs=1e-9)


def test_an_interval_of_very_many_tasks_is_the_bootstrapped_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes minutes for a million."""
    rng = np.random.default_rng(5)
    totals = [(value, 1) for value in rng.beta(0.5, 2.0, size=4_000).tolist()]
    drawn = bootstrap(totals, confidence=0.95)
    monkeypatch.setattr("forge_env.evaluation.estimates.NORMAL_TASKS", 4_000)
    assert bootstrap(totals, confidence=0.95) == pytest.approx(drawn, abs=0.001)


def test_nothing_gives_nothing() -> None:
    assert mean([]) is None
    assert mean([[], []]) is None
    assert passes([]) == {}
    assert compare({"a": [1.0]}, {"b": [1.0]}) is None


def test_a_comparison_pairs_tasks() -> None:
    a = {f"t{i}": [i / 10] for i in range(10)} | {"only_a": [0.0]}
    b = {f"t{i}": [i / 10 + 0.1] for i in range(10)}
    found = compare(a, b)
    assert (found.tasks, found.better, found.worse) == (10, 10, 0)
    assert found.difference.value == pytest.approx(0.1)
    assert found.difference.stderr == pytest.approx(0.0, abs=1e-9)
    assert found.p_value == pytest.approx(2 / 2**10)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=7))
def test_the_permutation_test_is_symmetric_and_a_probability(differences: list[float]) -> None:
    p = SignFlipTest(differences).p_value()
    assert 0 < p <= 1
    assert SignFlipTest([-value for value in differences]).p_value() == pytest.approx(p)


def test_random_flips_agree_with_all_of_them() -> None:
    rng = np.random.default_rng(2)
    values = rng.normal(0.3, 1.0, size=14).tolist()
    extra = [*values, 1e-6]  # one more than is tried exactly, which changes next to nothing
    assert SignFlipTest(extra).p_value() == pytest.approx(SignFlipTest(values).p_value(), abs=0.02)


def test_a_share_has_an_interval_at_its_ends_and_a_wider_one_if_samples_are_alike() -> None:
    alike = share_of([(10, 10)] * 5 + [(0, 10)] * 5)
    mixed = share_of([(5, 10)] * 10)
    whole = share_of([(10, 10)] * 10)
    assert alike.high - alike.low > 2 * (mixed.high - mixed.low)
    assert (round(mixed.low, 3), round(mixed.high, 3)) == (0.404, 0.596)  # Wilson's of 50 of 100
    assert (whole.value, whole.high) == (1.0, 1.0)
    assert round(whole.low, 3) == 0.963
    assert share_of([(0, 0)]) is None
