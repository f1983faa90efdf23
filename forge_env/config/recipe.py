"""The recipe: every key of a run, validated before any process starts. A field's docstring is its documentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from forge_env.config.reader import Source, build, parse_overrides, read_file

# ---
# What sections of a recipe have in common.

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32, strict=True)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A part of the recipe; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)


# ---
# The sections of a recipe about models and the actors that hold them.


class TinyModel(Section):
    """Shape of the checkpoint that `model.path: tiny` builds (Qwen3 architecture)."""

    layers: Positive = 4
    """Transformer blocks."""
    dim: Positive = 128
    """Width of the residual stream."""
    heads: Positive = 4
    """Query heads."""
    kv_heads: Positive = 2
    """Key and value heads."""
    head_dim: Positive = 32
    """Size of one head; vLLM wants a multiple of 32."""
    hidden_dim: Positive = 384
    """Width of the feed-forward layer."""
    vocab_size: Annotated[int, Field(ge=320)] = 1024
    """Most tokens in the vocabulary; all 256 bytes, the chat format's tokens and its fixed phrases are among them."""
    rope_theta: float = 10_000.0
    """Base of the rotary position embedding."""

    @model_validator(mode="after")
    def _shapes(self) -> TinyModel:
        if self.heads % self.kv_heads:
            raise ValueError("heads must be a multiple of kv_heads")
        if self.head_dim % 32:
            raise ValueError("head_dim must be a multiple of 32 (vLLM's attention kernels)")
        return self


class ModelSection(Section):
    """Which model."""

    path: str = "tiny"
    """`tiny` builds a small model here; otherwise a checkpoint folder or a hub name such as Qwen/Qwen3-0.6B."""
    renderer: str = "qwen3"
    """Chat format, by its name in the `renderers` library; a model built here speaks those of Qwen3 and Nemotron 3."""
    thinking: bool = False
    """Let the model think before it answers, where the chat format leaves that open. What it thought stays in the \
prompts of the turns after."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the generator's weights and of all arithmetic; the trainer keeps its weights in float32."""
    max_length: Positive = 512
    """Tokens of a whole conversation; an episode that reaches it is truncated."""
    tiny: TinyModel = TinyModel()
    """Shape of the model that `path: tiny` builds."""
    cache_dir: str | None = None
    """Where built and warmed-up checkpoints are kept; unset: ~/.cache/forge-env (or $FORGE_ENV_CACHE)."""


class OptimizerSection(Section):
    """AdamW with linear warm-up and a decay; `muon` for hidden matrices on request."""

    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Peak learning rate of AdamW."""
    muon_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate of Muon for hidden matrices; 0: AdamW trains them too."""
    beta1: Fraction = 0.9
    """AdamW's first-moment decay."""
    beta2: Fraction = 0.95
    """AdamW's second-moment decay."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay; with Muon, of the hidden matrices only."""
    warmup_steps: NonNegative = 5
    """Steps of linear warm-up."""
    schedule: Literal["linear", "cosine", "sqrt", "constant"] = "linear"
    """Shape of the decay from the peak to the rate at the end; `constant`: none after the warm-up."""
    decay_start: Fraction = 0.5
    """Fraction of the run after which the rate decays."""
    min_lr_ratio: Fraction = 0.1
    """Rate at the end, as a fraction of the peak."""
    max_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are clipped to this global norm."""


class WarmupSection(Section):
    """Supervised fine-tuning on the environment's demonstrations before RL; its result is cached."""

    steps: NonNegative = 600
    """Optimizer steps; 0 skips the warm-up."""
    batch_size: Positive = 16
    """Demonstrations in a step."""
    threads: Positive = 2
    """CPU threads of a trainer of one process while it has the machine to itself."""
    optimizer: OptimizerSection = OptimizerSection(
        lr=3e-3, muon_lr=3e-3, beta2=0.99, weight_decay=0.05, warmup_steps=20, decay_start=0.0, min_lr_ratio=0.02
    )
    """Its own optimizer."""


