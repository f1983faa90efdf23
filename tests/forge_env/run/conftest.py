"""A recipe, a folder to run in, and a run with a clock of its own."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from forge_env.config import RunConfig
from forge_env.display.training import TrainingView
from forge_env.run import Run, RunFolder
from forge_env.run.metrics import JSONLMetrics
from forge_env.run.state import RunState
from forge_env.terminal import PlainDisplay


@pytest.fixture
def config() -> RunConfig:
    return RunConfig.model_validate({"environment": {"name": "coding_rlvr"}})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "runs" / "first")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(clock: Clock) -> RunState:
    return RunState("first", max_staleness=2, clock=clock)


def plain_run(config: RunConfig, folder: RunFolder, state: RunState) -> tuple[Run, io.StringIO]:
    folder.create()
    stream = io.StringIO()
    sink = JSONLMetrics(folder.metrics, lambda: state.elapsed)
    run = Run(config, folder, state=state, loggers=[sink])
    run.events.subscribe(PlainDisplay(TrainingView(state), stream))
    return run, stream
