"""Experiment trackers: Weights & Biases, trackio and MLflow.

They receive the metrics of a run, its recipe without secrets, and some held-out episodes of every evaluation. A resumed
run continues its run there.
"""

from __future__ import annotations

import json
import netrc
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from forge_env.config.recipe import RunConfig
from forge_env.errors import ForgeError, UsageError
from forge_env.reading import read_text
from forge_env.redaction import add, redact_settings, redact_value
from forge_env.run.folder import RunFolder
from forge_env.tools.schema import shorten
from forge_env.visible import one_line

if TYPE_CHECKING:
    from forge_env.trajectory import Trajectory
    from forge_env.types import Message

T = TypeVar("T")
PROJECT = "forge-env"
"""Project, or experiment, of runs for which none is named."""
LONGEST_MESSAGE = 20_000
"""Maximum characters of a text in a message that is sent to a tracker; longer ones are shortened."""
MOST_METRICS = 1_000
"""Metrics that MLflow accepts in one request."""


class Tracker(ABC):
    """A tracker of runs in a package of its own. Its failures after the start are warnings: they end no run."""

    package: ClassVar[str]
    """Module of the package."""
    install: ClassVar[str]
    """Command that installs it."""

    @abstractmethod
    def __init__(self, folder: RunFolder, config: RunConfig) -> None: ...

    @classmethod
    def check(cls) -> None:
        """Raise `UsageError` if the tracker can't work here."""
        try:
            missing = find_spec(cls.package) is None
        except ModuleNotFoundError:  # a package that contains it
            missing = True
        if missing:
            raise UsageError(f"logging.loggers names {cls.package}, which isn't installed", fix=cls.install)

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one row."""

    def log_episodes(self, step: int, split: str, episodes: Sequence[Trajectory]) -> None:
        """Record episodes of the evaluation of `split` after training step `step`; by default they are ignored."""
        return

    @abstractmethod
    def close(self, exit: str = "success") -> None:
        """Send what is not sent yet, and finish the run with its `exit` as in summary.json."""


def start_tracker(tracker: Callable[[RunFolder, RunConfig], T], folder: RunFolder, config: RunConfig) -> T:
    """Start or continue a tracker's run.

    Raises:
        UsageError: the tracker can't: its server doesn't answer, it isn't logged in, or its run was deleted.
    """
    try:
        return tracker(folder, config)
    except ForgeError:
        raise
    except Exception as error:
        name = getattr(tracker, "package", None) or getattr(tracker, "__qualname__", repr(tracker))
        text = f"{name} could not be started ({type(error).__name__}): {one_line(str(error))}"
        raise UsageError(text, fix="correct its settings, or log without it: see `logging` in the recipe") from error


def conversation(episode: Trajectory) -> list[dict[str, Any]]:
    """The messages of an episode in OpenAI's format, with long texts shortened and secrets redacted."""
    return [shown_message(message) for message in episode.messages]


def shown_message(message: Message) -> dict[str, Any]:
    """A message in OpenAI's format, with long texts shortened and secrets redacted."""
    shown: dict[str, Any] = _shortened(redact_value(message.to_openai()))
    return shown


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        return shorten(value, LONGEST_MESSAGE)
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    return [_shortened(item) for item in value] if isinstance(value, list) else value


def summary_of(episode: Trajectory) -> dict[str, Any]:
    """Facts of an episode besides its messages."""
    return {
        "environment": episode.environment,
        "task": episode.task_id,
        "reward": episode.reward,
        "truncated": episode.truncation or "",
        "reason": episode.reason,
        "duration_ms": round(1_000 * episode.wall_s),
    }


def _identifier(file: Path, new: str) -> str:
    """The identifier of the tracker's run, written to the run's folder at the first start."""
    if not file.exists():
        file.write_text(new)
    return read_text(file)