class SamplingSection(Section):
    """What decides beside the temperature how a reply is sampled.

    All but `stop_token_ids` changes the distribution that tokens are drawn from, in ways that the trainer does not \
compute: ratios of its probabilities to the generator's would be wrong. They are for evaluation.
    """

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the fewest tokens that have this much probability together; 1: from all."""
    top_k: NonNegative = 0
    """Sample from so many of the likeliest tokens; 0: from all."""
    min_p: Fraction = 0.0
    """Sample from tokens that are at least so likely as this share of the likeliest one; 0: from all."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Above 1, tokens that stand in the prompt or the reply become less likely."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Above 0, tokens that stand in the reply become less likely."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Above 0, tokens become less likely with every time that they stand in the reply."""
    min_tokens: NonNegative = 0
    """Tokens before a reply may end."""
    stop_token_ids: list[NonNegative] = Field(default_factory=list)
    """Tokens that end a reply, besides those of the chat format."""


class GeneratorSection(Section):
    """vLLM, in processes of its own."""

    num_replicas: Positive = 1
    """Engines that generate."""
    procs: Positive = 1
    """Processes (tensor-parallel ranks) of one engine."""
    with_gpus: bool = False
    """One GPU per process."""
    max_num_seqs: Positive = 128
    """Sequences decoded together in one engine."""
    gpu_memory_utilization: Fraction = 0.9
    """GPU only: share of its memory for weights and key-value cache."""
    kv_cache_gb: Positive = 1
    """CPU only: key-value cache of one engine, GiB."""
    threads: Positive = 1
    """CPU only: threads of one engine."""
    enforce_eager: bool = False
    """GPU only: run without CUDA graphs and compilation, which starts faster and decodes slower."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's engine (`EngineArgs`), such as `max_num_batched_tokens`. What the recipe sets \
elsewhere, and what would make generators and trainer disagree, is refused with the reason."""
    sampling: SamplingSection = SamplingSection()
    """How all replies are sampled. What reshapes the distribution is refused here: it is for evaluation.sampling."""
    recompute_on_update: bool = False
    """After new weights, compute keys and values of requests in flight anew; off: keep them, which costs nothing."""


class ParallelismSection(Section):
    """How the trainer's processes share the work; the product of the degrees is `trainer.procs`."""

    data_parallel_shard_degree: int = -1
    """Processes among which the batch, the weights and the optimizer's state are split (FSDP); -1: the rest."""
    tensor_parallel_degree: Positive = 1
    """Processes that split every weight matrix, with the same part of the batch."""
    context_parallel_degree: Positive = 1
    """Processes that split every sequence."""
    pipeline_parallel_degree: Positive = 1
    """Processes that split the layers among them."""

    @model_validator(mode="after")
    def _degrees(self) -> ParallelismSection:
        if self.data_parallel_shard_degree < 1 and self.data_parallel_shard_degree != -1:
            raise ValueError("data_parallel_shard_degree must be at least 1, or -1 for all processes that are left")
        return self


class TrainerSection(Section):
    """TorchTitan, in processes of its own."""

    procs: Positive = 1
    """Processes; `parallelism` says how they share the work."""
    parallelism: ParallelismSection = ParallelismSection()
    """How they share it; by default each has its part of the batch and of the weights (FSDP)."""
    activation_checkpoint: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass instead of kept: the cheap ones, or all. Saves memory."""
    compile: bool = False
    """Compile the transformer blocks (GPU): minutes of start-up, faster steps."""
    with_gpus: bool = False
    """One GPU per process."""
    threads: Positive = 1
    """CPU threads of a trainer of one process, and of the reference model."""
    optimizer: OptimizerSection = OptimizerSection()
    """Optimizer of the RL phase."""
    microbatch_tokens: Positive = 8192
    """Tokens in one forward-backward pass, padding included."""
    minibatches: Positive = 1
    """Optimizer updates made from one batch of groups."""

    @model_validator(mode="after")
    def _processes(self) -> TrainerSection:
        degrees = self.parallelism.model_dump()
        product = 1
        for degree in degrees.values():
            product *= max(degree, 1)
        free = self.parallelism.data_parallel_shard_degree == -1
        if self.procs != product and not (free and self.procs % product == 0):
            stated = ", ".join(f"{name}={degree}" for name, degree in degrees.items() if degree != 1)
            raise ValueError(
                f"the product of parallelism's degrees ({stated}) must be procs={self.procs}: "
                f"use trainer.procs={product}, or other degrees"
            )
        return self


# ---
# The sections of a recipe about the reinforcement learning itself.


class PartSection(Section):
    """A part of the algorithm, by its registered name, with its options."""

    name: str
    """Name of an entry point, or `module:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its options."""


class LossSection(Section):
    """Which policy-gradient loss, by its registered name, with its options."""

    name: str = "grpo"
    """Entry point in `forge_env.losses`, or `module:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of that loss (`clip_low`, `clip_high`, ...)."""


class ReferenceSection(Section):
    """The model that a loss with `beta` keeps the policy close to."""

    source: Literal["none", "initial", "lagging", "path"] = "none"
    """`initial`: the policy as it was before RL; `lagging`: a copy of the policy, renewed every `every` steps; \
