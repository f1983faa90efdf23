"""The recipe: every key of a run, validated before any process starts. A field's docstring is its documentation."""

from __future__ import annotations

from math import prod
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from forge_env import machine
from forge_env.machine import WORKER_ADDRESS

# ---
# Common types, and the base class of all sections.

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(gt=0, le=1_000_000)]
NonNegative = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32, strict=True)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Base of the recipe's sections; unknown keys are rejected."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


# ---
# Sections about the model and its training.


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
    """Size of one head; vLLM requires a multiple of 32."""
    hidden_dim: Positive = 384
    """Width of the feed-forward layer."""
    vocab_size: Annotated[int, Field(ge=320)] = 1024
    """Maximum size of the vocabulary; it includes all 256 bytes, the chat format's tokens and its fixed phrases."""
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
    """The model."""

    path: str = "tiny"
    """`tiny` builds a small model locally; otherwise a checkpoint folder, the name of one that comes with forge-env \
(coding_rlvr_base), or a hub name such as Qwen/Qwen3-0.6B."""
    renderer: str = "auto"
    """Chat format. `auto`: the chat template in the model's folder, for `path: tiny` that of Qwen3. `chatml`: ChatML \
with the tools of Hermes and Qwen, for models without a template or whose template has no tools. Or a name of the \
`renderers` library (`path: tiny` supports those of Qwen3 and Nemotron 3), or `module:Class` or `file.py:Class`, a \
class with that library's protocol."""
    tools: Literal["native", "text"] = "native"
    """`native`: tools are described and called as the chat format does; `text`: they are described in the system \
message, and calls are read from the text, for models whose chat template has no tools."""
    thinking: bool = False
    """Let the model think before it answers, if the chat format has a switch for it. Its thoughts stay in the \
prompts of later turns, unless the template of its folder drops them."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the generator's weights and of all arithmetic; the trainer keeps its weights in float32."""
    max_length: Positive = 512
    """Maximum tokens of a whole conversation; an episode that reaches it is truncated."""
    tiny: TinyModel = TinyModel()
    """Shape of the model that `path: tiny` builds."""
    cache_dir: str | None = None
    """Folder for built and warmed-up checkpoints; unset: $FORGE_ENV_CACHE, else ~/.cache/forge-env."""


class LoRASection(Section):
    """Train low-rank adapters and freeze all other weights (docs/lora.md)."""

    rank: Positive = 8
    """Rank of the adapters, at most the smaller dimension of each adapted layer."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """An adapter's output is scaled by `alpha` / `rank`."""
    targets: list[str] = Field(default_factory=list)
    """Layers that get an adapter: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj; empty: all of these. \
In a mixture-of-experts model, only the first four are supported; Phi has qkv_proj, o_proj, gate_up_proj, down_proj; \
Qwen 3.5 also in_proj_qkv, in_proj_z, out_proj."""


class OptimizerSection(Section):
    """AdamW with linear warm-up and decay; optionally Muon for hidden matrices."""

    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3e-4
    """Peak learning rate of AdamW."""
    muon_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate of Muon for hidden matrices; 0: AdamW trains them too."""
    beta1: Fraction = 0.9
    """AdamW's first-moment decay."""
    beta2: Fraction = 0.95
    """AdamW's second-moment decay."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay of matrices; norms, biases and embeddings are not decayed."""
    warmup_steps: NonNegative = 5
    """Steps of linear warm-up."""
    schedule: Literal["linear", "cosine", "sqrt", "constant"] = "linear"
    """Shape of the decay from the peak to the final rate; `constant`: no decay after the warm-up."""
    decay_start: Fraction = 0.5
    """Fraction of the run at which the decay begins."""
    min_lr_ratio: Fraction = 0.1
    """Final learning rate, as a fraction of the peak."""
    max_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are clipped to this global norm."""


class WarmupSection(Section):
    """Supervised fine-tuning on the environment's demonstrations before RL; its result is cached."""

    steps: NonNegative = 600
    """Optimizer steps; 0 skips the warm-up."""
    batch_size: Positive = 16
    """Demonstrations per step."""
    threads: Positive = 2
    """CPU threads of a single-process trainer during the warm-up, when it has the machine to itself."""
    optimizer: OptimizerSection = OptimizerSection(
        lr=3e-3, muon_lr=3e-3, beta2=0.99, weight_decay=0.05, warmup_steps=20, decay_start=0.0, min_lr_ratio=0.02
    )
    """Optimizer of the warm-up."""