class WandbLogger(Tracker):
    """Weights & Biases, with a table of episodes. `WANDB_MODE=offline` and `disabled` are honoured."""

    package = "wandb"
    install = "pip install 'forge-env[wandb]'"

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=_identifier(folder.root / ".wandb_id", secrets.token_hex(4)),
            resume="allow",
            name=folder.name,
            dir=str(folder.root),
            config=redact_settings(config.model_dump(mode="json")),
            settings=wandb.Settings(silent=True),
        )

    @classmethod
    def check(cls) -> None:
        """Raise `UsageError` if wandb isn't installed, or not logged in."""
        if find_spec(cls.package) is None:
            raise UsageError("logging.wandb is on, but wandb isn't installed", fix=cls.install)
        logged_in = _netrc_knows_wandb()
        if not (os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY") or logged_in):
            raise UsageError(
                "logging.wandb is on, but there is no login for Weights & Biases",
                fix="run `wandb login`, or set WANDB_MODE=offline",
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one row."""
        self._run.log({"step": step, **metrics})  # as a metric: a resumed run may log a step again

    def log_episodes(self, step: int, split: str, episodes: Sequence[Trajectory]) -> None:
        """Record held-out episodes."""
        import wandb

        rows = [[*summary_of(episode).values(), json.dumps(conversation(episode))] for episode in episodes]
        columns = [*summary_of(episodes[0]), "messages"]
        self._run.log({"step": step, f"episodes/{split}": wandb.Table(columns=columns, data=rows)})

    def close(self, exit: str = "success") -> None:
        """Finish the run."""
        self._run.finish(exit_code=int(exit != "success"))


def _netrc_knows_wandb() -> bool:
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    with suppress(OSError, netrc.NetrcParseError):
        for host, (_, _, password) in netrc.netrc(path).hosts.items():
            add(password, f"netrc-{host}")
    return path.is_file() and "wandb" in path.read_text(errors="replace")


class TrackioLogger(Tracker):
    """trackio, with a trace for each episode. `TRACKIO_PROJECT` names the project; trackio reads its own variables."""

    package = "trackio"
    install = "pip install 'forge-env[trackio]'"

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        import trackio

        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{folder.name}-{_identifier(folder.root / '.trackio_id', secrets.token_hex(4))}",
            resume="allow",
            config=redact_settings(config.model_dump(mode="json")),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one row."""
        self._run.log(dict(metrics), step=step)

    def log_episodes(self, step: int, split: str, episodes: Sequence[Trajectory]) -> None:
        """Record held-out episodes."""
        import trackio

        for episode in episodes:
            self._run.log({f"episodes/{split}": trackio.Trace(conversation(episode), summary_of(episode))}, step=step)

    def close(self, exit: str = "success") -> None:
        """Finish the run."""
        self._run.finish()


class MLflowLogger(Tracker):
    """MLflow, with a trace for each episode and a span for each turn. `MLFLOW_TRACKING_URI` is read by MLflow."""

    package = "mlflow"
    install = "pip install 'forge-env[mlflow]'"

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        import mlflow

        self._client = mlflow.MlflowClient()
        self._experiment = mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)).experiment_id
        file = folder.root / ".mlflow_id"
        if not file.exists():
            run = self._client.create_run(self._experiment, run_name=folder.name)
            file.write_text(run.info.run_id)
            recipe = json.dumps(redact_settings(config.model_dump(mode="json")), indent=1)
            self._client.log_text(run.info.run_id, recipe, "config.json")
        self._id = read_text(file)
        self._client.update_run(self._id, status="RUNNING")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one row."""
        from mlflow.entities import Metric

        now = int(1_000 * time.time())
        values = [Metric(_mlflow_name(name), value, now, step) for name, value in metrics.items()]
        for start in range(0, len(values), MOST_METRICS):
            self._client.log_batch(self._id, metrics=values[start : start + MOST_METRICS], synchronous=False)

    def log_episodes(self, step: int, split: str, episodes: Sequence[Trajectory]) -> None:
        """Record held-out episodes."""
        import mlflow

        for episode in episodes:
            messages = conversation(episode)
            trace = mlflow.start_span_no_context(
                f"episode of {split}",
                inputs={"messages": messages[:1]},
                attributes={**summary_of(episode), "step": step},
                experiment_id=self._experiment,
                metadata={"mlflow.sourceRun": self._id},
            )
            shown = 0
            for number, message in enumerate(messages):
                if message["role"] == "assistant":
                    observed = {"messages": messages[shown:number]}
                    mlflow.start_span_no_context("turn", parent_span=trace, inputs=observed).end(outputs=message)
                    shown = number + 1
            trace.end(outputs={"reward": episode.reward})
        mlflow.flush_trace_async_logging()

    def close(self, exit: str = "success") -> None:
        """Finish the run."""
        import mlflow

        mlflow.flush_async_logging()
        status = {"success": "FINISHED", "interrupted": "KILLED"}.get(exit, "FAILED")
        self._client.set_terminated(self._id, status)


def _mlflow_name(name: str) -> str:
    """A name that MLflow accepts: letters, digits and `_-. :`, in parts between slashes, of 250 characters at most."""
    plain = "".join(letter if letter.isalnum() or letter in "_-. :/" else "_" for letter in name)
    return "/".join(part if part.strip(".") else "_" for part in plain.split("/"))[:250].rstrip("/")
