"""The recipe: every knob of a run, validated before any process starts. A field's docstring is its documentation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from forge_env.config.actors import (
    GeneratorSection,
    ModelSection,
    OptimizerSection,
    ParallelismSection,
    TinyModel,
    TrainerSection,
    WarmupSection,
)
from forge_env.config.base import Fraction, NonNegative, Positive, Section, Seed
from forge_env.config.rl import GRPOSection, LossSection, ReferenceSection, ReplaySection

__all__ = [
    "CheckpointSection",
    "EnvironmentSection",
    "EvaluationSection",
    "GRPOSection",
    "GeneratorSection",
    "LoggingSection",
    "LossSection",
    "ModelSection",
    "OptimizerSection",
    "ParallelismSection",
    "ReferenceSection",
    "ReplaySection",
    "RunConfig",
    "SandboxSection",
    "Section",
    "TasksSection",
    "TinyModel",
    "TrainerSection",
    "WarmupSection",
    "WatchdogSection",
]


class EnvironmentSection(Section):
    """What is trained on."""

    name: str
    """Registered name of the environment (`forge-env list`)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment's own config class (`forge-env info NAME`)."""


class TasksSection(Section):
    """Which training task comes when."""

    order: Literal["shuffled", "sequential", "curriculum"] = "shuffled"
    """`shuffled`: every task once an epoch (a generator's own order is as good); `sequential`: as they are; \
`curriculum`: the levels of `difficulty` on which about half of the attempts succeed come most often."""
    weights: dict[int, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Level of difficulty -> its relative frequency, with a curriculum a factor on it; levels not named are left out. \
Empty: all alike."""
    explore: Fraction = 0.1
    """Curriculum: how often levels come that never or always succeed, as a share of the best level's frequency."""
    half_life: Annotated[float, Field(gt=0)] = 16.0
    """Curriculum: groups of a level after which an old result counts half."""

    @model_validator(mode="after")
    def _weights(self) -> TasksSection:
        if self.weights and not any(self.weights.values()):
            raise ValueError("weights: one of them must be above 0")
        if self.weights and self.order == "sequential":
            raise ValueError("weights draw tasks at random: set order to shuffled or curriculum")
        defaults = type(self).model_fields
        for name in ("explore", "half_life"):
            if self.order != "curriculum" and getattr(self, name) != defaults[name].default:
                raise ValueError(f"{name} is for a curriculum: set order to curriculum")
        return self


class SandboxSection(Section):
    """Where model-written code runs."""

    engine: str = "auto"
    """`docker`, `local`, another installed engine, or `auto`: Docker where a daemon answers, else local."""
    concurrency: Positive | None = None
    """Sandboxes alive at once; unset: chosen from the CPU count."""
    base_image: str | None = None
    """Public image to build on instead of this machine's own Python (Docker engine)."""

    @model_validator(mode="after")
    def _image(self) -> SandboxSection:
        if self.engine == "local" and self.base_image is not None:
            raise ValueError("base_image is for Docker: set engine to docker")
        return self


class EvaluationSection(Section):
    """Held-out evaluation during the run, beside the training rollouts."""

    every: NonNegative = 10
    """Training steps between evaluations; 0: only at the start and the end."""
    num_tasks: Positive = 128
    """Held-out tasks, one episode each."""
    split: str = "eval"
    """Split of the environment that is never trained on."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """Sampling temperature; 0: greedy."""
    metric: str = "solved"
    """Metric of the environment that is the score (pass@1 for `solved`); the reward where it has no such metric."""
    extra_splits: list[str] = Field(default_factory=list)
    """Further splits scored at the start and the end only."""
    extra_tasks: Positive = 64
    """Tasks of each extra split."""


class CheckpointSection(Section):
    """Saving model and optimizer."""

    every: NonNegative = 0
    """Training steps between checkpoints; 0: only at the end."""
    keep: Positive = 2
    """Most recent checkpoints kept."""


class LoggingSection(Section):
    """Where metrics go besides metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb: bool = False
    """Log to Weights & Biases (honours WANDB_MODE)."""
    loggers: list[str] = Field(default_factory=list)
    """Further loggers: names of installed ones (entry points `forge_env.loggers`), or `module:Class`."""
    trajectories: Literal["all", "eval", "none"] = "all"
    """Which trajectories are written to the run folder."""
    timeline: bool = True
    """Write timeline.json: what every actor did when, for Perfetto."""


class WatchdogSection(Section):
    """What to do when nothing moves: no token sampled, no episode ended, no step trained."""

    warn_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds without progress until a warning names what is stuck."""
    end_s: Annotated[float, Field(ge=0)] = 900.0
    """Seconds without progress until the run fails with that diagnosis; 0: never."""

    @model_validator(mode="after")
    def _order(self) -> WatchdogSection:
        if 0 < self.end_s < self.warn_s:
            raise ValueError("end_s below warn_s: the run would end before the warning; lower warn_s too")
        return self


class RunConfig(Section):
    """A whole run."""

    name: str | None = None
    """Folder of the run under `output_dir`; unset: the recipe's file name and the time."""
    output_dir: str = "runs"
    """Where run folders are made."""
    seed: Seed = 0
    """Seed of weights, demonstrations, sampling and minibatches; of tasks: `environment.options.seed`."""
    method: str = "grpo"
    """Entry point in `forge_env.trainers` that runs the recipe."""
    environment: EnvironmentSection
    """What is trained on."""
    tasks: TasksSection = TasksSection()
    """Which training task comes when."""
    sandbox: SandboxSection = SandboxSection()
    """Where model-written code runs."""
    model: ModelSection = ModelSection()
    """Which model."""
    warmup: WarmupSection | None = None
    """Supervised warm-up before RL; unset: none."""
    generator: GeneratorSection = GeneratorSection()
    """The generators."""
    trainer: TrainerSection = TrainerSection()
    """The trainer."""
    grpo: GRPOSection = GRPOSection()
    """The asynchronous loop."""
    evaluation: EvaluationSection = EvaluationSection()
    """Held-out evaluation."""
    checkpoint: CheckpointSection = CheckpointSection()
    """Checkpoints."""
    logging: LoggingSection = LoggingSection()
    """Logs."""
    watchdog: WatchdogSection = WatchdogSection()
    """Noticing that nothing moves."""
