"""metrics.jsonl, TensorBoard and curves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_env.config import RunConfig
from forge_env.display.curves import curve, evaluation_splits, merge_rows, score_curve, time_account
from forge_env.display.svg import line_chart, number, ticks
from forge_env.errors import ForgeError
from forge_env.run.folder import RunFolder
from forge_env.run.metrics import JSONLMetrics, TensorBoardMetrics, check_loggers, open_loggers, read_metrics


def test_rows_are_readable_as_soon_as_they_are_logged(tmp_path: Path) -> None:
    sink = JSONLMetrics(tmp_path / "m.jsonl", lambda: 1.5)
    sink.log(3, {"a": 1.0, "b": float("nan")})
    assert list(read_metrics(tmp_path / "m.jsonl")) == [{"step": 3, "time": 1.5, "a": 1.0, "b": None}]
    sink.close()


def test_half_a_line_of_a_killed_run_costs_that_line_only(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a"')
    sink = JSONLMetrics(path, lambda: 0.0)
    sink.log(2, {"a": 5.0})
    sink.close()
    assert [(row["step"], row["a"]) for row in read_metrics(path)] == [(1, 1), (2, 5.0)]


class Kept:
    """A logger of a third party."""

    rows: list[tuple[int, dict[str, float]]] = []

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        self.name = config.environment.name

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((step, dict(metrics)))

    def close(self) -> None:
        self.rows.clear()


def test_loggers_are_plugins(config: RunConfig, folder: RunFolder) -> None:
    folder.root.mkdir(parents=True)
    config.logging.tensorboard = False
    config.logging.loggers = ["tests.forge_env.run.test_metrics:Kept"]
    check_loggers(config)
    loggers = open_loggers(config, folder, lambda: 0.0)
    for logger in loggers:
        logger.log(1, {"a": 2.0})
    assert Kept.rows == [(1, {"a": 2.0})]
    for logger in loggers:
        logger.close()
    wrongs = [("nothing", "no logger 'nothing'"), ("json:dumps", "is not a logger"), ("nowhere:X", "nowhere")]
    for wrong, said in wrongs:
        config.logging.loggers = [wrong]
        with pytest.raises(ForgeError, match=said):
            check_loggers(config)


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert list(read_metrics(tmp_path / "none.jsonl")) == []


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardMetrics(tmp_path)
    sink.log(1, {"reward/mean": 0.25})
    sink.log(2, {"reward/mean": 0.5})
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


def test_tensorboard_needs_no_torch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    code = (
        "import sys; from pathlib import Path; from forge_env.run.metrics import TensorBoardMetrics\n"
        f"sink = TensorBoardMetrics(Path({str(tmp_path)!r})); sink.log(1, {{'a': 1.0}}); sink.close()\n"
        "assert not {'torch', 'tensorflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_last_row_of_a_step_counts() -> None:
    rows = merge_rows([{"step": 2, "a": 1.0}, {"step": 1, "a": 0.0}, {"step": 2, "a": 3.0, "b": 1.0}])
    assert curve(rows, "a", "a").y == [0.0, 3.0]
    assert curve(rows, "b", "b").x == [2.0]


def test_scores_and_splits_come_from_the_rows() -> None:
    rows = [{"step": 0, "eval/eval/score": 0.5, "eval/eval/stderr": 0.1}, {"step": 0, "eval/unseen/score": 0.1}]
    assert evaluation_splits(rows) == ["eval", "unseen"]
    assert score_curve(rows, "eval").error == [0.1]


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["time/trainer/step", "time/trainer/wait", "time/generator/busy", "reward"]),
            st.floats(min_value=0, max_value=1e6),
        )
    )
)
def test_the_shares_of_an_actor_sum_to_one(rows: list[dict[str, float]]) -> None:
    for account in time_account(rows).values():
        assert sum(account.values()) == pytest.approx(1.0)


@given(st.floats(min_value=-1e9, max_value=1e9), st.floats(min_value=-1e9, max_value=1e9))
def test_ticks_cover_the_range_with_few_marks(first: float, second: float) -> None:
    low, high = min(first, second), max(first, second)
    marks = ticks(low, high)
    span = marks[-1] - marks[0]
    assert marks[0] <= low + 1e-6 * span
    assert marks[-1] >= high - 1e-6 * span
    assert 2 <= len(marks) <= 12


@given(st.lists(st.tuples(st.integers(0, 1000), st.floats(min_value=-1e6, max_value=1e6)), min_size=1, max_size=50))
def test_any_curve_can_be_drawn(points: list[tuple[int, float]]) -> None:
    rows = merge_rows([{"step": step, "y": y} for step, y in points])
    text = line_chart([curve(rows, "<y>", "y")], label='a "label"')
    assert text.startswith("<svg")
    assert "nan" not in text
    assert "<y>" not in text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.25, "0.25"), (1234, "1,234"), (34_000, "34k"), (1.234e6, "1.23M"), (1e-6, "1e-06")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_every_line_is_json(tmp_path: Path) -> None:
    sink = JSONLMetrics(tmp_path / "m.jsonl", lambda: 0.0)
    sink.log(1, {"x": float("inf"), "y": 1})
    sink.close()
    assert [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
