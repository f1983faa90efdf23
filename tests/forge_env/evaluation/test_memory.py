"""Evaluations of more samples than memory has room for: what is planned, under way and kept."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forge_env as fe
from forge_env.errors import UsageError
from forge_env.evaluation.evaluation import CHECKED_TASKS
from forge_env.evaluation.plan import Plan, SampleResult, Share
from forge_env.evaluation.results import Results, ResultTable
from tests.forge_env.evaluation.toys import Sums

MILLION = 1_000_000


class Endless(Sums):
    """Adding one, without end."""

    made = 0

    def task(self, split: str, index: int) -> fe.Task:
        type(self).made += 1
        return super().task(split, index)

    def num_tasks(self, split: str) -> int | None:
        return None


def result(index: int, epoch: int = 0, **fields: Any) -> SampleResult:
    figures = dict.fromkeys(
        ("reward", "wall_s", "waited_s", "generate_s", "step_s", "reset_s", "close_s", "cost"), index / 7
    )
    counts = dict.fromkeys(("prompt_tokens", "completion_tokens", "cached_tokens", "turns"), index)
    given = {
        "id": f"Sums/eval/{index}/{epoch}",
        "environment": "Sums",
        "task_id": f"eval-{index}",
        "split": "eval",
        "epoch": epoch,
        "score": float(index % 3 == 0),
        "max_score": 1.0,
        "metrics": {"exact_match": float(index % 3 == 0), "length": float(index)},
        "valid": True,
        "truncation": None,
        "error": None,
        "difficulty": 1 + index % 3,
        "tags": ["all", f"mod{index % 5}"],
        "retries": 0,
    }
    return SampleResult(**{**figures, **counts, **given, **fields})


# --- what is planned


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=4))
def test_every_sample_is_planned_once_and_environments_take_turns(sizes: list[tuple[int, int]]) -> None:
    shares = [Share(f"env{number}", "eval", tasks, epochs) for number, (tasks, epochs) in enumerate(sizes)]
    samples = list(Plan(shares))
    wanted = {
        (share.label, index, epoch) for share in shares for index in range(share.tasks) for epoch in range(share.epochs)
    }
    assert len(samples) == len(Plan(shares)) == len(wanted)
    assert {(sample.label, sample.index, sample.epoch) for sample in samples} == wanted
    for share in shares:
        own = [sample for sample in samples if sample.label == share.label]
        assert [share.number("eval", sample.index, sample.epoch) for sample in own] == list(range(len(share)))
        half = sum(sample.label == share.label for sample in samples[: len(samples) // 2])
        assert abs(half - len(share) / 2) <= 1.5


@given(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 1))), st.sets(st.integers(0, 9)))
def test_a_plan_without_some(unwanted: set[tuple[int, int]], done: set[int]) -> None:
    plan = Plan([Share("a", "eval", 5, 2), Share("b", "eval", 3, 1)])
    fewer = plan.only(lambda sample: (sample.index, sample.epoch) not in unwanted)
    rest = fewer.without(("a", number) for number in done)
    expected = [
        sample
        for sample in plan
        if (sample.index, sample.epoch) not in unwanted
        and not (sample.label == "a" and sample.epoch * 5 + sample.index in done)
    ]
    assert list(rest) == expected
    assert len(rest) == len(expected)


def test_a_hundred_million_samples_are_planned_without_a_list_of_them() -> None:
    tracemalloc.start()
    plan = Plan([Share("a", "eval", 100 * MILLION, 4), Share("b", "eval", 100 * MILLION, 1)])
    first = list(itertools.islice(plan, 10))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(plan) == 500 * MILLION
    assert [sample.label for sample in first].count("a") == 8
    assert peak < MILLION


def test_more_samples_than_could_ever_be_played_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="are too many") as refused:
        fe.evaluate(Endless, "gold", num_tasks=10**12, epochs=10**12, out=tmp_path / "out")
    assert refused.value.fix == "lower --num-tasks or --epochs"
    assert not (tmp_path / "out").exists()


# --- what is under way


async def test_of_a_hundred_million_samples_as_many_are_under_way_as_may_be(tmp_path: Path) -> None:
    """They were listed before the first was played."""
    under_way, never = asyncio.Event(), asyncio.Event()

    async def wait(messages: list[fe.Message], tools: list[fe.ToolSpec]) -> str:
        under_way.set()
        await never.wait()
        return ""

    Endless.made = 0
    before = len(asyncio.all_tasks())
    work = fe.evaluate_async(Endless, wait, num_tasks=100 * MILLION, max_samples=10, out=tmp_path / "out")
    evaluation = asyncio.ensure_future(work)
    await under_way.wait()
    for _ in range(100):
        await asyncio.sleep(0)
    assert Endless.made < CHECKED_TASKS + 50, "ids of the first ones are compared before"
    assert len(asyncio.all_tasks()) - before < 50
    evaluation.cancel()
    await asyncio.gather(evaluation, return_exceptions=True)


# --- what is kept


texts = st.text(max_size=4)
numbers = st.floats(allow_nan=False, width=64)


@given(
    st.lists(
        st.builds(
            result,
            st.integers(0, 4),
            st.integers(0, 2),
            score=numbers,
            max_score=st.none() | numbers,
            metrics=st.dictionaries(texts, numbers, max_size=3),
            valid=st.booleans(),
            truncation=st.none() | texts,
            error=st.none() | texts,
            tags=st.lists(texts, max_size=2),
            cost=numbers,
            prompt_tokens=st.integers(0, 10**9),
        ),
        max_size=12,
    )
)
def test_results_come_back_as_they_were_added_the_last_of_each_sample(added: list[SampleResult]) -> None:
    table = ResultTable(added)
    assert [table.result(row) for row in range(len(table))] == added
    latest = {item.id: item for item in added}
    kept = Results(table, table.latest(["Sums"].index))
    assert list(kept) == sorted(latest.values(), key=lambda item: (item.epoch, int(item.id.split("/")[2])))
    assert kept[: len(kept)] == kept
    assert kept == list(kept)


def test_a_result_takes_a_few_hundred_bytes() -> None:
    """As an object, it took more than a thousand."""
    tracemalloc.start()
    table = ResultTable(result(index) for index in range(20_000))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(table) == 20_000
    assert size < 20_000 * 600


@pytest.mark.slow
def test_a_million_results_are_summed_up_in_less_than_a_gigabyte() -> None:
    code = """
import re
from pathlib import Path
from forge_env.config.evaluation import EvaluationConfig
from forge_env.evaluation.plan import Planned
from forge_env.evaluation.progress import EnvironmentProgress, EvaluationProgress
from forge_env.evaluation.results import ResultTable
from forge_env.evaluation.summary import summarize
from tests.forge_env.evaluation.test_memory import MILLION, result

config = EvaluationConfig.model_validate({"environments": ["Sums"], "model": "gold"})
table, progress = ResultTable(), EvaluationProgress("many", "gold")
progress.environments["Sums"] = EnvironmentProgress(MILLION)
for index in range(MILLION):
    item = result(index)
    table.add(item)
    progress.environments["Sums"].add(item)
summary = summarize(config, table, {"Sums": Planned("eval", MILLION, MILLION)}, progress)
item = summary.environments["Sums"]
assert (item.samples, item.tasks, item.missing) == (MILLION, MILLION, 0), item
assert abs(item.score.value - 1 / 3) < 1e-5, item.score
assert sorted(item.by_tag) == ["all", "mod0", "mod1", "mod2", "mod3", "mod4"]
print(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])  # `ru_maxrss` counts the parent's too
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1_000_000, "kB"