`path`: another checkpoint with the same vocabulary, and the teacher of `method: distillation`."""
    path: str | None = None
    """Folder or hub name of that checkpoint."""
    every: Positive | None = None
    """Training steps between two renewals of a lagging copy."""
    with_gpus: bool = False
    """On a GPU of its own; else on the CPU."""

    @model_validator(mode="after")
    def _lagging(self) -> ReferenceSection:
        if (self.source == "lagging") != (self.every is not None):
            raise ValueError("every goes with source=lagging: set both or neither")
        if (self.source == "path") != (self.path is not None):
            raise ValueError("path goes with source=path: set both or neither")
        if self.with_gpus and self.source == "none":
            raise ValueError("with_gpus is for a reference model: set source")
        return self


class ReplaySection(Section):
    """Which complete groups a training step gets; no choice makes tokens older than `grpo.max_off_policy_steps`."""

    sampling: str = "fifo"
    """Which groups come first: `fifo`, `freshest`, `prioritized` (drawn in proportion to the mean size of their \
advantages), `random`; another installed rule, or `module:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of that rule (`alpha` of `prioritized`)."""
    max_uses: Positive = 1
    """Training steps that may use a group, at most `max_off_policy_steps` + 1. Above 1, fewer groups are rolled out: \
one in `max_uses` groups of a step is new, more where more are complete, and used ones fill the other places."""
    capacity: Positive | None = None
    """Groups kept for another use; unset: all that are young enough."""
    eviction: str = "oldest"
    """Which of them are dropped first when there are more than `capacity`: `oldest`, `least_advantage`, `most_used`; \
another installed rule, or `module:Class`."""

    @model_validator(mode="after")
    def _capacity(self) -> ReplaySection:
        if self.capacity is not None and self.max_uses == 1:
            raise ValueError("capacity is for groups kept for another use: set max_uses above 1")
        if self.eviction != "oldest" and self.capacity is None:
            raise ValueError("eviction is for groups beyond the capacity: set capacity")
        return self


class GRPOSection(Section):
    """The asynchronous loop."""

    steps: Positive = 60
    """Training steps."""
    groups_per_step: Positive = 24
    """Prompts in one training step."""
    group_size: Positive = 8
    """Episodes of one prompt; their mean reward is the baseline."""
    max_off_policy_steps: NonNegative = 2
    """Bound on the age of every trained token, in policy updates. 0: synchronous, on-policy."""
    advantage: PartSection = PartSection(name="group_mean")
    """From rewards to advantages: `group_mean` (Dr. GRPO), `group_normalized` (GRPO; `epsilon`), `leave_one_out` \
(RLOO), `reinforce_plus_plus` (`half_life`, `epsilon`), `turn_returns` (credit by turn; `gamma`); another installed \
one (entry points `forge_env.advantages`), or `module:Class`."""
    mask: PartSection = PartSection(name="none")
    """What of an episode is left out of the loss: `none`; `truncated`, of episodes that a limit ended (`limits`: \
which ones); another installed one (entry points `forge_env.masks`), or `module:Class`."""
    filter: PartSection = PartSection(name="all")
    """Which groups are trained on, others being rolled out in the place of the rest: `all`; `with_signal`, whose \
rewards differ; `reward_range`, whose mean reward is within `low` and `high`; another installed one (entry points \
`forge_env.group_filters`), or `module:Class`."""
    temperature: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    """Sampling temperature of rollouts, within what vLLM samples at."""
    max_tokens_per_turn: Positive = 160
    """Sampled tokens in one assistant message."""
    group_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds after the model's first answer in a group; it then trains with the episodes that have finished."""
    replay: ReplaySection = ReplaySection()
    """Order, re-use and eviction of complete groups."""
    loss: LossSection = LossSection()
    """The loss."""
    reference: ReferenceSection = ReferenceSection()
    """The reference model of its KL term. With `source` set, the divergence is logged whether `beta` is 0 or not."""

    @model_validator(mode="after")
    def _reuse(self) -> GRPOSection:
        young_enough = self.max_off_policy_steps + 1
        if self.replay.max_uses > young_enough:
            raise ValueError(f"replay.max_uses is at most max_off_policy_steps + 1 = {young_enough}")
        return self


# ---
# The rest of a run, and the recipe as a whole.


class EnvironmentSection(Section):
    """What is trained on."""

    name: str = Field(examples=["coding_rlvr"])
    """Registered name of the environment (`forge-env list`)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment's own config class (`forge-env info NAME`)."""
    max_bug_rate: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Share of the last 100 tasks on which the environment's own code may raise until the run ends. Below it such \
episodes are left out, and their tasks are not played again."""


ORDERS = ("shuffled", "sequential", "curriculum")
"""Orders of tasks that come with forge-env."""


class TasksSection(Section):
    """Which training task comes when."""

    order: str = "shuffled"
    """`shuffled`: every task once an epoch (a generator's own order is as good); `sequential`: as they are; \
`curriculum`: the levels of `difficulty` on which about half of the attempts succeed come most often; another \
installed one (entry points `forge_env.task_orders`), or `module:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of an order of your own; the keys below are those of the three that come with forge-env."""
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
        if self.weights and self.order not in ("shuffled", "curriculum"):
            raise ValueError("weights draw tasks at random: set order to shuffled or curriculum")
        if self.options and self.order in ORDERS:
            raise ValueError("options are for an order of your own: weights, explore and half_life are keys of tasks")
        defaults = type(self).model_fields
        for name in ("explore", "half_life"):
            if self.order != "curriculum" and getattr(self, name) != defaults[name].default:
                raise ValueError(f"{name} is for a curriculum: set order to curriculum")
        return self


class SandboxSection(Section):
    """Where model-written code runs."""

    engine: str = "auto"
    """`docker`, `local`, another installed engine, or `auto`: Docker if it is running, else local."""
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
    sampling: SamplingSection = SamplingSection()
    """What else decides how held-out replies are sampled: top_p, top_k, ..."""
    pinned: bool = True
    """Score one policy version: the weights that serve an evaluation stay as they are until it is done. With one \