class SamplingSection(Section):
    """How a reply is sampled, besides the temperature.

    All keys but `stop_token_ids` change the distribution that tokens are sampled from. The trainer does not compute \
this change, so its importance ratios would be wrong: use these keys for evaluation only.
    """

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens whose probabilities sum to this value; 1: from all."""
    top_k: NonNegative = 0
    """Sample from this many of the most likely tokens; 0: from all."""
    min_p: Fraction = 0.0
    """Sample from tokens with at least this fraction of the most likely token's probability; 0: from all."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Above 1, tokens that already occur in the prompt or the reply become less likely."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Above 0, tokens that already occur in the reply become less likely."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Above 0, tokens become less likely each time they occur in the reply."""
    min_tokens: NonNegative = 0
    """Minimum tokens of a reply."""
    stop_token_ids: list[NonNegative] = Field(default_factory=list)
    """Tokens that end a reply, besides those of the chat format."""


# ---
# Sections about machines and processes.

Role = Literal["trainer", "reference", "buffer", "generator", "rollouts"]
"""Actors of a run that can be placed."""


def _address(text: str) -> str:
    match = WORKER_ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 2**16:
        raise ValueError(f"{text!r} is not the address of a worker: write tcp://HOST:PORT, or tls://HOST:PORT")
    return text


class JobSection(Section):
    """Machines of the run (docs/hosts.md)."""

    kind: Literal["local", "hosts", "slurm", "kubernetes", "skypilot"] = "local"
    """`local`: this machine; `hosts`: the workers (`forge-env worker`) listed in `workers`; `slurm`, `kubernetes`, \
`skypilot`: one worker on each node of the Slurm allocation, pod (FORGE_ENV_WORKERS) or SkyPilot node that this \
command runs in, or of a job that it submits (docs/jobs.md)."""
    workers: list[Annotated[str, AfterValidator(_address)]] = Field(default_factory=list)
    """Addresses of the workers, such as tcp://10.0.0.5:26700; leave unset for slurm, kubernetes and skypilot, which \
know their nodes. A worker's number is its index in this list."""
    port: Annotated[int, Field(gt=0, lt=2**16)] = 26700
    """Port of the workers if `workers` is unset."""
    place: dict[Role, Annotated[list[NonNegative], Field(min_length=1)]] = Field(default_factory=dict)
    """Role -> numbers of the workers that it may run on: `{generator: [1, 2], trainer: [0]}`. Roles that are not \
listed are placed automatically: on workers with the GPUs that they need, then for even load."""
    on_loss: Literal["place", "wait"] = "place"
    """When a host is lost: `place` moves its actors to the other hosts; `wait` waits until it is back."""
    share_gpus: bool = False
    """Let trainer, generators and reference model use the same GPUs. A generator then takes generator.kv_cache_gb of \
its GPU besides its weights, instead of gpu_memory_utilization. If this key and both with_gpus are unset: true on a \
machine with too few GPUs for separate ones."""
    address: str | None = None
    """Address of this machine that the hosts connect to; unset: the one from which this machine reaches them."""

    @model_validator(mode="after")
    def _workers(self) -> JobSection:
        if self.kind == "local" and (self.workers or self.place):
            raise ValueError("workers and place are for several hosts: set job.kind to hosts")
        if self.kind == "hosts" and not self.workers:
            raise ValueError("job.kind=hosts needs job.workers: the addresses at which `forge-env worker` was started")
        if len({address.partition(":")[0] for address in self.workers}) > 1:
            raise ValueError("workers: use tcp:// for all of them, or tls://")
        if len(set(self.workers)) < len(self.workers):
            raise ValueError("workers: an address occurs twice")
        return self


