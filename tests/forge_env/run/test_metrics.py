"""metrics.jsonl, TensorBoard and curves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from forge_env.config import RunConfig
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


def test_every_line_is_json(tmp_path: Path) -> None:
    sink = JSONLMetrics(tmp_path / "m.jsonl", lambda: 0.0)
    sink.log(1, {"x": float("inf"), "y": 1})
    sink.close()
    assert [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
