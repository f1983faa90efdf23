"""A recorded episode with everything that is needed to play it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_env.config.evaluation import EnvironmentChoice, EvaluationConfig
from forge_env.config.finding import newest_model
from forge_env.config.reader import Source, build, read_file, refuse_redacted
from forge_env.config.recipe import RunConfig
from forge_env.environment.base import Environment, resolve_task
from forge_env.errors import UsageError
from forge_env.evaluation.evaluation import VLLM
from forge_env.evaluation.plan import Sample, task_digest
from forge_env.registry import maker
from forge_env.rollout.episode import EpisodeLimits, episode_seed
from forge_env.rollout.recorded import Tasks
from forge_env.run.folder import RunFolder
from forge_env.sandbox.protocol import SandboxEngine
from forge_env.trajectory import Trajectory
from forge_env.types import Task

SEARCHED = 100_000
"""Maximum tasks of a split that are searched for the task of an episode."""

USED = {"environments", "model", "base_url", "docker_host", "sandbox_options"}
"""Keys that may have held a secret, and are needed to play an episode again."""


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """A recorded episode, with the settings of its run."""

    trajectory: Trajectory
    environment: EnvironmentChoice
    seed: int
    """Seed of the episode."""
    index: int | None
    """Index of its task; None: found by the task's id."""
    config: EvaluationConfig
    """Model, endpoint and sandboxes of the run; `model` is empty if the run has no model that can be served."""

    @property
    def limits(self) -> EpisodeLimits:
        """Limits of the run's episodes."""
        config = self.config
        return EpisodeLimits(config.turn_limit, None, config.time_limit, config.working_limit)

    def maker(self, sandboxes: SandboxEngine) -> Callable[[], Environment]:
        """Return a function that creates the environment."""
        return maker(self.environment.name, self.environment.options, sandboxes=sandboxes)

    def task(self, env: Environment) -> Task:
        """The episode's task, as the environment creates it now.

        Raises:
            UsageError: the environment no longer has the task, or has changed it.
        """
        trajectory, split = self.trajectory, self.trajectory.split
        task: Task | None
        if self.index is None:
            task = Tasks(env, split).find(trajectory.task_id)
        else:
            task = resolve_task(env, None, {"split": split, "index": self.index})
        if task is None:
            raise UsageError(
                f"{self.environment.name} has no task {trajectory.task_id!r} in split {split!r}",
                fix="use the version of the environment that the episode was played in",
            )
        digest = trajectory.info.get("task")
        if task.id != trajectory.task_id or (digest is not None and digest != task_digest(task)):
            raise UsageError(
                f"task {trajectory.task_id!r} of {self.environment.name} has changed since the episode was played",
                fix="use the version of the environment that it was played in",
            )
        return task


def recorded_episode(root: Path, trajectory: Trajectory, *, kind: str, changed: dict[str, Any]) -> RecordedEpisode:
    """Read the settings that an episode was played with.

    Args:
        kind: name of its file: `eval`, `train`, `eval-00010`, ...
        changed: keys of the evaluation (`model`, `base_url`, ...) that differ from the run's. With another `base_url`,
            the recorded `api_key_env` and `uds` are not used: they belong to the recorded endpoint.

    Raises:
        UsageError: the settings are not recorded, or the episode can't be continued.
    """
    _check(trajectory)
    path = RunFolder(root).config
    if not path.is_file():
        raise UsageError(
            f"{root} has no config.yaml: the environment and its settings are not recorded",
            fix="give the folder of a run (forge-env train) or an evaluation (forge-env eval)",
        )
    source = read_file(path)
    if "environments" in source.data:
        if changed.get("base_url", source.data.get("base_url")) != source.data.get("base_url"):
            fields = EvaluationConfig.model_fields
            changed = {key: fields[key].default for key in ("api_key_env", "uds")} | changed
        config = build(EvaluationConfig, source, changed.items())
        label, split, index, epoch = trajectory.id.rsplit("/", 3)
        choice = next((choice for choice in config.environments if choice.label == label), None)
        seed, number = Sample(label, split, int(index), int(epoch)).seed(config.seed), int(index)
    else:
        run = build(RunConfig, source)
        config = _of_run(run, root, "train" if kind.startswith("train") else "held-out", changed)
        choice, seed, number = config.environments[0], episode_seed(run.seed, trajectory.id), None
    if choice is None:
        raise UsageError(f"{path} has no environment {trajectory.environment!r}", fix="restore the file")
    refuse_redacted(
        config.model_dump(include=USED - changed.keys()),
        fix=f"let the environment read it from an environment variable, or add it to {path} temporarily",
    )
    return RecordedEpisode(trajectory, choice, seed, number, config)


def _check(trajectory: Trajectory) -> None:
    if not trajectory.valid:
        raise UsageError(f"episode {trajectory.id} was lost: {trajectory.error}", fix="choose another episode")
    if not trajectory.turns:
        raise UsageError(f"episode {trajectory.id} has no turns", fix="choose another episode")
    if trajectory.rewards or any(turn.seat for turn in trajectory.turns):
        raise UsageError(
            f"episode {trajectory.id} has several seats or conversations, which can't be continued",
            fix="choose an episode of an environment with one conversation",
        )


def _of_run(run: RunConfig, root: Path, kind: str, changed: dict[str, Any]) -> EvaluationConfig:
    """The settings of a training run as an evaluation's; its model is the newest checkpoint."""
    model = newest_model(RunFolder(root).checkpoints) if "model" not in changed else None
    section = run.environment
    options = run.sandbox.engine_options()
    settings: dict[str, Any] = {
        "model": "" if model is None else f"{VLLM}{model}",
        "temperature": run.grpo.temperature if kind == "train" else run.evaluation.temperature,
        "max_tokens": run.grpo.max_tokens_per_turn,
        "environments": [{"name": section.name, "options": section.options}],
        "sandbox": run.sandbox.engine,
        "docker_host": options.pop("docker_host", None),
        "sandbox_options": options,
    }
    return build(EvaluationConfig, Source(str(RunFolder(root).config), settings), changed.items())
