"""Destinations of metrics: metrics.jsonl always, and TensorBoard, Weights & Biases and plug-ins as the recipe says.

A plug-in of the group `forge_env.loggers` is called with the run's folder and recipe, `Logger(folder, config)`, and has
the methods of `MetricsLogger`, or of `EpisodeLogger` to receive episodes too. `forge_env.run.trackers` has three
loggers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from forge_env.config.recipe import RunConfig
from forge_env.errors import PluginError, UsageError
from forge_env.files import LineWriter
from forge_env.plugins import load_plugin
from forge_env.reading import LARGEST_TABLE, LONGEST_ROW, is_bounded, open_file, whole_lines
from forge_env.run.folder import RunFolder
from forge_env.run.trackers import Tracker, WandbLogger, start_tracker
from forge_env.schema import with_schema, without_schema

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    from forge_env.trajectory import Trajectory

GROUP = "forge_env.loggers"
REWARD = "reward/mean"
"""Mean reward of the training batch."""
LARGEST_STEP = 53
"""Maximum bits of a step."""


@runtime_checkable
class MetricsLogger(Protocol):
    """Receives every row of metrics. A plug-in is a class with these methods."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one row."""

    def close(self) -> None:
        """Flush and release resources."""


@runtime_checkable
class EpisodeLogger(MetricsLogger, Protocol):
    """A logger that also receives some held-out episodes of every evaluation."""

    def log_episodes(self, step: int, split: str, episodes: Sequence[Trajectory]) -> None:
        """Record episodes of the evaluation of `split` after training step `step`."""


class JSONLMetrics:
    """metrics.jsonl: one line per row, handed to the operating system at once, so that a killed run loses no row."""

    def __init__(self, path: Path, clock: Callable[[], float], on_full: Callable[[], object] = lambda: None) -> None:
        self._clock = clock
        self._file = LineWriter(path, on_full=on_full)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a row; NaN and infinities become null, which every JSON reader accepts."""
        row: dict[str, Any] = {"step": step, "time": round(self._clock(), 3)}
        row |= {key: float(value) if math.isfinite(value) else None for key, value in metrics.items()}
        self._file.append(json.dumps(with_schema(row)).encode())

    @property
    def is_made(self) -> bool:
        """Whether the file has been created (see `LineWriter.is_made`)."""
        return self._file.is_made

    def move(self, folder: RunFolder) -> None:
        """Continue in another run folder, taking all rows along."""
        self._file.move(folder.metrics)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics.jsonl in order, skipping damaged lines and the incomplete last line of a killed run.

    Raises:
        UsageError: a row is of a newer version than this forge-env reads, or the file is not read (`open_file`).
    """
    if not path.exists():
        return
    with open_file(path, largest=LARGEST_TABLE) as file:
        for line in whole_lines(file, LONGEST_ROW):
            if (row := metrics_row(line.text, path)) is not None:
                yield row


def metrics_row(line: str | bytes, path: Path) -> dict[str, Any] | None:
    """Parse a row of a metrics.jsonl: its step and every value that is a number or null; None if the line is damaged.

    Raises:
        UsageError: it is of a newer version than this forge-env reads.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or "step" not in row:
        return None
    row = without_schema(row, str(path))
    try:
        step = int(row.pop("step"))
    except (ValueError, TypeError, OverflowError):
        return None
    if step.bit_length() > LARGEST_STEP:
        return None
    figures = {
        key: value
        for key, value in row.items()
        if (value is None or isinstance(value, int | float)) and is_bounded(value)
    }
    return {"step": step, **figures}


class TensorBoardMetrics:
    """TensorBoard events, written by the tensorboard package without torch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: EventFileWriter | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event with a scalar for every metric."""
        import time

        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = self._writer or EventFileWriter(str(self._folder))
        values = [Summary.Value(tag=key, simple_value=float(value)) for key, value in metrics.items()]
        try:
            self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
            self._writer.flush()
        except OSError:  # its writer thread has ended: the next row starts a new file
            self._writer = None
            raise

    def move(self, folder: RunFolder) -> None:
        """Continue in another run folder with a new event file; events of a removed folder are lost."""
        writer, self._writer, self._folder = self._writer, None, folder.tensorboard
        if writer is not None:
            with suppress(OSError):
                writer.close()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()


def check_loggers(config: RunConfig) -> None:
    """Refuse a recipe whose loggers can't work here.

    Raises:
        UsageError: a logger isn't installed, or isn't logged in.
        PluginError: a logger can't be imported, or is not a logger.
    """
    for name in config.logging.loggers:
        logger_class = _logger_class(name)
        if isinstance(logger_class, type) and issubclass(logger_class, Tracker):
            logger_class.check()
    if config.logging.tensorboard and find_spec("tensorboard") is None:
        raise UsageError(
            "logging.tensorboard is on, but tensorboard isn't installed",
            fix="pip install tensorboard, or add logging.tensorboard=false",
        )
    if config.logging.wandb:
        WandbLogger.check()


def _logger_class(name: str) -> Callable[[RunFolder, RunConfig], MetricsLogger]:
    plugin = load_plugin(GROUP, name)
    if not (isinstance(plugin, type) and issubclass(plugin, MetricsLogger)):
        fix = "it must be a class with the methods log and close"
        raise PluginError(f"logger {name!r}: {plugin!r} is not a logger", fix=fix)
    logger_class: Callable[[RunFolder, RunConfig], MetricsLogger] = plugin
    return logger_class


def open_loggers(
    config: RunConfig, folder: RunFolder, clock: Callable[[], float], on_full: Callable[[], object] = lambda: None
) -> list[MetricsLogger]:
    """Open the loggers that the recipe asks for (see `check_loggers`).

    `on_full` is called when rows wait in memory for disk space.
    """
    loggers: list[MetricsLogger] = [JSONLMetrics(folder.metrics, clock, on_full)]
    if config.logging.tensorboard:
        loggers.append(TensorBoardMetrics(folder.tensorboard))
    if config.logging.wandb:
        loggers.append(start_tracker(WandbLogger, folder, config))
    loggers += [start_tracker(_logger_class(name), folder, config) for name in config.logging.loggers]
    return loggers