generator, new weights wait for it; with several, one of them serves it. Off: nothing waits, and a score mixes the \
versions that come and go meanwhile."""
    metric: str = "solved"
    """Metric of the environment that is the score (pass@1 for `solved`); the reward where it has no such metric."""
    extra_splits: list[str] = Field(default_factory=list)
    """Further splits scored at the start and the end only."""
    extra_tasks: Positive = 64
    """Tasks of each extra split."""


class CheckpointSection(Section):
    """When model and optimizer are saved."""

    every: NonNegative = 0
    """Training steps between checkpoints; 0: by time alone."""
    minutes: Annotated[float, Field(ge=0)] = 5.0
    """Minutes after which a checkpoint is due in any case; 0: never. One is always saved at the end."""
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
            raise ValueError("end_s is below warn_s: the run would end before the warning; lower warn_s too")
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
    environment: EnvironmentSection = Field(examples=["{name: coding_rlvr}"])
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
    """What to do when nothing moves."""


# ---
# Finding recipes.


def bundled_recipes() -> dict[str, Traversable]:
    """Recipes that come with the package, by file name without `.yaml`."""
    try:
        root = files("apps")
    except ModuleNotFoundError:
        return {}
    return {entry.name.removesuffix(".yaml"): entry for entry in _walk(root)}


def _walk(folder: Traversable) -> Iterator[Traversable]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir() and not entry.name.startswith(("_", ".")):
            yield from _walk(entry)
        elif entry.name.endswith((".yaml", ".yml")):
            yield entry


def read_recipe(file: str) -> Source:
    """A recipe as written: a path, or the name of a bundled one.

    Raises:
        ConfigError: there is no such file, or it is not a YAML mapping.
    """
    return read_file(file, bundled_recipes())


def load_config(file: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The validated recipe: `load_config("coding_rlvr", ["--grpo.steps", "20", "seed=1"])`.

    Raises:
        ConfigError: the recipe is wrong; every mistake is on a line of its own.
        UsageError: an override can't be parsed.
    """
    return build(RunConfig, read_recipe(file), parse_overrides(overrides, RunConfig))
