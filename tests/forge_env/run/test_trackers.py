"""Trackers that are absent, or that fail, and what they receive."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import forge_env as fe
from forge_env.config import load_config
from forge_env.errors import UsageError
from forge_env.redaction import add
from forge_env.rollout.scripted import ReplayPolicy
from forge_env.run import Run, RunFolder
from forge_env.run.metrics import EpisodeLogger, check_loggers, open_loggers
from forge_env.run.trackers import (
    LONGEST_MESSAGE,
    MLflowLogger,
    Tracker,
    TrackioLogger,
    WandbLogger,
    _mlflow_name,
    conversation,
    summary_of,
)
from forge_env.trajectory import Trajectory


class Unreachable(Tracker):
    """A tracker whose server is gone."""

    package, install = "no_such_tracker", "pip install it"

    def __init__(self, *_: object) -> None:
        self.received: list[tuple[int, str, list[str]]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise ValueError(f"no route to the server\n{'x' * 1_000}")

    def log_episodes(self, step: int, split: str, episodes: Sequence[Trajectory]) -> None:
        self.received.append((step, split, [episode.task_id for episode in episodes]))
        raise ConnectionRefusedError("no")

    def close(self, exit: str = "success") -> None:
        raise TimeoutError


async def played(count: int = 1, text: str = "42") -> list[Trajectory]:
    class Asked(fe.SingleTurnEnvironment):
        reward = fe.rewards.ExactMatch()

        def task(self, split: str, index: int) -> fe.Task:
            return fe.Task(id=f"{split}-{index}", split=split, prompt="What is 6 * 7?", gold="42")

    return [await fe.run_episode(Asked, ReplayPolicy([text]), seed=seed) for seed in range(count)]


async def test_a_tracker_that_fails_ends_no_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    tracker = Unreachable()
    run = Run(load_config("coding_rlvr"), folder, loggers=[tracker])
    for episode in await played(20):
        run.trajectory(episode, "eval-00003")
    run.log(1, {"reward/mean": 0.5})
    await run.log_episodes(3, "eval")
    await run.log_episodes(4, "eval")  # nothing is recorded for it
    run.close()
    folder.release()
    assert [(step, split, len(ids)) for step, split, ids in tracker.received] == [(3, "eval", 8)]
    errors = sorted(text.partition("(")[2].partition(")")[0] for text in run.state.warnings)
    assert errors == ["ConnectionRefusedError", "TimeoutError", "ValueError"]
    assert all(len(text) < 300 for text in run.state.warnings)


@pytest.mark.parametrize(("tracker", "name"), [(TrackioLogger, "trackio"), (MLflowLogger, "mlflow")])
def test_missing_tracker_is_named_early(tracker: type[Tracker], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert issubclass(tracker, EpisodeLogger)
    monkeypatch.setattr("forge_env.run.trackers.find_spec", lambda package: None)
    with pytest.raises(UsageError, match=f"logging.loggers names {name}, which isn't installed") as refused:
        check_loggers(load_config("coding_rlvr", [f"logging.loggers=[{name}]"]))
    assert f"forge-env[{name}]" in (refused.value.fix or "")
    with pytest.raises(UsageError, match="wandb isn't installed"):
        WandbLogger.check()


def test_a_tracker_that_can_not_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(Unreachable):
        def __init__(self, *_: object) -> None:
            raise ConnectionRefusedError("port 5000")

    monkeypatch.setattr("forge_env.run.metrics.WandbLogger", Refusing)
    config = load_config("coding_rlvr", ["logging.wandb=true", "logging.tensorboard=false"])
    with pytest.raises(UsageError, match=r"no_such_tracker could not be started \(ConnectionRefusedError\): port 5000"):
        open_loggers(config, RunFolder(tmp_path), lambda: 0.0)


@pytest.mark.parametrize(
    ("name", "written"),
    [("a,b", "a_b"), ("reward//x", "reward/_/x"), ("../b/", "_/b/_"), ("", "_"), ("x" * 300, "x" * 250)],
)
def test_metrics_have_names_that_mlflow_accepts(name: str, written: str) -> None:
    assert _mlflow_name(name) == written


async def test_episodes_are_sent_without_secrets_and_shortened() -> None:
    add("sk-planted-0123456789abcdef", "test")
    [episode] = await played(text=f"sk-planted-0123456789abcdef {'long ' * LONGEST_MESSAGE}")
    messages = conversation(episode)
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert "sk-planted" not in json.dumps(messages)
    assert len(messages[1]["content"]) < LONGEST_MESSAGE + 100
    described: dict[str, Any] = summary_of(episode)
    assert (described["reward"], described["reason"]) == (0.0, "wrong answer")