def _spread(procs: int, hosts: int, role: str) -> None:
    """Raise ValueError if the processes can't be spread evenly over the hosts."""
    if procs % hosts:
        raise ValueError(f"{role}.procs={procs} can't be spread evenly over {role}.hosts={hosts}")


class GeneratorSection(Section):
    """vLLM, in its own processes."""

    num_replicas: Positive = 1
    """Number of engines."""
    engine: Literal["auto", "in_process", "async_llm"] = "auto"
    """Where vLLM runs its steps: `in_process`, in the generator's process, fastest for small models; `async_llm`, in \
separate processes, which schedule the next step during the current one; `auto`: async_llm on GPUs, else in_process."""
    procs: Positive = 1
    """Processes (tensor-parallel ranks) per engine."""
    hosts: Positive = 1
    """Hosts that the processes of one engine are spread over."""
    with_gpus: bool = False
    """One GPU per process. If unset: true with job.kind=local on a machine with a GPU and torch built for GPUs; \
`threads` is then ignored."""
    max_num_seqs: Positive = 128
    """Maximum sequences decoded together in one engine."""
    gpu_memory_utilization: Fraction = 0.9
    """GPU only: fraction of GPU memory for weights and key-value cache."""
    kv_cache_gb: Positive = 1
    """CPU, and GPUs with job.share_gpus: key-value cache of one engine, GiB."""
    threads: Positive = 1
    """CPU only: threads of one engine."""
    spare: bool = True
    """Keep a spare process that has imported vLLM, so that a dead engine is back sooner; it takes 0.5 GB of memory."""
    enforce_eager: bool = False
    """GPU only: run without CUDA graphs and compilation, for a faster start and slower decoding."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's engine (`EngineArgs`), such as `max_num_batched_tokens`. Arguments that the recipe \
sets elsewhere, or that would make generators and trainer disagree, are rejected with the reason."""
    sampling: SamplingSection = SamplingSection()
    """Sampling options of all replies. Keys that change the distribution are rejected; use evaluation.sampling."""
    recompute_on_update: bool = False
    """Recompute keys and values of requests in flight after a weight update; off: keep the old ones, at no cost."""
    sleep: bool = False
    """Pause generators while the trainer computes a step, so that it has the processors, or, with job.share_gpus, the \
GPU to itself: weights are moved to main memory (vLLM's sleep mode); keys and values are recomputed afterwards."""

    @property
    def apart(self) -> bool:
        """Whether vLLM runs in separate processes."""
        return self.engine == "async_llm" or (self.engine == "auto" and self.with_gpus and self.hosts == 1)

    @model_validator(mode="after")
    def _hosts(self) -> GeneratorSection:
        _spread(self.procs, self.hosts, "generator")
        if self.engine == "async_llm" and self.hosts > 1:
            raise ValueError("engine=async_llm supports one host only: use engine=in_process, or generator.hosts=1")
        return self


class ParallelismSection(Section):
    """How the trainer's processes share the work; the product of the degrees is `trainer.procs`."""

    data_parallel_shard_degree: int = -1
    """Processes that split the batch, the weights and the optimizer's state (FSDP); -1: all remaining processes."""
    tensor_parallel_degree: Positive = 1
    """Processes that split every weight matrix and work on the same part of the batch."""
    context_parallel_degree: Positive = 1
    """Processes that split every sequence."""
    pipeline_parallel_degree: Positive = 1
    """Processes that split the layers."""

    @model_validator(mode="after")
    def _degrees(self) -> ParallelismSection:
        if self.data_parallel_shard_degree < 1 and self.data_parallel_shard_degree != -1:
            raise ValueError("data_parallel_shard_degree must be at least 1, or -1 for all remaining processes")
        return self


class WeightsSection(Section):
    """Transfer of new weights from the trainer to the generators (docs/decisions/weights-transport.md)."""

    transport: Literal["shared", "torchstore"] = "shared"
    """`shared`: generators map the trainer's memory, or fetch it over TCP from another host; `torchstore`: the \
weights go through TorchStore, with a storage volume in each of the trainer's processes. Slower, and takes up to two \
more copies of the weights in main memory."""


class TrainerSection(Section):
    """TorchTitan, in its own processes."""

    procs: Positive = 1
    """Number of processes; `parallelism` sets how they share the work."""
    hosts: Positive = 1
    """Hosts that the processes are spread over."""
    parallelism: ParallelismSection = ParallelismSection()
    """How the processes share the work; by default each holds a part of the batch and of the weights (FSDP)."""
    activation_checkpoint: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass to save memory: `selective`, the cheap ones; `full`, all of them."""
    compile: bool = False
    """Compile the transformer blocks (GPU only): start-up takes minutes longer, steps are faster."""
    with_gpus: bool = False
    """One GPU per process. If unset: the same rule as for generator.with_gpus."""
    threads: Positive = 1
    """CPU threads of a single-process trainer, and of the reference model."""
    optimizer: OptimizerSection = OptimizerSection()
    """Optimizer of the RL phase."""
    microbatch_tokens: Positive = 8192
    """Tokens in one forward-backward pass, padding included."""
    share_prefixes: bool = True
    """Compute what several sequences of a pass begin with (a group's prompt) once. The results are the same."""
    minibatches: Positive = 1
    """Optimizer updates per training step; the batch is split into this many parts."""

    @model_validator(mode="after")
    def _processes(self) -> TrainerSection:
        _spread(self.procs, self.hosts, "trainer")
        degrees = self.parallelism.model_dump()
        product = prod(max(degree, 1) for degree in degrees.values())
        free = self.parallelism.data_parallel_shard_degree == -1
        if self.procs != product and not (free and self.procs % product == 0):
            stated = ", ".join(f"{name}={degree}" for name, degree in degrees.items() if degree != 1)
            raise ValueError(
                f"the product of parallelism's degrees ({stated}) must be procs={self.procs}: "
                f"use trainer.procs={product}, or other degrees"
            )
        return self


# ---
# Sections about the training algorithm.


class PartSection(Section):
    """A part of the algorithm, by its registered name, with its options."""

    name: str
    """Name of an entry point, or `module:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its options."""


class LossSection(Section):
    """The policy-gradient loss, by its registered name, with its options."""

    name: str = "grpo"
    """Entry point in `forge_env.losses`, or `module:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of that loss (`clip_low`, `clip_high`, ...)."""


class ReferenceSection(Section):
    """The reference model: a loss with `beta` keeps the policy close to it."""

    source: Literal["none", "initial", "lagging", "path"] = "none"
    """`initial`: the policy before RL; `lagging`: a copy of the policy, updated every `every` steps; `path`: another \
checkpoint with the same vocabulary (with `method: distillation`, the teacher)."""
    path: str | None = None
    """Folder or hub name of that checkpoint."""
    every: Positive | None = None
    """Training steps between two updates of a lagging copy."""
    procs: Positive = 1
    """Number of processes; each holds a part of the weights (FSDP)."""
    with_gpus: bool = False
    """One GPU per process; off: on the CPU."""

    @model_validator(mode="after")
    def _lagging(self) -> ReferenceSection:
        if (self.source == "lagging") != (self.every is not None):
            raise ValueError("every goes with source=lagging: set both or neither")
        if (self.source == "path") != (self.path is not None):
            raise ValueError("path goes with source=path: set both or neither")
        for name in ("procs", "with_gpus"):
            if self.source == "none" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} needs a reference model: set source")
        return self


class ReplaySection(Section):
    """Which complete groups a training step gets. `grpo.max_off_policy_steps` applies whatever is chosen here."""

    sampling: str = "fifo"
    """Which groups come first: `fifo`, `freshest`, `prioritized` (drawn in proportion to the mean size of their \
advantages), `random`; another installed rule, or `module:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of that rule (`alpha` of `prioritized`)."""
    max_uses: Positive = 1
    """Maximum training steps that use a group, at most `max_off_policy_steps` + 1. Above 1, fewer groups are rolled \
out: at least one in `max_uses` groups of a step is new, more if more are complete; the rest were used before."""
    capacity: Positive | None = None
    """Maximum number of groups kept for re-use; unset: all whose staleness is allowed."""
    eviction: str = "oldest"
    """Which groups are dropped first when there are more than `capacity`: `oldest`, `least_advantage`, `most_used`; \
another installed rule, or `module:Class`."""

    @model_validator(mode="after")
    def _capacity(self) -> ReplaySection:
        if self.capacity is not None and self.max_uses == 1:
            raise ValueError("capacity needs re-use: set max_uses above 1")
        if self.eviction != "oldest" and self.capacity is None:
            raise ValueError("eviction needs a capacity: set capacity")
        return self


class GRPOSection(Section):
    """The asynchronous loop."""

    steps: Count = 60
    """Training steps."""
    groups_per_step: Count = 24
    """Tasks (prompts) in one training step."""
    group_size: Count = 8
    """Episodes of one task; their mean reward is the baseline."""
    max_off_policy_steps: NonNegative = 2
    """Maximum staleness of every trained token, in policy updates. 0: synchronous, on-policy."""
    advantage: PartSection = PartSection(name="group_mean")
    """Turns rewards into advantages: `group_mean` (Dr. GRPO), `group_normalized` (GRPO; `epsilon`), `leave_one_out` \
(RLOO), `reinforce_plus_plus` (`half_life`, `epsilon`), `turn_returns` (credit for each turn; `gamma`), \
`counterfactual` (credit for parts of episodes, by continuing them; `budget`, `each`), `by_conversation` (credit for \
each conversation of a program); another installed one (entry points \
`forge_env.advantages`), or `module:Class`."""
    mask: PartSection = PartSection(name="none")
    """Which parts of episodes are left out of the loss: `none`; `truncated`, episodes that a limit ended (`limits`: \
which limits); another installed one (entry points `forge_env.masks`), or `module:Class`."""
    filter: PartSection = PartSection(name="all")
    """Which groups are trained on; a dropped group is replaced by one of another task: `all`; `with_signal`, groups \
whose rewards differ; `reward_range`, groups whose mean reward is between `low` and `high`; another installed one \
(entry points `forge_env.group_filters`), or `module:Class`."""
    temperature: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    """Sampling temperature of rollouts, within the range that vLLM supports."""
    max_tokens_per_turn: Positive = 160
    """Maximum sampled tokens in one assistant message."""
    group_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Time limit of a group in seconds, from the model's first answer; `on_timeout` sets what happens then."""
    on_timeout: Literal["leave_out", "zero", "wait"] = "leave_out"
    """What happens to episodes that miss `group_timeout_s` (`episode/late`): `leave_out`, they are dropped, and the \
group's baseline is that of its faster episodes; `zero`, they count with reward 0, and the tokens that they sampled \
are trained on; `wait`, the group waits for them."""
    sync_interval: Positive = 1
    """Training steps between weight updates of the generators, at most `max_off_policy_steps` + 1. The weights of \
the last step, and of every step that is evaluated, are always sent."""
    replay: ReplaySection = ReplaySection()
    """Order, re-use and eviction of complete groups."""
    loss: LossSection = LossSection()
    """The policy-gradient loss."""
    reference: ReferenceSection = ReferenceSection()
    """Reference model of the loss's KL term. If `source` is set, the divergence is logged even if `beta` is 0."""

    @model_validator(mode="after")
    def _reuse(self) -> GRPOSection:
        young_enough = self.max_off_policy_steps + 1
        if self.replay.max_uses > young_enough:
            raise ValueError(f"replay.max_uses must be at most max_off_policy_steps + 1 = {young_enough}")
        if self.sync_interval > young_enough:
            raise ValueError(f"sync_interval must be at most max_off_policy_steps + 1 = {young_enough}")
        return self


class SFTSection(Section):
    """Supervised fine-tuning (`method: sft`) on the environment's demonstrations, without rollouts."""

    steps: Positive = 300
    """Training steps."""
    batch_size: Positive = 32
    """Conversations per training step. Those longer than `model.max_length` are left out."""


# ---
# Other sections, and the recipe as a whole.


class EnvironmentSection(Section):
    """The environment to train on."""

    name: str = Field(examples=["coding_rlvr"])
    """Registered name of the environment (`forge-env info`)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment's own config class (`forge-env info NAME`)."""
    opponents: dict[str, str | dict[str, Any]] = Field(default_factory=dict)
    """Seat -> opponent that plays it instead of the policy: `random`, `module:function`, or \
`{model: NAME, base_url: URL}` (an endpoint, for example of an earlier checkpoint). Unset: the policy plays all seats, \
and is trained on each (self-play)."""
    max_bug_rate: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The run ends if the environment's own code raises on more than this share of the last 100 tasks. Up to this \
share, such episodes are left out, and their tasks are not tried again."""


ORDERS = ("shuffled", "sequential", "curriculum")
"""Orders of tasks that come with forge-env."""


class TasksSection(Section):
    """Order of the training tasks."""

    order: str = "shuffled"
    """`shuffled`: every task once per epoch, in random order (generated tasks are random already); `sequential`: in \
the environment's order; `curriculum`: mostly levels of `difficulty` on which about half of the attempts succeed; \
another installed one (entry points `forge_env.task_orders`), or `module:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of an order that does not come with forge-env; the bundled orders use the keys below."""
    weights: dict[int, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    """Level of difficulty -> relative frequency (with `curriculum`: a factor on the curriculum's frequencies). Levels \
that are not listed are left out. Empty: all levels have the same weight."""
    explore: Fraction = 0.1
    """Curriculum: frequency of levels that never or always succeed, as a share of the best level's frequency."""
    half_life: Annotated[float, Field(gt=0)] = 16.0
    """Curriculum: number of groups of a level after which an old result counts half."""

    @model_validator(mode="after")
    def _weights(self) -> TasksSection:
        if self.weights and not any(self.weights.values()):
            raise ValueError("weights: at least one must be above 0")
        if self.weights and self.order not in ("shuffled", "curriculum"):
            raise ValueError("weights draw tasks at random: set order to shuffled or curriculum")
        if self.options and self.order in ORDERS:
            raise ValueError("options are for custom orders: weights, explore and half_life are keys of tasks")
        defaults = type(self).model_fields
        for name in ("explore", "half_life"):
            if self.order != "curriculum" and getattr(self, name) != defaults[name].default:
                raise ValueError(f"{name} needs a curriculum: set order to curriculum")
        return self


class RolloutsSection(Section):
    """The rollout workers, which run the episodes."""

    workers: Positive = 1
    """Processes that run episodes. Each has an equal share of the groups and of the sandboxes. Use more than one if \
`time/rollouts0/busy` is close to all of its time."""


class SandboxSection(Section):
    """The sandboxes, in which model-written code runs."""

    engine: str = "auto"
    """`docker`, `local`, `kubernetes`, `e2b`, another installed one, or `auto`: Docker if it is running, else local."""
    concurrency: Positive | None = None
    """Maximum number of sandboxes at once, over all workers; unset: chosen from the CPU count."""
    base_image: str | None = None
    """Public base image to use instead of this machine's own Python (Docker and Kubernetes)."""
    docker_host: str | None = None
    """Docker daemon of another machine: `tcp://HOST:PORT`, with DOCKER_TLS_VERIFY and DOCKER_CERT_PATH as for the \
Docker client, or `ssh://[USER@]HOST[:PORT]`; unset: DOCKER_HOST, else this machine's."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further options of the engine, such as `{namespace: sandboxes, runtime_class: gvisor}` for Kubernetes."""

    @model_validator(mode="after")
    def _image(self) -> SandboxSection:
        if self.engine == "local" and self.base_image is not None:
            raise ValueError("base_image needs Docker: set engine to docker")
        if self.engine not in ("auto", "docker") and self.docker_host is not None:
            raise ValueError("docker_host needs Docker: set engine to docker")
        return self

    def engine_options(self) -> dict[str, Any]:
        """Keyword arguments of `open_engine`."""
        return {**self.options, **self.model_dump(exclude={"engine", "options"}, exclude_none=True)}


class EvaluationSection(Section):
    """Held-out evaluation during the run, concurrently with the training rollouts."""

    every: NonNegative = 10
    """Training steps between evaluations; 0: only at the start and the end."""
    num_tasks: Positive = 128
    """Held-out tasks, one episode each."""
    split: str = "eval"
    """Held-out split of the environment, which is never trained on."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """Sampling temperature; 0: greedy."""
    sampling: SamplingSection = SamplingSection()
    """Further sampling options of held-out replies: top_p, top_k, ..."""
    pinned: bool = True
    """Score a single policy version: the weights that serve an evaluation don't change until it is done. With one \
generator, weight updates wait for the evaluation; with several, one generator is reserved for it. Off: nothing waits, \
and a score mixes the policy versions that arrive in the meantime."""
    metric: str = "solved"
    """Metric of the environment used as the score (`solved`: pass@1); if there is no such metric, the reward."""
    opponents: dict[str, str | dict[str, Any]] | None = None
    """Opponents in held-out episodes, if different from environment.opponents."""
    extra_splits: list[str] = Field(default_factory=list)
    """Further splits, scored only at the start and the end."""
    extra_num_tasks: Positive = 64
    """Tasks of each extra split."""


class CheckpointSection(Section):
    """When the whole run is saved. Training continues during a save."""

    every: NonNegative = 0
    """Training steps between checkpoints; 0: by time only."""
    minutes: Annotated[float, Field(ge=0)] = 5.0
    """Maximum minutes between checkpoints; 0: no limit. A checkpoint is always saved at the end."""
    keep: Positive = 2
    """Number of most recent checkpoints to keep."""
    keep_best: NonNegative = 1
    """Number of checkpoints with the best held-out scores to keep in addition; a checkpoint is then saved for every \
evaluation. 0: keep only the most recent."""
    grace_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds from SIGTERM until the platform kills the run (Kubernetes: 30, `docker stop`: 10, Slurm: 30). The run \
ends within them: with a new checkpoint if the current step ends in time, else with the previous one. 0: no limit."""


class LoggingSection(Section):
    """Destinations of metrics besides metrics.jsonl, and recorded files."""

    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb: bool = False
    """Log to Weights & Biases (respects WANDB_MODE)."""
    loggers: list[str] = Field(default_factory=list)
    """Further loggers: `trackio`, `mlflow`, `prometheus`, `opentelemetry`, other installed ones (entry points \
`forge_env.loggers`), or `module:Class`."""
    trajectories: Literal["all", "eval", "none"] = "all"
    """Which trajectories are written to the run folder."""
    timeline: bool = True
    """Write timeline.json, every actor's activity over time, for Perfetto."""


class WatchdogSection(Section):
    """Reaction to lack of progress (no token sampled, no episode ended, no step trained) or of memory."""

    warn_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds without progress until a warning names the stuck part."""
    end_s: Annotated[float, Field(ge=0)] = 900.0
    """Seconds without progress until the run fails with that diagnosis; 0: never."""
    free_memory_gb: Annotated[float, Field(ge=0)] = 0.5
    """Start no new episodes while less memory than this is free, in GiB, on this machine or in its control group; \
0: no minimum."""

    @model_validator(mode="after")
    def _order(self) -> WatchdogSection:
        if 0 < self.end_s < self.warn_s:
            raise ValueError("end_s is below warn_s, so the run would end before the warning: lower warn_s too")
        return self


class RunConfig(Section):
    """A whole run."""

    name: str | None = None
    """Name of the run's folder in `output_dir`; unset: the recipe's file name and the time."""
    output_dir: str = "runs"
    """Folder in which run folders are created."""
    seed: Seed = 0
    """Seed of weights, demonstrations, sampling and minibatches. The seed of tasks is `environment.options.seed`."""
    method: str = "grpo"
    """The algorithm that runs the recipe: an entry point in `forge_env.trainers`, or `module:function`."""
    environment: EnvironmentSection = Field(examples=["{name: coding_rlvr}"])
    """The environment to train on."""
    tasks: TasksSection = TasksSection()
    """Order of the training tasks."""
    rollouts: RolloutsSection = RolloutsSection()
    """The rollout workers, which run the episodes."""
    sandbox: SandboxSection = SandboxSection()
    """The sandboxes, in which model-written code runs."""
    model: ModelSection = ModelSection()
    """The model."""
    lora: LoRASection | None = None
    """Train low-rank adapters; unset: all weights are trained. `lora={}` uses the defaults."""
    warmup: WarmupSection | None = None
    """Supervised warm-up before RL; unset: no warm-up."""
    generator: GeneratorSection = GeneratorSection()
    """The generators."""
    trainer: TrainerSection = TrainerSection()
    """The trainer."""
    weights: WeightsSection = WeightsSection()
    """Transfer of new weights from the trainer to the generators."""
    grpo: GRPOSection = GRPOSection()
    """The asynchronous loop."""
    sft: SFTSection = SFTSection()
    """Supervised fine-tuning."""
    evaluation: EvaluationSection = EvaluationSection()
    """Held-out evaluation."""
    checkpoint: CheckpointSection = CheckpointSection()
    """Checkpoints."""
    logging: LoggingSection = LoggingSection()
    """Logs."""
    watchdog: WatchdogSection = WatchdogSection()
    """Reaction to lack of progress or of memory."""
    job: JobSection = JobSection()
    """Machines of the run."""

    @property
    def rolls_out(self) -> bool:
        """Whether the method runs episodes, and so needs generators, rollout workers and a buffer."""
        return self.method not in ("sft", "warmup")

    @property
    def has_reference(self) -> bool:
        """Whether the reference model needs its own processes.

        With LoRA, `source: initial` needs none: the trainer's frozen weights without adapters are the initial policy.
        """
        source = self.grpo.reference.source
        return source != "none" and (self.lora is None or source != "initial")

    @model_validator(mode="after")
    def _several_hosts(self) -> RunConfig:
        for role, section in (("generator", self.generator), ("trainer", self.trainer)):
            if section.hosts > 1 and self.job.kind == "local":
                raise ValueError(f"{role}.hosts={section.hosts} needs several hosts: set job.kind")
        return self

    @model_validator(mode="after")
    def _gpus_of_this_machine(self) -> RunConfig:
        sections = {"generator": self.generator, "trainer": self.trainer}
        reference = self.grpo.reference
        if not self.rolls_out:
            del sections["generator"]
        unset = [name for name, section in sections.items() if "with_gpus" not in section.model_fields_set]
        if not unset or self.job.kind != "local" or machine.torch_build() not in ("cuda", "rocm"):
            return self
        if not (gpus := len(machine.gpus())):
            return self
        for name in unset:
            # GPUs ignore the threads of a recipe for CPUs; a reference model on the CPU needs the trainer's
            keep = name == "trainer" and self.has_reference and not reference.with_gpus and reference.procs == 1
            threads = {} if keep else {"threads": 1}
            setattr(self, name, sections[name].model_copy(update={"with_gpus": True, **threads}))
        wanted = self.generator.num_replicas * self.generator.procs * self.rolls_out + self.trainer.procs
        if len(unset) == 2 and gpus < wanted and "share_gpus" not in self.job.model_fields_set:
            self.job = self.job.model_copy(update={"share_gpus": True})
        return self
